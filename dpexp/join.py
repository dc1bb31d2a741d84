"""Takes part in a run whose processes torchrun has started, instead of starting any."""

from __future__ import annotations

from dataclasses import replace

from dpexp import env, rank
from dpexp.console import show_failure
from dpexp.failures import LATE_PEER, LOST_PEER
from dpexp.files import claim
from dpexp.lifeline import Lifeline
from dpexp.loop import Progress
from dpexp.records import ErrorRecord, RankResult, RunResult
from dpexp.results import ended_early
from dpexp.slurm import explained
from dpexp.stopping import ignored
from dpexp.worker import RankJob


def join(job: RankJob, outer: env.OuterLauncher) -> RunResult | None:
    """Be one rank of the outer launcher's group.

    Returns:
        The run's result on rank 0, None on the others. Does not return when this rank fails: the
        first one that does writes ``run.json``, and torchrun ends the others.
    """

    def keep(error: ErrorRecord, partial: RankResult | None) -> None:
        if error.phase == "set-up" and error.type in (LATE_PEER, LOST_PEER, "DistNetworkError"):
            error = replace(error, message=f"{error.message.rstrip('.')}. {_told_by(outer)}")
        status = "interrupted" if error.kind == "interrupted" else "failed"
        known = [] if partial is None else [partial]
        ended = explained(ended_early(job.plan, job.environment, status, error, known))
        if claim(job.folder / "run.json", ended.to_json()):
            show_failure(ended, job.folder)

    Lifeline(ignored()).start()
    return rank.guarded(job, outer.rank, Progress(), keep)


def _told_by(outer: env.OuterLauncher) -> str:
    """Why this process waits for others at all."""
    return (
        f"This process is rank {outer.rank} of {outer.world_size} of torchrun's run "
        f"{outer.run_id!r}, by the variables TORCHELASTIC_RUN_ID, RANK, WORLD_SIZE, MASTER_ADDR "
        "and MASTER_PORT. If no torchrun runs, they are left over: unset TORCHELASTIC_RUN_ID"
    )
