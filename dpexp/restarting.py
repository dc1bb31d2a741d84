"""Starts all ranks of a run again after one was lost, from its last checkpoint.

Not by the elastic agent's own restarts: it would also start again after a mistake in the config,
and could not say which rank was lost the first time. Each attempt has an agent of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, final

from dpexp import checkpoint
from dpexp.console import say
from dpexp.records import ErrorRecord, RunResult
from dpexp.results import restarted
from dpexp.worker import RankJob

# A rank was lost: another attempt may go well. What went wrong in the code or in the model would
# come again, unless the run has come further since it began.
_ALWAYS = ("crash", "hang")
_AFTER_PROGRESS = ("oom", "user_error")


@final
class Attempts:
    """The attempts at one run.

    Args:
        first_step: when the first step of the attempt that is over began, in seconds of Unix time;
            0 if it did not.
    """

    def __init__(self, job: RankJob, first_step: Callable[[], float]) -> None:
        self._job, self._first_step = job, first_step
        self._left = job.plan.config.parallel.max_restarts
        self._started_s = time.time()
        self._failed_s: float | None = None
        self._causes: list[dict[str, Any]] = []
        self._lost_s = 0.0

    def again(self, result: RunResult) -> bool:
        """Whether the run is to be started again; then what the attempt has left lies aside."""
        self._count_waiting()
        error = result.error
        if result.status != "failed" or error is None or not self._left:
            return False
        found = checkpoint.newest(self._job.folder)
        came_further = found is not None and found.state["taken_unix_s"] > self._started_s
        if error.kind not in (*_ALWAYS, *(_AFTER_PROGRESS if came_further else ())):
            return False
        try:
            checkpoint.put_aside(self._job.folder)
        except OSError as problem:  # no room: then the run ends as it did
            say(f"note: not started again: {problem}")
            return False
        self._left -= 1
        step = 0 if found is None else found.step
        self._count_work(found)
        self._causes.append(_cause(error, step))
        most = self._job.plan.config.parallel.max_restarts
        say(
            f"note: {error.message.rstrip('.')}; all ranks start again from step {step} "
            f"(restart {len(self._causes)} of {most})"
        )
        self._started_s = time.time()
        return True

    def told(self, result: RunResult) -> RunResult:
        """The result with what was lost on the way to it; a save that was cut off is removed."""
        checkpoint.clear(self._job.folder)
        if not self._causes:
            return result
        count = len(self._causes)
        return restarted(result, {"count": count, "causes": self._causes, "lost_s": self._lost_s})

    def _count_waiting(self) -> None:
        """From the failure before to this attempt's first step, or to its end if it had none."""
        if self._failed_s is not None:
            self._lost_s += max(0.0, (self._first_step() or time.time()) - self._failed_s)

    def _count_work(self, found: checkpoint.Checkpoint | None) -> None:
        """What this attempt has done since its last checkpoint, and will be done again."""
        self._failed_s = time.time()
        begun_s = self._first_step()
        if begun_s:
            saved_s = 0.0 if found is None else found.state["taken_unix_s"]
            self._lost_s += max(0.0, self._failed_s - max(begun_s, saved_s))


def _cause(error: ErrorRecord, step: int) -> dict[str, Any]:
    return {
        "rank": error.rank,
        "kind": error.kind,
        "type": error.type,
        "message": error.message,
        "step": error.step,
        "gone_on_from": step,
    }
