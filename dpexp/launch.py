"""Starts the ranks of a run with torch's elastic agent and waits for their result."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast, final

import torch.distributed
from torch.distributed.elastic.agent.server.api import RunResult as AgentResult
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from dpexp import env, rank, server
from dpexp.comm import loopback_interface
from dpexp.failures import LOST_PEER
from dpexp.lifeline import GRACE_S
from dpexp.logs import quiet_torch
from dpexp.records import ErrorRecord, RankResult, RunResult, rank_result_from
from dpexp.results import ended_early
from dpexp.sinks import write_shapes
from dpexp.timing import now_s
from dpexp.worker import RankJob

LOOPBACK = "127.0.0.1"
POLL_S = 0.02
# A poll takes time from the ranks where they use all cores, so a long run is polled less often:
# the end of a run is seen within this share of its length, and within so many seconds.
POLL_SHARE, POLL_LONGEST_S = 0.04, 0.3
# Longer than a rank gives itself to unwind after a signal.
SHUTDOWN_S = int(GRACE_S) + 2


class LaunchInterruptedError(Exception):
    """A signal ended the run; its ranks are gone and `result` says so."""

    def __init__(self, signum: int, result: RunResult) -> None:
        self.signum = signum
        self.result = result
        super().__init__(f"stopped by {signal.Signals(signum).name}")


def launch(job: RankJob, user_dir: Path) -> RunResult:
    """Run all ranks of `job` to their end.

    Returns:
        The run's result; a failure of a rank is a result too.

    Raises:
        LaunchInterruptedError: SIGINT, SIGTERM or SIGHUP came; no rank is left.
    """
    quiet_torch()
    variables = {**_network_variables(), **env.snapshot()}
    with tempfile.TemporaryDirectory(prefix="dpexp-") as name, _signals_restored():
        scratch = Path(name)
        launched = rank.LaunchedRank(job, variables, user_dir, scratch, rank.Stdio())
        agent = _Agent(_spec(job, launched))
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            ended = agent.run()
        except SignalException as stop:
            error = ErrorRecord("interrupted", "Signal", f"stopped by {stop.sigval.name}")
            raise LaunchInterruptedError(
                int(stop.sigval), _early(job, "interrupted", error, _read_partials(scratch))
            ) from None
        if not ended.is_failed():
            return cast(RunResult, ended.return_values[0])
        error = _root_cause(_read_records(scratch), agent.exit_codes)
        return _early(job, "failed", error, _read_partials(scratch))


def _early(job: RankJob, status: str, error: ErrorRecord, partial: list[RankResult]) -> RunResult:
    """The result of a run without its end, with the shapes that were seen."""
    shapes = [record for rank in partial for record in rank.shapes]
    if shapes:
        write_shapes(job.folder / "shapes.csv", shapes)
    return ended_early(job.plan, job.environment, status, error, partial)


@final
class _Loopback(StaticTCPRendezvous):
    """A rendezvous of one machine with itself.

    The store's socket is bound to loopback by us, since TCPStore would listen on every interface,
    and to a port the system picks, so that two runs never fight for one. Each round gets a store
    of its own: a restarted rank must not read the addresses of a dead one.
    """

    def next_rendezvous(self) -> RendezvousInfo:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind((LOOPBACK, 0))
        listener.listen(1024)
        port = listener.getsockname()[1]
        store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            timeout=self.timeout,
        )
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, port))


@final
class _Agent(LocalElasticAgent):
    """The elastic agent, which also notices a rank that left with exit status 0.

    For the library that is a success whose result is still to come: it would wait forever.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(
            spec,
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
            start_method=server.method(),
            shutdown_timeout=SHUTDOWN_S,
        )
        # Exit codes of the ranks that had ended by themselves when a failure was first seen.
        self.exit_codes: dict[int, int] = {}
        self._began_s = now_s()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # multiprocessing would import the main program again in each rank: that fails for one
        # read from stdin, and runs a script that has no `if __name__ == "__main__"` once more.
        # Nothing here needs it, since targets come from importable modules.
        hidden = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            started: dict[int, Any] = super()._start_workers(worker_group)
            return started
        finally:
            sys.modules["__main__"] = hidden

    def _monitor_workers(self, worker_group: WorkerGroup) -> AgentResult:
        elapsed_s = now_s() - self._began_s
        time.sleep(min(POLL_SHARE * elapsed_s, POLL_LONGEST_S))
        codes = self._ended_processes()
        result: AgentResult = super()._monitor_workers(worker_group)
        if result.state is WorkerState.HEALTHY:
            left = [local for local, code in codes.items() if code == 0]
            if left and not self._has_result(left[0]):
                self.exit_codes = codes
                failure = ProcessFailure(left[0], worker_group.workers[left[0]].id, 0, os.devnull)
                return AgentResult(state=WorkerState.FAILED, failures={left[0]: failure})
        if result.is_failed() and not self.exit_codes:
            first = {local: failure.exitcode for local, failure in result.failures.items()}
            self.exit_codes = {**first, **codes}
        return result

    def _ended_processes(self) -> dict[int, int]:
        context = getattr(self._pcontext, "_pc", None)
        processes = context.processes if context is not None else []
        return {i: p.exitcode for i, p in enumerate(processes) if p.exitcode is not None}

    def _has_result(self, local_rank: int) -> bool:
        return local_rank in getattr(self._pcontext, "_return_values", {})


