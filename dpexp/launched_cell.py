"""A cell's process that one of Hydra's launchers started: it is not the sweep's own process.

It must end when the sweep is stopped, and must not be stopped too early: a cell that is told to
end needs a moment to write what it has.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from typing import Any, NoReturn, final

import psutil

from dpexp import env
from dpexp.lifeline import GRACE_S

POLL_S = 1.0
# Longer than the sweep waits for cells that it has told to end (careful.py).
PATIENCE_S = 4 * GRACE_S


@final
class _Told:
    """SIGTERM that came while no cell was running here."""

    signum: int | None = None
    settled = False


def settle(*, outlives_sweep: bool) -> None:
    """Once per process, before its first cell; the main thread must call it.

    The process gets a process group of its own. Ctrl-C in a terminal goes to the whole foreground
    group: a launcher's idle processes would end by it, and the launcher would then kill the others.
    Now it reaches the sweep alone, which tells the cells (careful.py), and finds them as leaders
    of a group.

    Args:
        outlives_sweep: the process belongs to a queue, Slurm's, and goes on without the sweep.
    """
    if not _Told.settled:
        _Told.settled = True
        with contextlib.suppress(PermissionError):  # the leader of a session leads its group
            os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, _note)
        parent = None if outlives_sweep else _sweep()
        if parent is not None:
            args = (parent,)
            threading.Thread(target=_watch, args=args, name="dpexp-sweep", daemon=True).start()
    if _Told.signum is not None:
        end(_Told.signum, alone=False)


def end(signum: int, *, alone: bool) -> NoReturn:
    """End this process, whose cell was stopped.

    Args:
        alone: nobody else's cell depends on it. Else it waits to be ended: when one of its
            processes ends by itself, a launcher takes it for broken and kills the others, which
            may still be writing.
    """
    if not alone:
        time.sleep(PATIENCE_S)
    os._exit(128 + signum)


def _note(signum: int, _frame: Any) -> None:
    _Told.signum = signum


def _sweep() -> psutil.Process | None:
    """The sweep's process, if it is one of this host."""
    told = env.sweep_process()
    if told is None or told[0] != socket.gethostname():
        return None
    try:
        process = psutil.Process(told[1])
        return process if process.create_time() == told[2] else None
    except psutil.NoSuchProcess:
        return None


def _watch(sweep: psutil.Process) -> None:
    """When the sweep was killed nobody reads a result: end the cell, then this process."""
    while _lives(sweep):
        time.sleep(POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)  # the cell's ranks end, and what they have is written
    time.sleep(PATIENCE_S)
    os._exit(128 + signal.SIGTERM)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
