"""The fork server that ranks are forked from. No torch here: it starts before torch is imported.

A fork server is a small process that has torch imported and does nothing but fork. Each rank is a
fresh process, so nothing leaks from one run to the next, and still starts in milliseconds.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker, util

PRELOAD = ["dpexp.quick_end", "dpexp.rank"]
# DistributedDataParallel's constructor imports the first, over 800 modules and a second of CPU
# time; fsdp needs the others.
PRELOAD_SEVERAL = ["torch._dynamo", "torch.distributed.fsdp", "dpexp.parallel.fsdp"]


def method() -> str:
    """How ranks are started on this system."""
    known = multiprocessing.get_all_start_methods()
    return "forkserver" if "forkserver" in known else "spawn"


def start(*, several_ranks: bool) -> None:
    """Start the server if it is not running. It imports torch while this process goes on.

    Args:
        several_ranks: also import what ddp and fsdp need, once and not in every rank. A server
            that runs already stays as it is.
    """
    usable = multiprocessing.get_all_start_methods()
    if multiprocessing.get_start_method(allow_none=True) not in (None, *usable):
        # In joblib's processes it is loky's own, which a rank would look for in vain.
        multiprocessing.set_start_method(method(), force=True)
    if method() == "forkserver":
        multiprocessing.set_forkserver_preload(
            [*PRELOAD, *PRELOAD_SEVERAL] if several_ranks else PRELOAD
        )
        with _sigint_held_back():
            forkserver.ensure_running()
        atexit.unregister(stop)
        atexit.register(stop)


@contextmanager
def _sigint_held_back() -> Iterator[None]:
    """A process started meanwhile has SIGINT blocked; for this one it comes a moment later.

    The server would ignore Ctrl-C only after its imports, and end with a traceback until then.
    Ranks unblock it when they can handle it (lifeline.py).
    """
    resource_tracker.ensure_running()  # else it would be started inside, and unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def server_pid() -> int | None:
    """The server's process id, or None when none runs."""
    return getattr(forkserver._forkserver, "_forkserver_pid", None)


def stop() -> None:
    """End the server at once. It would end with this process anyway, but only after its imports."""
    pid = server_pid()
    if pid is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    with contextlib.suppress(FileNotFoundError):  # joblib's processes remove its socket first
        forkserver._forkserver._stop()  # type: ignore[attr-defined]  # closes its pipe and waits


def stop_for_good() -> None:
    """End the server and remove its socket's folder, which `os._exit` would leave behind.

    Only `os._exit` may follow. Safe in a signal's handler.
    """
    pid = server_pid()
    if pid is None:
        return
    # First the folder: careful.py takes the server's end for the sign that all is tidy.
    shutil.rmtree(util.get_temp_dir(), ignore_errors=True)
    # Not by its own `_stop`: the signal may have come in the middle of that, where a lock is held.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
