"""Starts the ranks of a run with torch's elastic agent and waits for their result."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from dpexp import env, network, rank, server
from dpexp.agent import Agent
from dpexp.beacon import BEGAN, WIDTH, own_cells
from dpexp.causes import root_cause
from dpexp.failures import LATE_PEER
from dpexp.logs import append, quiet_torch
from dpexp.records import ErrorRecord, RankResult, RunResult, rank_result_from
from dpexp.restarting import Attempts
from dpexp.results import ended_early
from dpexp.sinks import write_shapes
from dpexp.stopping import (
    Stop,
    StopAtOnceError,
    heeding,
    holding,
    ignored,
    killing,
    listening,
    taken,
)
from dpexp.watchdog import Watchdog
from dpexp.worker import RankJob


class LaunchInterruptedError(Exception):
    """A signal ended the run; its ranks are gone and `result` says so."""

    def __init__(self, signum: int, result: RunResult) -> None:
        self.signum = signum
        self.result = result
        super().__init__(result.error and result.error.message)


def launch(job: RankJob, user_dir: Path) -> RunResult:
    """Run all ranks of `job` to their end.

    Returns:
        The run's result; a failure of a rank is a result too, and so is one to start them.

    Raises:
        LaunchInterruptedError: SIGINT, SIGTERM or SIGHUP came; no rank is left. Its result is that
            of the run where that had come to its end already.
        StopAtOnceError: a second one came; no rank is left.
    """
    quiet_torch()
    ranks = job.plan.num_processes
    # What is done with ranks that have ended is done whole: a result is never lost to a signal.
    with listening(), _nothing_left(), holding():
        beacon = multiprocessing.get_context(server.method()).RawArray("q", WIDTH * ranks)
        attempts = Attempts(job, lambda: own_cells(beacon, 0)[BEGAN] / 1e6)
        while True:
            for index in range(len(beacon)):
                beacon[index] = 0
            try:
                result = _attempt(job, user_dir, beacon)
            except LaunchInterruptedError as stop:
                raise LaunchInterruptedError(stop.signum, attempts.told(stop.result)) from None
            if attempts.again(result):
                continue
            result = attempts.told(result)
            if (signum := taken()) is not None:
                raise LaunchInterruptedError(signum, result)
            return result


def _attempt(job: RankJob, user_dir: Path, beacon: Any) -> RunResult:
    try:
        with tempfile.TemporaryDirectory(prefix="dpexp-", ignore_cleanup_errors=True) as place:
            return _launched(job, user_dir, Path(place), beacon)
    except LaunchInterruptedError:
        raise
    except Exception as error:  # noqa: BLE001  # no process, no room, no port, a broken server
        told = str(error) or type(error).__name__
        text = f"the processes of the run could not be started or watched: {told}"
        full = "".join(traceback.format_exception(error))
        name = type(error).__name__
        record = ErrorRecord("crash", name, text, traceback=full, phase="launch")
        with contextlib.suppress(OSError):  # the traceback is in run.json as well
            append(job.folder, full)
        return _early(job, "failed", record, [])


def _launched(job: RankJob, user_dir: Path, scratch: Path, beacon: Any) -> RunResult:
    ranks = job.plan.num_processes
    devices = env.showing(job.plan.claimed_devices)
    # One machine talks to itself: over loopback, unless the user named an interface.
    variables = env.filled_in(network.variables_of(None, one_host=True)) | devices
    launched = rank.LaunchedRank(job, variables, user_dir, scratch, rank.Stdio(), beacon, ignored())
    watchdog = Watchdog(beacon, ranks, scratch, job.plan.config.watchdog_s)
    agent = Agent(launched, ranks, watchdog)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        try:
            with env.torch_leaves_signals(), killing(agent.kill), heeding():
                ended = agent.run()
        finally:
            with killing(agent.kill):
                agent.end_left()
    except StopAtOnceError:
        agent.close()
        raise
    except Stop as stop:
        first = watchdog.positions()[0]
        error = ErrorRecord(
            "interrupted",
            "Signal",
            str(stop),
            rank=first.rank,
            step=first.step,
            phase=first.phase,
            during=first.during,
        )
        raise LaunchInterruptedError(
            stop.signum, _early(job, "interrupted", error, _read_partials(scratch))
        ) from None
    if not ended.is_failed():
        return cast(RunResult, ended.return_values[0])
    return _early(job, "failed", _why(job, agent, watchdog, scratch), _read_partials(scratch))


def _why(job: RankJob, agent: Agent, watchdog: Watchdog, scratch: Path) -> ErrorRecord:
    if watchdog.found_hanging:
        error = watchdog.hang()
    else:
        error = root_cause(_read_records(scratch), agent.exit_codes, watchdog.positions())
        if error.type == LATE_PEER:
            error = watchdog.located(error)
    if error.stacks:
        texts = [f"Stacks of rank {rank}:\n{text}" for rank, text in error.stacks.items()]
        with contextlib.suppress(OSError):  # they are in run.json as well
            append(job.folder, "\n".join([error.message, *texts]))
    return error


@contextmanager
def _nothing_left() -> Iterator[None]:
    """End the processes of a start that failed half-way, of which the agent does not know."""
    before = set(multiprocessing.active_children())
    try:
        yield
    finally:
        for process in set(multiprocessing.active_children()) - before:
            process.kill()
            process.join()


def _early(job: RankJob, status: str, error: ErrorRecord, partial: list[RankResult]) -> RunResult:
    """The result of a run without its end, with the shapes that were seen."""
    shapes = [record for rank in partial for record in rank.shapes]
    if shapes:
        with contextlib.suppress(OSError):  # why the run ended is told, room for it or not
            write_shapes(job.folder / "shapes.csv", shapes)
    return ended_early(job.plan, job.environment, status, error, partial)


def _read_records(scratch: Path) -> dict[int, ErrorRecord]:
    records = [ErrorRecord(**last["error"]) for last in _last_words(scratch)]
    return {record.rank: record for record in records if record.rank is not None}


def _read_partials(scratch: Path) -> list[RankResult]:
    known = [rank_result_from(last["partial"]) for last in _last_words(scratch) if last["partial"]]
    return sorted(known, key=lambda result: result.rank)


def _last_words(scratch: Path) -> list[dict[str, Any]]:
    """What the ranks that ended early have left (see rank.main), of each the last, by rank."""
    path = scratch / rank.LAST_WORDS
    # What follows the last line break is of a rank that was killed in the middle of it.
    lines = path.read_text("utf-8").split("\n")[:-1] if path.exists() else []
    by_rank = {word["error"]["rank"]: word for word in map(json.loads, lines)}
    return [by_rank[number] for number in sorted(by_rank)]
