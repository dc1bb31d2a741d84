"""What SIGINT, SIGTERM and SIGHUP do to the launching process: once = end well, twice = at once.

No torch. Signals that this process was started to ignore stay ignored: a shell starts a script's
background jobs (`&`) with SIGINT ignored, nohup does so with SIGHUP, and such a run must not be
ended by what is meant for the foreground.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# A terminal signals all processes of a command, and some wrappers pass the same signal on: what
# comes so soon after the first one is its echo.
ECHO_S = 0.3
# What a rank that is told to end gives itself to unwind.
GRACE_S = 3.0


class Stop(KeyboardInterrupt):
    """A signal asked to stop. Not an Exception, so that nothing on the way takes it for one."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        super().__init__(f"stopped by {signal.Signals(signum).name}")


@final
class StopAtOnceError(Stop):
    """The second signal: nothing more is written."""


def ignored() -> frozenset[signal.Signals]:
    """The stop signals that this process ignores."""
    return frozenset(s for s in STOP_SIGNALS if signal.getsignal(s) is signal.SIG_IGN)


def answer_with(handler: Callable[[int, Any], Any]) -> dict[signal.Signals, Any]:
    """Give every stop signal that is not ignored this handler. Only in the main thread.

    Returns:
        The handlers before; without those that were not set from Python and cannot be put back.
    """
    before = {s: signal.getsignal(s) for s in STOP_SIGNALS}
    chosen = {s: old for s, old in before.items() if old not in (signal.SIG_IGN, None)}
    for signum in chosen:
        signal.signal(signum, handler)
    return chosen


@final
class _Listener:
    """The handler of the launching process. There is one at a time, as of signals."""

    def __init__(self) -> None:
        self.told: int | None = None  # the first signal
        self._told_at = 0.0
        self.kill: Callable[[], None] | None = None  # ends all ranks at once, while there are some
        self.held = False  # the first signal waits
        self._waiting: int | None = None  # it has come, and nobody knows yet

    def __call__(self, signum: int, _frame: Any) -> None:
        if self.told is None:
            self.told, self._told_at = signum, time.time()
            self._waiting = signum
            self.tell()
            return
        if time.time() - self._told_at < ECHO_S:
            return
        if self.kill is not None:
            self.kill()
        raise StopAtOnceError(signum)

    def tell(self) -> None:
        """Raise the first signal if it has come, nobody knows it yet, and it is not held."""
        if self._waiting is not None and not self.held:
            signum, self._waiting = self._waiting, None
            raise Stop(signum)

    def take(self) -> int | None:
        """The first signal, if nobody knows it yet; from here on the caller does."""
        signum, self._waiting = self._waiting, None
        return signum


_active: _Listener | None = None


def listen() -> None:
    """From here to its end this process stops as described above."""
    global _active  # noqa: PLW0603  # signal handlers are the process's, too
    _active = _Listener()
    answer_with(_active)


@contextmanager
def listening() -> Iterator[None]:
    """The same for a while, in somebody else's program; inside of another one it does nothing.

    After SIGTERM or SIGHUP, and when all is written, the signal has the effect that it had before.
    """
    global _active  # noqa: PLW0603
    if _active is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    listener = _active = _Listener()
    before = answer_with(listener)
    try:
        yield
    finally:
        _active = None
        for signum, handler in before.items():
            signal.signal(signum, handler)
        if listener.told is not None and listener.told != signal.SIGINT:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):  # a closed terminal
                    stream.flush()
            signal.raise_signal(listener.told)


@contextmanager
def killing(kill: Callable[[], None]) -> Iterator[None]:
    """While ranks live: how the second signal ends them."""
    if _active is None:
        yield
        return
    _active.kill = kill
    try:
        yield
    finally:
        _active.kill = None


@contextmanager
def holding() -> Iterator[None]:
    """Short work that is to be done whole: a first signal raises at its end, or in `heeding`.

    The second one ends it at once all the same.
    """
    with _held(True):
        yield


@contextmanager
def heeding() -> Iterator[None]:
    """What may be long inside of `holding`: signals raise here, also one that came before."""
    with _held(False):
        yield


@contextmanager
def _held(held: bool) -> Iterator[None]:
    listener = _active
    if listener is None:
        yield
        return
    before, listener.held = listener.held, held
    try:
        listener.tell()
        yield
    finally:
        listener.held = before
        listener.tell()


def taken() -> int | None:
    """Inside of `holding`: the signal that waits, which is the caller's to answer then."""
    return None if _active is None else _active.take()
