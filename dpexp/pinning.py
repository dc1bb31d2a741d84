"""Which cores a run needs and how its ranks share them. Pure, but for a look below /sys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dpexp.errors import ConfigError

CPUS = Path("/sys/devices/system/cpu")


def threads_of(
    requested: int | None, cores: int, num_devices: int, num_processes: int, *, core_each: bool
) -> int:
    """Threads of each process.

    Args:
        requested: OMP_NUM_THREADS as the user set it, or None.
        cores: that all processes may use together.
        core_each: a device is a core; else the processes share all cores.
    """
    if requested is not None:
        return requested
    return num_devices // num_processes if core_each else max(1, cores // num_processes)


def cores_needed(threads: int, num_devices: int, num_processes: int) -> int:
    """Cores on which no thread of a run waits for another one of it.

    Args:
        threads: of each process; dp has a thread for each of its devices beside them.
    """
    return num_processes * max(threads, num_devices // num_processes)


def check_pin(
    device_type: str, needed: int, cpus: Sequence[int], outer_world_size: int | None
) -> None:
    """Refuse `pin=true` where nothing can be pinned.

    Args:
        needed: cores of the run.
        cpus: that this process may use; () where the system does not say.

    Raises:
        ConfigError: see the message.
    """
    if outer_world_size is not None:
        problem, fix = "the ranks are another launcher's, which places them", "pin=false"
    elif device_type != "cpu":
        problem = f"cores are pinned for runs on a CPU; the device here is {device_type}"
        fix = "pin=false, or device=cpu"
    elif not cpus:
        problem, fix = "this system cannot keep a process on some cores", "pin=false"
    elif needed > len(cpus):
        problem = f"the run needs {needed} cores and may use {len(cpus)}"
        fix = "fewer num_devices, a smaller OMP_NUM_THREADS, or pin=false"
    else:
        return
    raise ConfigError("pin", True, problem, fix=fix)


def shares(cores: Sequence[int], num_processes: int) -> tuple[tuple[int, ...], ...]:
    """Each rank's part of a run's cores, in order; () where none are pinned."""
    each = len(cores) // num_processes
    return tuple(
        tuple(cores[rank * each : (rank + 1) * each]) for rank in range(num_processes) if each
    )


def whole_first(cpus: Sequence[int], root: Path = CPUS) -> tuple[int, ...]:
    """The CPUs, one of each physical core before the second one of any.

    Where the system does not tell which of them are one core, they stay in order.
    """
    seen: dict[str, int] = {}
    place: dict[int, int] = {}
    for cpu in sorted(cpus):
        path = root / f"cpu{cpu}/topology/thread_siblings_list"
        try:
            core = path.read_text(encoding="ascii").strip()
        except OSError:
            core = f"cpu{cpu}"
        place[cpu] = seen.get(core, 0)
        seen[core] = place[cpu] + 1
    return tuple(sorted(place, key=lambda cpu: (place[cpu], cpu)))
