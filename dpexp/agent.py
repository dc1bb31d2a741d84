"""torch's elastic agent, the one under torchrun, changed where runs of one machine need it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import types
from multiprocessing import connection
from typing import Any, final

import psutil
import torch.distributed
from torch.distributed.elastic.agent.server.api import RunResult as AgentResult
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from dpexp import rank, server
from dpexp.network import LOOPBACK
from dpexp.one_queue import one_queue
from dpexp.stopping import GRACE_S
from dpexp.watchdog import Watchdog

# The end of a rank is seen at once. What does not show itself is looked at so often: that no rank
# goes on (watchdog.py allows for gaps of 2 s), and that one has waited in vain.
LOOK_S = 0.3
# Longer than a rank gives itself to unwind after a signal.
SHUTDOWN_S = int(GRACE_S) + 2


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
class _OwnStreams(LogsSpecs):
    """No files: ranks write to the streams of this process (rank.Stdio).

    torch's own specs for that have two threads a rank follow /dev/null, which look ten times a
    second: the end of each run would wait for them.
    """

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for variables in envs.values():
            variables["TORCHELASTIC_ERROR_FILE"] = ""
        streams = dict.fromkeys(envs, "")
        errors = dict.fromkeys(envs, os.devnull)
        return LogsDest(stdouts=streams, stderrs=dict(streams), error_files=errors)

    @property
    def root_log_dir(self) -> str:
        return os.devnull


@final
class Agent(LocalElasticAgent):
    """The elastic agent, which also notices a rank that left with exit status 0, or that hangs.

    For the library the first is a success whose result is still to come: it would wait forever.
    """

    def __init__(self, launched: rank.LaunchedRank, ranks: int, watchdog: Watchdog) -> None:
        spec = WorkerSpec(
            role="dpexp",
            local_world_size=ranks,
            entrypoint=rank.main,
            args=(launched,),
            rdzv_handler=_Loopback(LOOPBACK, 0, 0, 1, run_id="dpexp", timeout=60),
            max_restarts=0,
            monitor_interval=1e-6,  # it would sleep so long, and more than 0: see _wait
            local_addr=LOOPBACK,
        )
        super().__init__(
            spec,
            logs_specs=_OwnStreams(),
            start_method=server.method(),
            shutdown_timeout=SHUTDOWN_S,
        )
        self._watchdog = watchdog
        # Exit codes of the ranks that had ended by themselves when a failure was first seen.
        self.exit_codes: dict[int, int] = {}
        # The ranks as the system knows them: where their fork server is killed, multiprocessing
        # takes them for ended.
        self._started: list[psutil.Process] = []

    def kill(self) -> None:
        """End all ranks and what they have started at once."""
        for process in self._started or self._found():
            with contextlib.suppress(psutil.NoSuchProcess):
                if not process.is_running():  # its id may be another's by now
                    continue
                family = process.children(recursive=True)
                process.kill()
                for child in family:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()

    def end_left(self) -> None:
        """End the ranks that live, once they have had the time to end by themselves.

        There are some where a signal went to all processes, the fork server too, and a rank does
        not hear it.
        """
        if psutil.wait_procs([each for each in self._started if _lives(each)], SHUTDOWN_S)[1]:
            self.kill()

    def close(self) -> None:
        """After :meth:`kill`: end what the library still keeps."""
        self._shutdown(signal.SIGKILL, timeout=SHUTDOWN_S)

    def _construct_event(
        self, state: str, source: EventSource, *_left_out: Any, **_left_out_too: Any
    ) -> Event:
        # Nobody reads these. torch puts the host's full name into each: where that cannot be
        # resolved and the name server does not answer, a run would take a minute longer.
        return Event(state, source=source)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # multiprocessing would import the main program again in each rank: that fails for one
        # read from stdin, and runs a script that has no `if __name__ == "__main__"` once more.
        # Nothing here needs it, since targets come from importable modules.
        hidden = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            with one_queue():
                started: dict[int, Any] = super()._start_workers(worker_group)
            self._started = self._found()
            return started
        finally:
            sys.modules["__main__"] = hidden

    def _monitor_workers(self, worker_group: WorkerGroup) -> AgentResult:
        self._wait()
        codes = {i: p.exitcode for i, p in enumerate(self._processes()) if p.exitcode is not None}
        hung = self._watchdog.hung()
        if hung or self._watchdog.late():
            living = {i: p.pid for i, p in enumerate(self._processes()) if i not in codes}
            self._watchdog.look(living)
        failed = [local for local, code in codes.items() if code != 0]
        if failed and not self.exit_codes:
            self.exit_codes = codes
            self._end_soon()
        if hung:
            self._end_soon()
            return _failure(worker_group, self._watchdog.culprit().rank, 1)
        result: AgentResult = super()._monitor_workers(worker_group)
        if result.state is WorkerState.HEALTHY:
            left = [local for local, code in codes.items() if code == 0]
            if left and not self._has_result(left[0]):
                self.exit_codes = codes
                return _failure(worker_group, left[0], 0)
        if result.is_failed() and not self.exit_codes:
            first = {local: failure.exitcode for local, failure in result.failures.items()}
            self.exit_codes = {**first, **codes}
        return result

    def _end_soon(self) -> None:
        """End all ranks: torch would wait 30 s for one that cannot end by itself."""
        assert self._pcontext is not None
        self._pcontext.close(signal.SIGTERM, SHUTDOWN_S)

    def _wait(self) -> None:
        """Wait until a rank has a result or has ended, :data:`LOOK_S` at most.

        A rank with a result does not end before that is read. What is ready here is used up by the
        poll that follows, or the run is over: so this does not return at once again and again.
        """
        ends = [process.sentinel for process in self._processes() if process.exitcode is None]
        results = {queue.reader for queue in getattr(self._pcontext, "_ret_vals", {}).values()}
        connection.wait([*ends, *results], LOOK_S)

    def _processes(self) -> list[Any]:
        context = getattr(self._pcontext, "_pc", None)
        return [] if context is None else list(context.processes)

    def _found(self) -> list[psutil.Process]:
        """The ranks that have not ended, as far as multiprocessing can tell."""
        found = []
        for process in self._processes():
            if process.exitcode is None and process.pid is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    found.append(psutil.Process(process.pid))
        return found

    def _has_result(self, local_rank: int) -> bool:
        return local_rank in getattr(self._pcontext, "_return_values", {})


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _failure(group: WorkerGroup, local_rank: int, code: int) -> AgentResult:
    failure = ProcessFailure(local_rank, group.workers[local_rank].id, code, os.devnull)
    return AgentResult(state=WorkerState.FAILED, failures={local_rank: failure})
