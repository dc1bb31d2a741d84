"""Takes part in a run whose processes torchrun has started, instead of starting any."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from dpexp import env
from dpexp.files import claim
from dpexp.records import ErrorRecord, RunResult
from dpexp.results import without_steps

if TYPE_CHECKING:
    from dpexp.worker import RankJob


def shared_folder(outer: env.OuterLauncher, base: str) -> str:
    """A run folder below `base` that all ranks of this launch agree on and no other launch has.

    The ranks of one host have one parent, torchrun's agent: its start and its process id tell
    launches apart. No torch here, and no communication: it is needed to compose the config.
    """
    agent = psutil.Process().parent()
    if agent is None:
        return str(Path(base) / outer.run_id)
    started = time.localtime(agent.create_time())
    return str(
        Path(base)
        / time.strftime("%Y-%m-%d", started)
        / f"{time.strftime('%H-%M-%S', started)}-{agent.pid:x}"
    )


def join(job: RankJob, outer: env.OuterLauncher) -> RunResult | None:
    """Be one rank of the outer launcher's group.

    Returns:
        The run's result on rank 0, None on the others. Does not return when this rank fails: the
        first one that does writes ``run.json``, and torchrun ends the others.
    """
    from dpexp import rank
    from dpexp.lifeline import Lifeline

    def keep(error: ErrorRecord) -> None:
        failed = without_steps(job.plan, job.environment, "failed", error)
        text = json.dumps(failed.to_dict(), indent=2, allow_nan=False) + "\n"
        if claim(job.folder / "run.json", text):
            print(f"rank {error.rank}: {error.message}", flush=True)

    Lifeline().start()
    return rank.guarded(job, outer.rank, keep)
