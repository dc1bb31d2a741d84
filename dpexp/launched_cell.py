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

from dpexp import env, server
from dpexp.stopping import GRACE_S

POLL_S = 0.5
# What a cell gets to end and to write: longer than the agent gives its ranks.
WIND_DOWN_S = GRACE_S + 5
# Longer than that: the sweep waits so long for all cells, then it ends the processes.
PATIENCE_S = WIND_DOWN_S + 4


@final
class _State:
    """Of this process."""

    settled = False
    told: int | None = None  # a signal that came while no cell was running here
    sweep: psutil.Process | None = None  # None also where it is on another host


def settle(*, outlives_sweep: bool) -> None:
    """Once per process, before its first cell; the main thread must call it.

    The process gets a process group of its own. Ctrl-C in a terminal goes to the whole foreground
    group: a launcher's idle processes would end by it, and the launcher would then kill the others.
    Now it reaches the sweep alone, which tells the cells (careful.py), and finds them as leaders
    of a group.

    Args:
        outlives_sweep: the process belongs to a queue, Slurm's, and goes on without the sweep.
    """
    if not _State.settled:
        _State.settled = True
        with contextlib.suppress(PermissionError):  # the leader of a session leads its group
            os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, _note)
        if not outlives_sweep:
            _State.sweep = _find_sweep()
        if _State.sweep is not None:
            threading.Thread(target=_watch, name="dpexp-sweep", daemon=True).start()
    if _State.told is not None:
        end(_State.told, alone=False)


def end(signum: int, *, alone: bool) -> NoReturn:
    """End this process, whose cell was stopped.

    Args:
        alone: nobody else's cell depends on it. Else it waits to be ended: when one of its
            processes ends by itself, a launcher takes it for broken and kills the others, which
            may still be writing.
    """
    server.stop_for_good()
    if not alone:
        _wait(PATIENCE_S)
    os._exit(128 + signum)


def _note(signum: int, _frame: Any) -> None:
    _State.told = signum


def _find_sweep() -> psutil.Process | None:
    """The sweep's process, if it is one of this host."""
    known = env.sweep_process()
    if known is None or known[0] != socket.gethostname():
        return None
    try:
        process = psutil.Process(known[1])
        return process if process.create_time() == known[2] else None
    except psutil.NoSuchProcess:
        return None


def _watch() -> None:
    """When the sweep was killed nobody reads a result: end the cell, then this process."""
    _wait(None)
    os.kill(os.getpid(), signal.SIGTERM)  # the cell's ranks end, and what they have is written
    time.sleep(WIND_DOWN_S)
    os._exit(128 + signal.SIGTERM)


def _wait(longest_s: float | None) -> None:
    """Wait for the end of the sweep's process, or so long."""
    waited_s = 0.0
    while (longest_s is None or waited_s < longest_s) and _sweep_lives():
        time.sleep(POLL_S)
        waited_s += POLL_S


def _sweep_lives() -> bool:
    sweep = _State.sweep
    try:
        return sweep is None or (sweep.is_running() and sweep.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
