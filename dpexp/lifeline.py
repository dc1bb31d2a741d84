"""Ends a rank when it is told to, or when the process that launched it is gone.

A signal's Python handler runs only when the main thread next executes Python code; a rank that
waits inside a collective or a kernel would not notice. So a thread watches as well: it sees the
signal at once, gives the main thread a moment to unwind (and flush), and then ends the process.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from typing import Any, final

from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from dpexp.stacks import ASK
from dpexp.stopping import GRACE_S, STOP_SIGNALS


class Interrupted(BaseException):
    """A signal asked this rank to stop. Not an Exception: user code must not catch it."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        super().__init__(f"stopped by {signal.Signals(signum).name}")


@final
class _Answer:
    """What a signal does in the main thread: it raises, or waits for what is to be done whole."""

    def __init__(self) -> None:
        self.held = False
        self._waiting: int | None = None

    def __call__(self, signum: int, _frame: Any) -> None:
        stop_listening()
        if not self.held:
            raise Interrupted(signum)
        self._waiting = signum

    def release(self) -> int | None:
        """No longer held. Returns the signal that has come meanwhile."""
        self.held = False
        signum, self._waiting = self._waiting, None
        return signum


_answer = _Answer()  # a process has one, as it has one handler of a signal


@contextmanager
def whole() -> Iterator[None]:
    """Short work of the main thread that a signal does not cut in two: it raises at the end.

    Work that lasts longer than ``GRACE_S`` is ended all the same, with the rank. Work that fails
    ends the rank by its own error.

    Raises:
        Interrupted: a signal came meanwhile.
    """
    _answer.held = True
    try:
        yield
    finally:
        signum = _answer.release()
    if signum is not None:
        raise Interrupted(signum)


@contextmanager
def deaf_once_failed() -> Iterator[None]:
    """Work after whose failure signals are no longer heeded: what is done about it is done whole.

    A signal that came while the rank waited in a collective is answered by the next Python
    function that is called, and if the collective failed too that is the end of this. So it stands
    inside of whatever has to happen after a failure, and Interrupted leaves it then.
    """
    try:
        yield
    except BaseException:
        stop_listening()
        raise


def stop_listening() -> None:
    """From here on this rank ends by itself; being told again must not interrupt that."""
    signal.set_wakeup_fd(-1)
    for signum in STOP_SIGNALS:
        # Not SIG_IGN: of a signal that is on its way Python would print that it was ignored.
        signal.signal(signum, _do_nothing)


def _do_nothing(_signum: int, _frame: Any) -> None:
    """A handler."""


@final
class _Children:
    """What becomes of processes that are forked from a rank: its loader processes."""

    def __init__(self, unheeded: frozenset[signal.Signals]) -> None:
        self._unheeded = unheeded
        self._by_main_thread = False

    def before(self) -> None:
        self._by_main_thread = threading.current_thread() is threading.main_thread()

    def after_in_child(self) -> None:
        """Its signals are its own, and end it silently; it does not outlive its rank."""
        signal.set_wakeup_fd(-1)  # else they would be taken for the rank's
        faulthandler.unregister(ASK)
        for signum in STOP_SIGNALS:
            heeded = signum not in self._unheeded
            signal.signal(signum, signal.SIG_DFL if heeded else signal.SIG_IGN)
        # torch's loader processes look for their parent every 5 s only. The system sends this when
        # the thread that forked ends, so only where that lives as long as the rank. On other
        # systems than Linux the call does nothing.
        if self._by_main_thread:
            _prctl_pr_set_pdeathsig(signal.SIGKILL)


@final
class Lifeline:
    """Watches over this process from :meth:`start` on, until it ends.

    Args:
        unheeded: stop signals that this process ignores, as its launching process does.
        of_agent: the launching process is the parent, torchrun's agent, which hands nothing over.
    """

    def __init__(
        self, unheeded: frozenset[signal.Signals] = frozenset(), *, of_agent: bool = False
    ) -> None:
        self._unheeded = unheeded
        self._of_agent = of_agent
        self._ended = threading.Event()

    def start(self) -> None:
        """Install the handlers. Call from the main thread."""
        receive, send = socket.socketpair()
        send.setblocking(False)
        signal.set_wakeup_fd(send.fileno(), warn_on_full_buffer=False)
        for signum in STOP_SIGNALS:
            heeded = signum not in self._unheeded
            signal.signal(signum, _answer if heeded else signal.SIG_IGN)
        # The fork server keeps it blocked; see server.py.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        children = _Children(self._unheeded)
        os.register_at_fork(before=children.before, after_in_child=children.after_in_child)
        # `send` must stay open as long as the process lives.
        self._sockets = (receive, send)
        threading.Thread(target=self._watch, name="dpexp-lifeline", daemon=True).start()

    def _launcher(self) -> list[int]:
        """What becomes ready when the launching process is gone; [] where nothing tells it."""
        parent = multiprocessing.parent_process()
        if parent is not None:
            return [parent.sentinel]
        if not self._of_agent or sys.platform != "linux":
            return []
        with suppress(OSError):  # it is gone, or the kernel is too old
            return [os.pidfd_open(os.getppid())]
        return []

    def _watch(self) -> None:
        receive = self._sockets[0]
        watched: list[Any] = [receive, *self._launcher()]
        while True:
            ready = wait(watched)
            if receive in ready:
                told = [s for s in receive.recv(64) if s in STOP_SIGNALS]
                if not told:
                    continue  # a loader process of this rank ended
            else:  # orphaned: nobody is left to read a result, but the last steps are written
                os.kill(os.getpid(), signal.SIGTERM)
            self._ended.wait(GRACE_S)
            os._exit(128 + signal.SIGTERM)
