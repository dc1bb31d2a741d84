"""What the system tells about its CPUs at one moment.

What cannot be read is None, with the reason beside it, and never 0.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from dpexp.nvml import Nvml


def look(
    nvml: Nvml | None, pids: list[int], root: Path = Path("/"), cpus: Sequence[int] = ()
) -> Snapshot:
    """A snapshot now.

    Args:
        nvml: of the run's devices; None without them.
        pids: of the run's processes, as far as they are known.
        root: of the file system, for tests.
        cpus: those that count; () = all that this process may use.
    """
    reasons: dict[str, str] = {}

    def read(name: str, source: Callable[[], Any]) -> Any:
        try:
            return source()
        except Exception as error:  # noqa: BLE001  # psutil's errors differ from system to system
            reasons[name] = str(error) or type(error).__name__
            return None

    busy, steal = read("busy_core_s", lambda: _busy(cpus)) or (None, None)
    if busy is not None and steal is None:
        reasons["steal_core_s"] = "this system does not count it"
    elif steal is None:
        reasons["steal_core_s"] = reasons["busy_core_s"]
    return Snapshot(
        cpu_mhz=read("cpu_mhz", _fastest),
        temperatures_c=read("temperatures_c", _temperatures),
        throttled=read("throttled", lambda: _throttled(root)),
        cgroup_throttled=read("cgroup_throttled", lambda: _cgroup_throttled(root)),
        load_1min=read("load_1min", lambda: os.getloadavg()[0]),
        busy_core_s=busy,
        steal_core_s=steal,
        devices=[] if nvml is None else nvml.states(pids),
        reasons=reasons,
    )


def own_core_s() -> float:
    """CPU seconds of this process, of its children that have ended, and of its loader processes.

    Other programs that the user's code has started count when they have ended.
    """
    used = 0.0
    for child in multiprocessing.active_children():
        try:
            times = psutil.Process(child.pid).cpu_times()
            used += times.user + times.system + times.children_user + times.children_system
        except psutil.Error:
            continue  # it has ended since, and counts among the ended ones
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        used += usage.ru_utime + usage.ru_stime
    return used


def own_cpus() -> list[int]:
    """The CPUs that this process may use; [] where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _of_own(values: list[Any], cpus: Sequence[int] = ()) -> list[Any]:
    own = [values[cpu] for cpu in cpus or own_cpus() if cpu < len(values)]
    return own or values


def _busy(cpus: Sequence[int]) -> tuple[float, float | None]:
    """Core seconds since boot: busy, and taken by the hypervisor."""
    times = _of_own(psutil.cpu_times(percpu=True), cpus)
    # Guests are in `user` already, and `iowait` is idle time.
    names = ("user", "nice", "system", "irq", "softirq")
    busy = sum(getattr(each, name, 0.0) for each in times for name in names)
    steal = [each.steal for each in times if hasattr(each, "steal")]
    return busy, sum(steal) if steal else None


def _fastest() -> float:
    if not hasattr(psutil, "cpu_freq"):
        raise LookupError("psutil does not know it on this system")
    clocks = [each.current for each in _of_own(psutil.cpu_freq(percpu=True) or []) if each.current]
    if not clocks:
        raise LookupError("the system does not tell the CPU's clock")
    return float(max(clocks))


def _temperatures() -> dict[str, float]:
    if not hasattr(psutil, "sensors_temperatures"):
        raise LookupError("psutil does not know it on this system")
    hottest = {
        chip: max(each.current for each in sensors if each.current is not None)
        for chip, sensors in psutil.sensors_temperatures().items()
        if any(each.current is not None for each in sensors)
    }
    if not hottest:
        raise LookupError("the system shows no temperature sensor (usual in a virtual machine)")
    return hottest


def _throttled(root: Path) -> dict[str, int]:
    base, counts = root / "sys/devices/system/cpu", {}
    for kind in ("core", "package"):
        found = sorted(base.glob(f"cpu[0-9]*/thermal_throttle/{kind}_throttle_count"))
        if found:
            counts[kind] = sum(int(path.read_text()) for path in found)
    if not counts:
        raise LookupError("the kernel shows no throttle counts (only Intel's CPUs have them)")
    return counts


def _cgroup_throttled(root: Path) -> int:
    """Periods in which this process's control group had used up its quota; version 2, then 1."""
    own: dict[str, str] = {}
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own |= {name: path.lstrip("/") for name in controllers.split(",")}
    base = root / "sys/fs/cgroup"
    places = [base / own.get("", ""), base, base / "cpu" / own.get("cpu", ""), base / "cpu"]
    for place in places:
        stat = place / "cpu.stat"
        if not stat.is_file():
            continue
        for line in stat.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "nr_throttled":
                return int(value)
    raise LookupError("no control group with a CPU quota")


@dataclass(frozen=True)
class Snapshot:
    """One look at the machine. None: not readable, see `reasons`."""

    cpu_mhz: float | None = None  # of the fastest core that this process may use
    temperatures_c: dict[str, float] | None = None  # the hottest sensor of each chip
    throttled: dict[str, int] | None = None  # the kernel's counts, summed over logical CPUs
    cgroup_throttled: int | None = None  # periods in which a CPU quota ran out
    load_1min: float | None = None
    busy_core_s: float | None = None  # since boot, over the cores that this process may use
    steal_core_s: float | None = None  # that the hypervisor gave to others meanwhile
    devices: list[dict[str, Any]] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
