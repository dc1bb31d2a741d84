"""What every test gets: a folder of its own, and a check that it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from beside import MODULES as BESIDE
from browserfixtures import browser, open_page, page, picture  # noqa: F401  # fixtures
from fakeevents import Event
from hypothesis import HealthCheck, settings
from signalled import start  # noqa: F401  # a fixture

from dpexp import server

TESTS = Path(__file__).parent
ROOT = TESTS.parent

# The same examples each time, and no verdict on how fast the machine is.
settings.register_profile(
    "dpexp", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("dpexp")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--pictures", metavar="FOLDER", help="save what tests/browser sees as PNG files there"
    )


@pytest.hookimpl(tryfirst=True)  # before "-m" chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path in BESIDE:
            item.add_marker("beside")


def _own() -> list[psutil.Process]:
    """Processes that this one has started, without the fork server."""
    return [child for child in psutil.Process().children() if child.pid != server.server_pid()]


def _tree(root: psutil.Process) -> list[psutil.Process]:
    try:
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def _children(wider: list[psutil.Process]) -> list[psutil.Process]:
    """Child processes, without the fork server, multiprocessing's resource tracker and `wider`.

    Args:
        wider: what fixtures of a module have started, a browser say; it may start more.
    """
    found = []
    children = psutil.Process().children(recursive=True)
    lent = {child for root in wider for child in _tree(root)}
    for child in children:
        if child.pid == server.server_pid() or child in lent:
            continue
        try:
            command = " ".join(child.cmdline())
        except psutil.Error:
            continue
        if "resource_tracker" not in command:
            found.append(child)
    return found


@pytest.fixture(autouse=True, scope="session")
def torch_settled() -> None:
    """A process's first optimizer sets a cache folder of torch's compiler in the environment."""
    import torch

    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


@pytest.fixture(autouse=True, scope="session")
def ctrl_c_heard() -> None:
    """Tests send SIGINT to processes that inherit from this one; it may run in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.is_alive()}


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaks a process, a thread, an environment variable or a process group."""
    environment = dict(os.environ)
    folder = Path.cwd()
    threads = _threads()
    wider = _own()
    yield
    deadline = time.monotonic() + 5
    while _children(wider) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [child.cmdline() for child in _children(wider)]
    assert not left, f"processes left behind: {left}"
    changed = {
        name: (environment.get(name), os.environ.get(name))
        for name in set(environment) | set(os.environ)
        if environment.get(name) != os.environ.get(name) and name != "PYTEST_CURRENT_TEST"
    }
    # torch's agent sets this one while it runs; it says which signals it handles.
    changed.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)
    assert not changed, f"environment changed: {changed}"
    while _threads() - threads and time.monotonic() < deadline:
        time.sleep(0.05)  # a loader's feeder thread ends a moment after its process
    assert _threads() <= threads, f"threads left behind: {_threads() - threads}"
    assert Path.cwd() == folder, "the working folder was changed"
    if "torch.distributed" in sys.modules:
        import torch.distributed

        assert not torch.distributed.is_initialized(), "a process group is left"


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in; outputs/ lands there. Undone before the leak check."""
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        yield tmp_path  # type: ignore[misc]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """A device's events so far, in order; see fakeevents.py."""
    import torch

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(Event, "made", [])
    return Event.made


Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Run ``python -m dpexp`` as a user does, in an empty folder, with tests/ importable."""

    def run(
        *arguments: str,
        timeout: float = 170,
        env: dict[str, str] | None = None,
        python: tuple[str, ...] = (),
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        variables = {**os.environ, "PYTHONPATH": str(TESTS), "COLUMNS": "120", **(env or {})}
        return subprocess.run(
            [sys.executable, *python, "-m", "dpexp", *arguments],
            cwd=cwd or tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run
