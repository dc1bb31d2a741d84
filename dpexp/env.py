"""The only place that reads environment variables. No torch here."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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
_TYPED = "DPEXP_TYPED"
_SWEEP = "DPEXP_SWEEP"
_FROM_SLURM = "DPEXP_RANK_FROM_SLURM"

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
    if any(name not in os.environ for name in names):
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
        agents_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


@dataclass(frozen=True)
class SlurmStep:
    """What srun told this process about its place among the tasks that it has started."""

    job_id: int
    step_id: int
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    nodes: str  # in Slurm's form


def slurm_step() -> SlurmStep | None:
    """The step of Slurm that this process is a task of; None where srun has not started it.

    In a shell of an allocation (salloc, a batch script) there is a job, but no step; in one that
    srun has opened on a terminal there is a step, and nothing tells it from any other task.
    """
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
    sizes = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST")
    if any(name not in os.environ for name in (*names, *sizes)):
        return None
    job_id, step_id, rank, local_rank, node = (int(os.environ[name]) for name in names)
    world_size, counts, nodes = (os.environ[name] for name in sizes)
    return SlurmStep(
        job_id=job_id,
        step_id=step_id,
        rank=rank,
        local_rank=local_rank,
        world_size=int(world_size),
        local_world_size=_tasks_per_node(counts)[node],
        nodes=nodes,
    )


def _tasks_per_node(counts: str) -> list[int]:
    """Slurm's ``2(x3),1`` as a list: 2, 2, 2, 1."""
    found = []
    for part in counts.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        found += [int(count)] * int(times or 1)
    return found


def slurm_job() -> str | None:
    """The Slurm job that this process belongs to: ``7``, or ``7_0`` in an array; or None."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    # An array and one of its jobs have the same number.
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID") or None


def slurm_tasks() -> int:
    """How many tasks the Slurm job of this process has, by its variables; 1 where there is none."""
    raw = os.environ.get("SLURM_NTASKS", "1")
    return int(raw) if slurm_job() is not None and raw.isdigit() else 1


def in_submitit_job() -> bool:
    """Whether submitit's script for Slurm has started this process."""
    return os.environ.get("SUBMITIT_EXECUTOR") == "slurm"


def take_rank(step: SlurmStep, address: Callable[[], str], port: int) -> OuterLauncher:
    """Set torchrun's variables for this process as Slurm's say it: from here on it is a rank.

    Args:
        address: of the first node; called where MASTER_ADDR is not set.
        port: used where MASTER_PORT is not set.
    """
    if os.environ.get(_FROM_SLURM) != "1":
        os.environ.update(
            {
                "MASTER_ADDR": os.environ.get("MASTER_ADDR") or address(),
                "MASTER_PORT": os.environ.get("MASTER_PORT") or str(port),
                _FROM_SLURM: "1",
                "RANK": str(step.rank),
                "LOCAL_RANK": str(step.local_rank),
                "WORLD_SIZE": str(step.world_size),
                "LOCAL_WORLD_SIZE": str(step.local_world_size),
                "TORCHELASTIC_RUN_ID": f"slurm-{step.job_id}.{step.step_id}",
            }
        )
        # Rank 0 holds the store: there is no agent, whatever another launcher has left here.
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    outer = outer_launcher()
    assert outer is not None
    return outer


def ranks_are_slurms() -> bool:
    """Whether this process is a rank by :func:`take_rank`, and not by torchrun."""
    return os.environ.get(_FROM_SLURM) == "1"


def usable_cores() -> int:
    """Cores this process may use: the affinity mask where there is one, else all of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def requested_threads() -> int | None:
    """OMP_NUM_THREADS as the user set it, or None. A list ("4,2") counts by its first entry."""
    raw = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(raw) if raw.isdigit() and int(raw) > 0 else None


def socket_interface() -> str | None:
    """The network interface the user chose for gloo, or None."""
    return os.environ.get("GLOO_SOCKET_IFNAME") or None


def take_over_hydra_errors() -> None:
    """Let Hydra raise its errors instead of printing them, and remember what the user wanted.

    HYDRA_FULL_ERROR=1 is Hydra's only switch for that.
    """
    os.environ.setdefault(_WANTED, os.environ.get(_HYDRA, "0"))
    os.environ[_HYDRA] = "1"


@contextmanager
def torch_leaves_signals() -> Iterator[None]:
    """Keep torch's elastic agent from handlers of its own.

    It would also take over signals that this process was started to ignore, for good.
    """
    before = os.environ.get(_AGENT_SIGNALS)
    os.environ[_AGENT_SIGNALS] = ""
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_AGENT_SIGNALS, None)
        else:
            os.environ[_AGENT_SIGNALS] = before


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


def protect_ray() -> None:
    """Before Ray is imported: who connects needs a token, which no file holds.

    Ray's services listen on every interface, and without a token they run what anybody sends.
    Also, its use is reported to nobody. What the user has set stays.
    """
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
