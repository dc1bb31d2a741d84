"""A rank's process: what surrounds :func:`dpexp.worker.run_rank`.

Imported by the fork server, so that a rank starts with torch already there.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, final

from dpexp import env
from dpexp.beacon import own_cells
from dpexp.comm import Comm, connect
from dpexp.failures import LATE_PEER, describe
from dpexp.files import SharedLines
from dpexp.lifeline import Interrupted, Lifeline, deaf_once_failed
from dpexp.logs import close_log, open_log
from dpexp.loop import Progress
from dpexp.memory_limit import MemoryLimit
from dpexp.outlets import outlive_readers
from dpexp.records import ErrorRecord, RankResult, RunResult
from dpexp.stacks import offer
from dpexp.stopping import GRACE_S
from dpexp.texts import visible
from dpexp.worker import Connect, RankJob, run_rank

log = logging.getLogger(__name__)

# In the launcher's scratch folder, one for all ranks: their stacks, and a line of JSON of each rank
# that ended early.
STACKS, LAST_WORDS = "stacks", "last-words"

# Set by the elastic agent for each rank; they win over the launching process's own.
_AGENT_PREFIXES = (
    "RANK",
    "LOCAL_",
    "ROLE_",
    "GROUP_",
    "WORLD_SIZE",
    "MASTER_",
    "TORCHELASTIC_",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)


@final
class Stdio:
    """The launching process's stdout and stderr, handed over to a process forked from a server.

    Without it a rank would print to where the server's output went when the server was started.
    """

    def __init__(self, fds: tuple[Any, ...] = ()) -> None:
        self._fds = fds

    def __reduce__(self) -> tuple[Any, ...]:
        return Stdio, ((DupFd(1), DupFd(2)),)

    def adopt(self) -> None:
        """Make the handed-over descriptors this process's stdout and stderr."""
        for target, handle in zip((1, 2), self._fds, strict=False):
            os.dup2(handle.detach(), target)


@dataclass(frozen=True)
class LaunchedRank:
    """What the launcher hands to each rank."""

    job: RankJob
    variables: dict[str, str]  # the launching process's environment
    user_dir: Path  # where the command was typed: relative paths and modules start there
    scratch: Path  # for error records and stacks
    stdio: Stdio
    beacon: Any  # shared memory, see beacon.py
    unheeded: frozenset[signal.Signals]  # stop signals that the launching process ignores


def main(launched: LaunchedRank) -> RunResult | None:
    """Entry point of a launched rank. Does not return when the rank fails."""
    # What the server has imported lives as long as this process. Without this, each full garbage
    # collection would walk all of it, and so copy the memory that is shared with the server.
    gc.freeze()
    launched.stdio.adopt()
    outlive_readers()
    agent = {k: v for k, v in env.snapshot().items() if k.startswith(_AGENT_PREFIXES)}
    env.restore({**launched.variables, **agent})
    enter(launched.user_dir)
    rank = env.own_rank()
    if launched.job.plan.pinned:
        # Before there are other threads: those that come later inherit it, loader processes too.
        os.sched_setaffinity(0, launched.job.plan.pinned[rank])

    def keep(error: ErrorRecord, partial: RankResult | None) -> None:
        last = {"error": asdict(error), "partial": partial and asdict(partial)}
        lines = SharedLines(launched.scratch / LAST_WORDS, "")
        lines.append(json.dumps(last) + "\n")
        lines.close()

    Lifeline(launched.unheeded).start()
    offer(launched.scratch / STACKS, rank)
    # The first tick: from now on this process may be asked for its stacks.
    progress = Progress(own_cells(launched.beacon, rank))
    result = guarded(launched.job, rank, progress, keep)
    end_despite_threads()
    return result


def end_despite_threads() -> None:
    """End this process soon, although threads of the user's code go on.

    At its end Python waits for every thread that is not a daemon: one that never ends would keep
    a finished run from its result, and a sweep from its next cell.
    """
    others = [t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
    if others:
        timer = threading.Timer(GRACE_S, os._exit, args=(0,))
        timer.daemon = True
        timer.start()


def enter(user_dir: Path) -> None:
    """Work in the user's folder, with her modules importable."""
    os.chdir(user_dir)
    if str(user_dir) not in sys.path:
        sys.path.insert(0, str(user_dir))


Keep = Callable[[ErrorRecord, RankResult | None], None]


def own_ranks(job: RankJob, rank: int) -> tuple[Comm, RankJob]:
    """Connect ranks that dpexp has started, which know all of their run."""
    return connect(job.plan, rank), job


def guarded(
    job: RankJob, rank: int, progress: Progress, keep: Keep, connected: Connect = own_ranks
) -> RunResult | None:
    """Run the rank; when it fails, `keep` the error record and end the process.

    The process ends without unwinding further: a DDP object still hangs on the traceback, and
    destroying its process group, or leaving threads to wait for lost peers, would hang.
    """
    limit_mib = job.plan.config.process_memory_mib
    if limit_mib is not None:
        limit_bytes = int(limit_mib * 2**20)
        MemoryLimit(limit_bytes, rank, progress, lambda error: keep(error, None)).start()
    handlers: list[logging.Handler] = []
    try:
        with deaf_once_failed():
            level = logging.INFO if rank == 0 else logging.WARNING
            handlers = open_log(job.folder, f"rank={rank}", level)
            result = run_rank(job, rank, progress, connected)
    except BaseException as error:  # noqa: BLE001  # sys.exit in user code is a failure too
        record = describe(error, job.plan, rank, progress)
        if record.type == LATE_PEER:
            progress.wait_to_be_seen()
        expected = record.kind in ("config", "interrupted")
        detail = record.message if expected else record.traceback
        log.log(
            logging.INFO if expected else logging.ERROR, "%s", detail, extra={"file_only": True}
        )
        partial = progress.partial and replace(progress.partial, parity=progress.parity)
        _kept(keep, record, partial)
        close_log(handlers)
        code = 128 + error.signum if isinstance(error, Interrupted) else 1
        _end(code)
    close_log(handlers)
    return result


def _kept(keep: Keep, record: ErrorRecord, partial: RankResult | None) -> None:
    """Keep the record; where the disk has no room for it, at least tell it."""
    try:
        keep(record, partial)
    except OSError as error:
        told = f"rank {record.rank}: {record.message} (not recorded: {error})"
        print(visible(told), file=sys.stderr)


def _end(code: int) -> None:
    for child in multiprocessing.active_children():  # loader processes
        child.terminate()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a closed terminal
            stream.flush()
    os._exit(code)
