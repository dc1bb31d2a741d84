"""The only place that reads environment variables. No torch here."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dpexp.leftover import left_over

# Saved with every run, as found: they change what a measurement means.
RECORDED = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "SLURM_JOB_ID",
)

# A launcher of Hydra's may set these for its cells; see changed_by_launcher.
_FOLLOWED = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
_DEVICES = "CUDA_VISIBLE_DEVICES"
_TYPED = "DPEXP_TYPED"
_SWEEP = "DPEXP_SWEEP"
FROM_SLURM = "DPEXP_RANKFROM_SLURM"

_HYDRA = "HYDRA_FULL_ERROR"
_WANTED = "DPEXP_FULL_ERROR"
_AGENT_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"


@dataclass(frozen=True)
class OuterLauncher:
    """What torchrun (or another elastic agent) told this process about its place."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int  # ranks that one agent has started on this host
    run_id: str
    master_addr: str
    master_port: int
    host: int = 0  # which of the run's hosts, or of torchrun's agents
    agents_store: bool = False  # whether an agent holds the store at that address; else rank 0

    @property
    def name(self) -> str:
        """Who started this process as a rank."""
        return "Slurm" if ranks_are_slurms() else "torchrun"

    @property
    def several_agents(self) -> bool:
        """Whether ranks of this run have been started by another process too: on other hosts."""
        return self.local_world_size < self.world_size


