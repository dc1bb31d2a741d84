"""The fork server that ranks are forked from. No torch here: it is started before torch is imported.

A fork server is a small process that has torch imported and does nothing but fork. Each rank is a
fresh process, so nothing leaks from one run to the next, and still starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from multiprocessing import forkserver

PRELOAD = ["dpexp.rank"]


def method() -> str:
    """How ranks are started on this system."""
    known = multiprocessing.get_all_start_methods()
    return "forkserver" if "forkserver" in known else "spawn"


def start() -> None:
    """Start the server if it is not running. It imports torch while this process goes on."""
    if method() == "forkserver":
        multiprocessing.set_forkserver_preload(PRELOAD)
        forkserver.ensure_running()


def server_pid() -> int | None:
    """The server's process id, or None when none runs."""
    return getattr(forkserver._forkserver, "_forkserver_pid", None)  # type: ignore[attr-defined]


def stop() -> None:
    """End the server at once. It would end with this process anyway, but only after its imports."""
    pid = server_pid()
    if pid is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # closes its pipe and waits