def _spec(job: RankJob, launched: rank.LaunchedRank) -> WorkerSpec:
    return WorkerSpec(
        role="dpexp",
        local_world_size=job.plan.num_processes,
        entrypoint=rank.main,
        args=(launched,),
        rdzv_handler=_Loopback(LOOPBACK, 0, 0, 1, run_id="dpexp", timeout=60),
        max_restarts=0,
        monitor_interval=POLL_S,
        local_addr=LOOPBACK,
    )


def _network_variables() -> dict[str, str]:
    """One machine talks to itself: over loopback, unless the user named an interface."""
    interface = loopback_interface()
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


@contextmanager
def _signals_restored() -> Iterator[None]:
    """The agent replaces signal handlers for good; ours and the user's come back afterwards."""
    saved = {}
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        saved[signum] = signal.getsignal(signum)
    try:
        yield
    finally:
        for signum, handler in saved.items():
            with contextlib.suppress(ValueError):  # not in the main thread: never replaced
                signal.signal(signum, handler)


def _read_records(scratch: Path) -> dict[int, ErrorRecord]:
    records = [ErrorRecord(**last["error"]) for last in _last_words(scratch)]
    return {record.rank: record for record in records if record.rank is not None}


def _read_partials(scratch: Path) -> list[RankResult]:
    known = [rank_result_from(last["partial"]) for last in _last_words(scratch) if last["partial"]]
    return sorted(known, key=lambda result: result.rank)


def _last_words(scratch: Path) -> list[dict[str, Any]]:
    """What the ranks that ended early have left (see rank.main)."""
    return [json.loads(path.read_text()) for path in sorted(scratch.glob("rank*.json"))]


def _root_cause(records: dict[int, ErrorRecord], codes: dict[int, int]) -> ErrorRecord:
    """Of several ranks' ends, the one that caused the others.

    A rank that ended without a word was killed, or left by os._exit: the others then only lost
    their connection to it. Next come errors of a rank's own; last, lost connections.
    """
    silent = {rank: code for rank, code in codes.items() if rank not in records}
    own = [
        r for r in records.values() if r.type != LOST_PEER and r.kind not in ("interrupted", "hang")
    ]
    if own:
        return own[0]
    if silent:
        number, code = next(iter(silent.items()))
        return _silent_end(number, code)
    rest = sorted(records.values(), key=lambda r: ("hang", "crash", "interrupted").index(r.kind))
    if rest and rest[0].kind == "interrupted":
        text = "the ranks were ended from outside: the fork server that holds them was killed"
        return ErrorRecord("crash", "ForkServer", text)
    if rest:
        return rest[0]
    return ErrorRecord("crash", "Unknown", "a rank ended and left no error")


def _silent_end(number: int, code: int) -> ErrorRecord:
    if code < 0:
        name = signal.Signals(-code).name
        hint = "; the system may have run out of memory" if -code == signal.SIGKILL else ""
        return ErrorRecord("crash", name, f"rank {number} was killed by {name}{hint}", number)
    text = f"rank {number} ended with exit status {code} before it was done (os._exit?)"
    return ErrorRecord("crash", f"exit {code}", text, number)
