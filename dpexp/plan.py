"""From config and hardware facts to a :class:`RunPlan`, or a refusal. Pure; no torch.

Nothing is ever changed into something else: a contradiction is an error that names the key, the
value and the way out. What can be judged without the hardware is in check.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpexp.check_device import check_precision, check_preparation
from dpexp.check_measuring import check_ranks, check_sleeps, injected
from dpexp.errors import ConfigError
from dpexp.extra_work import extra_work
from dpexp.pinning import check_pin, cores_needed, shares, threads_of
from dpexp.plan_notes import plan_notes
from dpexp.schema import ONE_PROCESS, Config, Scaling, StrategyName

# Up to so many ranks each has files of its own; more share one per host.
MOST_RANK_FILES = 64


@dataclass(frozen=True)
class HardwareFacts:
    """What the machine offers, as far as a plan depends on it."""

    cores: int  # usable by this process
    accelerator: str | None  # the type torch sees: cuda, mps, xpu; None without one
    num_accelerators: int
    requested_threads: int | None = None  # OMP_NUM_THREADS as the user set it
    nccl: bool = False
    outer_world_size: int | None = None  # set when torchrun started this process, like the next:
    outer_local_size: int | None = None  # its processes on this host
    outer_name: str = "torchrun"  # or Slurm
    outer_first_rank: int = 0  # the rank of the first of them
    cpus: tuple[int, ...] = ()  # that this process may use; () where the system does not say
    # This run's alone (seats.py); () = none are claimed.
    claimed_cores: tuple[int, ...] = ()
    claimed_devices: tuple[str, ...] = ()  # as CUDA_VISIBLE_DEVICES names them


@dataclass(frozen=True)
class RunPlan:
    """Everything that is decided before a process is started. Picklable, plain."""

    config: Config
    label: str
    strategy: StrategyName
    device_type: str
    first_index: int  # of the first device of that type
    num_devices: int
    num_processes: int
    by_host: bool  # one table of steps per host, not per rank
    threads_per_process: int
    threads_per_replica: int
    batch_rows: int  # global
    batch_rows_per_device: int  # of the largest chunk
    emulated: bool
    backend: str | None
    parity_steps: int  # replayed against a single device before the run; 0 = none
    calibration_pairs: int  # of extra steps with and without gradient exchange; 0 = none
    counts_flops: bool
    notes: tuple[str, ...]
    devices_here: int  # on the host that this plan was made on: all, but where ranks are on others
    first_rank: int  # of those on this host
    pinned: tuple[tuple[int, ...], ...] = ()  # cores of each rank; () = all that it may use
    claimed_devices: tuple[str, ...] = ()  # all that the ranks see; () = what this process sees

    def cpus(self) -> tuple[int, ...]:
        """The cores that are this run's alone; () = it has none of its own."""
        return tuple(cpu for cores in self.pinned for cpu in cores)

    def device_of(self, rank: int) -> str:
        """The torch device string of the (first) device of a rank on this host."""
        if self.device_type in ("cpu", "mps"):
            return self.device_type
        return f"{self.device_type}:{self.index_of(rank)}"

    @property
    def processes_here(self) -> int:
        """Those on this host."""
        return 1 if self.strategy in ONE_PROCESS else self.devices_here

    def index_of(self, rank: int) -> int:
        """The number of that device among those of its host."""
        return self.first_index + rank - self.first_rank


