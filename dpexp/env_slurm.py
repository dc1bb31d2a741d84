"""Slurm's environment variables, the way env.py reads all others. No torch here."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from dpexp import env


@dataclass(frozen=True)
class Step:
    """What srun told this process about its place among the tasks that it has started."""

    job_id: int
    step_id: int
    rank: int
    local_rank: int
    node: int  # its number, among those of the step
    world_size: int
    local_world_size: int
    nodes: str  # in Slurm's form


def step() -> Step | None:
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
    return Step(
        job_id=job_id,
        step_id=step_id,
        rank=rank,
        local_rank=local_rank,
        node=node,
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


def job() -> str | None:
    """The Slurm job that this process belongs to: ``7``, or ``7_0`` in an array; or None."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    # An array and one of its jobs have the same number.
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID") or None


def tasks() -> int:
    """How many tasks the Slurm job of this process has, by its variables; 1 where there is none."""
    raw = os.environ.get("SLURM_NTASKS", "1")
    return int(raw) if job() is not None and raw.isdigit() else 1


def in_submitit_job() -> bool:
    """Whether submitit's script for Slurm has started this process."""
    return os.environ.get("SUBMITIT_EXECUTOR") == "slurm"


def take_rank(place: Step, address: Callable[[], str], port: int) -> env.OuterLauncher:
    """Set torchrun's variables for this process as Slurm's say it: from here on it is a rank.

    Args:
        address: of the first node; called where MASTER_ADDR is not set.
        port: used where MASTER_PORT is not set.
    """
    if os.environ.get(env.FROM_SLURM) != "1":
        os.environ.update(
            {
                "MASTER_ADDR": os.environ.get("MASTER_ADDR") or address(),
                "MASTER_PORT": os.environ.get("MASTER_PORT") or str(port),
                env.FROM_SLURM: "1",
                "RANK": str(place.rank),
                "LOCAL_RANK": str(place.local_rank),
                "GROUP_RANK": str(place.node),
                "WORLD_SIZE": str(place.world_size),
                "LOCAL_WORLD_SIZE": str(place.local_world_size),
                "TORCHELASTIC_RUN_ID": f"slurm-{place.job_id}.{place.step_id}",
            }
        )
        # Rank 0 holds the store: there is no agent, whatever another launcher has left here.
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    outer = env.outer_launcher()
    assert outer is not None
    return outer
