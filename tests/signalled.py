"""Programs that get signals: started with a session of their own, watched, and ended.

conftest.py makes `start` known to all tests.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

TESTS = Path(__file__).parent
SOON_S = 60  # wide: a machine may be busy

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a Python with a session of its own; whatever is left of it is ended."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str, unheard: tuple[signal.Signals, ...] = ()) -> subprocess.Popen[str]:
        before = {signum: signal.signal(signum, signal.SIG_IGN) for signum in unheard}
        process = subprocess.Popen(  # it inherits what is ignored
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(TESTS)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for signum, handler in before.items():
            signal.signal(signum, handler)
        started.append(process)
        return process

    yield begin
    for process in started:
        for pid in family(process):
            os.kill(pid, signal.SIGKILL)
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def family(process: subprocess.Popen[str]) -> list[int]:
    """Its living processes: itself, the fork server, the ranks, their loaders."""
    found = []
    for other in psutil.process_iter():
        try:
            if os.getsid(other.pid) == process.pid and other.status() != psutil.STATUS_ZOMBIE:
                found.append(other.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def wait_until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Wait while the process lives; fail when it ends before, or after SOON_S."""
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)


def wait_for_no_process(process: subprocess.Popen[str], limit_s: float = 5) -> None:
    """The whole family has to end within `limit_s`."""
    deadline = time.monotonic() + limit_s
    while family(process) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert family(process) == []