def make_plan(config: Config, facts: HardwareFacts, *, in_sweep: bool = False) -> RunPlan:
    """Decide devices, processes, threads and batch sizes.

    Args:
        config: already accepted by :func:`dpexp.check.check`; `batch_size` is a number.
        facts: of the machine the run is for.
        in_sweep: a cell of a sweep, which checks and measures more unless told otherwise.

    Raises:
        ConfigError: the config asks for what this machine or torch cannot do.
    """
    strategy = config.parallel.strategy
    device_type, first_index = _device(config, facts)
    num_devices = resolve_num_devices(config.num_devices, strategy, device_type, first_index, facts)
    here = _devices_here(strategy, num_devices, facts)
    _check_count(config, facts, device_type, first_index, here)
    num_processes = 1 if strategy in ONE_PROCESS else num_devices
    check_sleeps(config, device_type)
    absent = check_ranks(config, num_devices, num_processes, in_sweep=in_sweep)
    disturbed = (f"injected: {text}" for text in injected(config, num_devices, num_processes))
    _check_launched(config, facts, num_devices, num_processes)
    check_precision(config, device_type)
    check_preparation(config, device_type)
    batch_rows = int(config.batch_size) * (num_devices if config.scaling is Scaling.weak else 1)
    batch_rows_per_device = -(-batch_rows // num_devices)  # of the largest chunk
    _check_rows(config, batch_rows_per_device)
    emulated = strategy is StrategyName.dp and device_type == "cpu"
    processes_here = 1 if strategy in ONE_PROCESS else here
    threads = threads_of(
        facts.requested_threads, facts.cores, here, processes_here, core_each=config.pin
    )
    if config.pin:
        needed = cores_needed(threads, num_devices, num_processes)
        check_pin(device_type, needed, facts.cpus, facts.outer_world_size)
    return RunPlan(
        config=config,
        label=f"{strategy.value}-n{num_devices}",
        strategy=strategy,
        device_type=device_type,
        first_index=0 if facts.claimed_devices else first_index,
        num_devices=num_devices,
        num_processes=num_processes,
        by_host=num_processes > MOST_RANK_FILES,
        threads_per_process=threads,
        threads_per_replica=max(1, threads // num_devices) if emulated else threads,
        batch_rows=batch_rows,
        batch_rows_per_device=batch_rows_per_device,
        emulated=emulated,
        backend=_backend(config, facts, device_type),
        **extra_work(config, device_type, num_processes, in_sweep),
        notes=(
            *plan_notes(config, facts.cores, device_type, num_devices, here, batch_rows),
            *absent,
            *disturbed,
        ),
        devices_here=here,
        first_rank=facts.outer_first_rank,
        pinned=shares(facts.claimed_cores, num_processes),
        claimed_devices=facts.claimed_devices,
    )


def _check_launched(
    config: Config, facts: HardwareFacts, num_devices: int, num_processes: int
) -> None:
    """Refuse another number of processes than the outer launcher has started."""
    if facts.outer_world_size is not None and facts.outer_world_size != num_processes:
        raise ConfigError(
            "num_devices",
            config.num_devices,
            f"{facts.outer_name} started {facts.outer_world_size} processes, "
            f"parallel={config.parallel.strategy.value} with {num_devices} devices needs "
            f"{num_processes}",
            fix=f"torchrun --nproc-per-node {num_processes}, or another num_devices"
            if facts.outer_local_size == facts.outer_world_size and facts.outer_name == "torchrun"
            else f"num_devices=auto, or other numbers for {facts.outer_name}",
        )


def _devices_here(strategy: StrategyName, num_devices: int, facts: HardwareFacts) -> int:
    """How many of the run's devices this host has: all, but where ranks are on others too."""
    if strategy in ONE_PROCESS or facts.outer_local_size is None:
        return num_devices
    return min(num_devices, facts.outer_local_size)


def resolve_num_devices(
    asked: int | str,
    strategy: StrategyName,
    device_type: str,
    first_index: int,
    facts: HardwareFacts,
) -> int:
    """`num_devices` with ``auto`` replaced by what the machine has (1 for `none`)."""
    if isinstance(asked, int):
        return asked
    if strategy is StrategyName.none:
        return 1
    if facts.outer_world_size is not None and strategy not in ONE_PROCESS:
        return facts.outer_world_size
    if device_type == "cpu":
        return facts.cores
    return max(1, facts.num_accelerators - first_index)


def first_index_of(device: str) -> int:
    """The number of the first device: the 1 of ``cuda:1``, else 0."""
    return int(device.split(":")[1]) if ":" in device else 0


def device_type_of(device: str, facts: HardwareFacts) -> str:
    """The type a valid device string stands for on this machine (not checked to exist)."""
    if device == "auto":
        return facts.accelerator or "cpu"
    return device.split(":", maxsplit=1)[0]


def _device(config: Config, facts: HardwareFacts) -> tuple[str, int]:
    device_type = device_type_of(config.device, facts)
    if device_type not in ("cpu", facts.accelerator):
        seen = facts.accelerator or "no accelerator"
        raise ConfigError(
            "device",
            config.device,
            f"{device_type.upper()} is not available here: torch sees {seen}",
            allowed="cpu" + (f", {facts.accelerator}" if facts.accelerator else ""),
            fix="device=auto",
        )
    index = first_index_of(config.device)
    if device_type != "cpu" and index >= facts.num_accelerators:
        raise ConfigError(
            "device",
            config.device,
            f"there are {facts.num_accelerators} devices of type {device_type}",
            allowed=f"{device_type}:0 to {device_type}:{facts.num_accelerators - 1}",
            fix=f"device={device_type}:0",
        )
    return device_type, index


def _check_count(
    config: Config, facts: HardwareFacts, device_type: str, first: int, count: int
) -> None:
    strategy = config.parallel.strategy
    if device_type == "cpu":
        return
    if device_type == "mps" and strategy is not StrategyName.none:
        raise ConfigError(
            "parallel",
            strategy.value,
            "torch has neither DataParallel nor a collective library for mps",
            allowed="none on mps",
            fix="parallel=none, or device=cpu",
        )
    if device_type == "xpu" and strategy is not StrategyName.none:
        raise ConfigError(
            "parallel",
            strategy.value,
            "dpexp uses one xpu device at most",
            allowed="none on xpu",
            fix="parallel=none, or device=cpu",
        )
    if first + count > facts.num_accelerators:
        there = facts.num_accelerators - first
        fix = f"num_devices={there}, or device=cpu"
        if facts.outer_local_size is not None and strategy not in ONE_PROCESS:
            fix = f"{there} processes a host from {facts.outer_name}, or device=cpu"
        raise ConfigError(
            "num_devices",
            count,
            f"starting at {device_type}:{first} there are {there} devices",
            allowed=f"1 to {there}",
            fix=fix,
        )


def _check_rows(config: Config, batch_rows_per_device: int) -> None:
    if config.accumulate > batch_rows_per_device:
        raise ConfigError(
            "accumulate",
            config.accumulate,
            f"a device has {batch_rows_per_device} rows in a step, fewer than micro-batches",
            allowed=f"1 to {batch_rows_per_device}",
            fix=f"accumulate={batch_rows_per_device}, or a larger batch_size",
        )


def _backend(config: Config, facts: HardwareFacts, device_type: str) -> str | None:
    asked = config.parallel.backend
    if asked is None:
        return None
    backend = {"cuda": "nccl"}.get(device_type, "gloo") if asked.value == "auto" else asked.value
    if backend == "nccl" and (device_type != "cuda" or not facts.nccl):
        raise ConfigError(
            "parallel.backend",
            backend,
            f"NCCL needs CUDA devices and a torch built with it; the device here is {device_type}",
            allowed="gloo",
            fix="parallel.backend=gloo",
        )
    return backend