def outer_launcher() -> OuterLauncher | None:
    """The outer launcher's view of this process, or None when nobody launched it as a rank.

    Only torchrun's own variables count. Those of Slurm or MPI alone do not: they are also set
    in an interactive shell, where waiting for other tasks would never end.
    """
    names = (
        "TORCHELASTIC_RUN_ID",
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    if any(name not in os.environ for name in names) or left_over(os.environ):
        return None
    world_size = int(os.environ["WORLD_SIZE"])
    return OuterLauncher(
        rank=int(os.environ["RANK"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        world_size=world_size,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
        run_id=os.environ["TORCHELASTIC_RUN_ID"],
        master_addr=os.environ["MASTER_ADDR"],
        master_port=int(os.environ["MASTER_PORT"]),
        host=int(os.environ.get("GROUP_RANK") or 0),
        agents_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def ranks_are_slurms() -> bool:
    """Whether this process is a task of srun, and a rank by that, and not by torchrun."""
    return os.environ.get(FROM_SLURM) == "1"


def own_rank() -> int:
    """In a process that dpexp's agent has started: its rank."""
    return int(os.environ["RANK"])


def usable_cores() -> int:
    """Cores this process may use: the affinity mask where there is one, else all of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def requested_threads() -> int | None:
    """OMP_NUM_THREADS as the user set it, or None. A list ("4,2") counts by its first entry."""
    raw = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(raw) if raw.isdigit() and int(raw) > 0 else None


def visible_devices() -> str | None:
    """CUDA_VISIBLE_DEVICES as it is set, or None."""
    return os.environ.get(_DEVICES)


def devices_given_out() -> bool:
    """Whether torchrun, Slurm or Ray has chosen this process's devices: then they are its own."""
    names = ("SLURM_JOB_ID", "RAY_RAYLET_PID")
    return outer_launcher() is not None or any(name in os.environ for name in names)


def socket_interface() -> str | None:
    """The network interface the user chose for gloo, or None."""
    return os.environ.get("GLOO_SOCKET_IFNAME") or None


def socket_interfaces() -> dict[str, str]:
    """The variables by which the user has chosen a network interface for gloo and NCCL."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def fill_in(variables: dict[str, str]) -> None:
    """Set variables of this process; what the user has set stands."""
    os.environ.update(filled_in(variables))


def filled_in(variables: dict[str, str]) -> dict[str, str]:
    """A snapshot with `variables` in it, where the user has not set them; empty is not set."""
    lacking = {name: value for name, value in variables.items() if not os.environ.get(name)}
    return snapshot() | lacking


def take_over_hydra_errors() -> None:
    """Let Hydra raise its errors instead of printing them, and remember what the user wanted.

    HYDRA_FULL_ERROR=1 is Hydra's only switch for that.
    """
    os.environ.setdefault(_WANTED, os.environ.get(_HYDRA, "0"))
    os.environ[_HYDRA] = "1"


def showing(devices: tuple[str, ...]) -> dict[str, str]:
    """What lets a process see these devices and no others; {} for () leaves it as it is."""
    return {_DEVICES: ",".join(devices)} if devices else {}


def with_threads(count: int) -> dict[str, str]:
    """What makes a process's ranks have so many threads each."""
    return {"OMP_NUM_THREADS": str(count)}


@contextmanager
def torch_leaves_signals() -> Iterator[None]:
    """Keep torch's elastic agent from handlers of its own.

    It would also take over signals that this process was started to ignore, for good. Other
    variables of its, left over from a run of torchrun, would have it listen on a pipe in a file
    or at a port.
    """
    before = {name: os.environ.pop(name) for name in _of_agents()}
    os.environ[_AGENT_SIGNALS] = ""
    try:
        yield
    finally:
        for name in _of_agents():
            del os.environ[name]
        os.environ.update(before)


def _of_agents() -> list[str]:
    return [name for name in os.environ if name.startswith(("TORCHELASTIC_", "TORCH_ELASTIC_"))]


def full_errors() -> bool:
    """Whether the user asked to see dpexp's own tracebacks (with Hydra's switch for it)."""
    return os.environ.get(_WANTED, os.environ.get(_HYDRA)) == "1"


def quiet_trackers() -> None:
    """Keep trackers from telling their makers of their use; what the user has set stands."""
    for name, value in {
        "DO_NOT_TRACK": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_LOGGING_LEVEL": "WARNING",
        "WANDB_ERROR_REPORTING": "false",
    }.items():
        os.environ.setdefault(name, value)


def spare_loopback_from_proxies() -> None:
    """Keep gRPC's calls to this machine from the proxy that http_proxy names.

    Of its three variables for that gRPC looks at the first one that is set.
    """
    names = ("no_grpc_proxy", "no_proxy", "NO_PROXY")
    before = next((os.environ[name] for name in names if os.environ.get(name)), "")
    spared = ",".join([*filter(None, [before]), "localhost", "127.0.0.1"])
    os.environ.update({"no_grpc_proxy": spared})


def snapshot() -> dict[str, str]:
    """A copy of the whole environment, to hand to processes forked from another one."""
    return dict(os.environ)


def restore(variables: dict[str, str]) -> None:
    """Make the environment exactly `variables` (in a rank: the launching process's)."""
    for name in set(os.environ) - set(variables):
        del os.environ[name]
    os.environ.update(variables)


def recorded() -> dict[str, str | None]:
    """The variables that belong in a run's record, raw; None where unset."""
    return {name: os.environ.get(name) for name in RECORDED}


def remember_typed() -> None:
    """Keep what the user set, for cells that another program starts: see changed_by_launcher."""
    os.environ[_TYPED] = json.dumps({name: os.environ.get(name) for name in _FOLLOWED})


def changed_by_launcher() -> dict[str, str]:
    """Variables that are not as they were where the command was typed, with their values now."""
    typed = json.loads(os.environ.get(_TYPED, "null"))
    if typed is None:
        return {}
    now = {name: os.environ.get(name) for name in _FOLLOWED}
    return {name: value or "" for name, value in now.items() if value != typed[name]}


def announce_sweep(host: str, pid: int, started_s: float) -> None:
    """Tell processes that a launcher starts from this one which process the sweep is."""
    os.environ[_SWEEP] = json.dumps([host, pid, started_s])


def sweep_process() -> tuple[str, int, float] | None:
    """Host, process id and start time of the process that the sweep is; None where not known."""
    told = json.loads(os.environ.get(_SWEEP, "null"))
    return None if told is None else (str(told[0]), int(told[1]), float(told[2]))


def of_the_sweep() -> dict[str, str]:
    """What :func:`changed_by_launcher` and :func:`sweep_process` read, for processes elsewhere."""
    return {name: os.environ[name] for name in (_TYPED, _SWEEP) if name in os.environ}


def protect_ray() -> None:
    """Before Ray is imported: who connects needs a token, which no file holds.

    Ray's services listen on every interface, and without a token they run what anybody sends.
    Also, its use is reported to nobody. What the user has set stays.
    """
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
