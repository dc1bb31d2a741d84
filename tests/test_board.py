"""``python -m dpexp.board``: what it shows, where it listens, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest

from dpexp.board import newest
from dpexp.errors import ConfigError
from dpexp.events.file import EventFile

COMMAND = (sys.executable, "-m", "dpexp.board")


def run_at(folder: Path) -> Path:
    folder.mkdir(parents=True)
    file = EventFile(folder)
    file.scalars({"time/step_ms": 2.5}, step=0)
    file.close()
    return folder


def refused(folder: Path, *arguments: str) -> str:
    """The one line of a refusal."""
    ended = subprocess.run(
        [*COMMAND, *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    (line,) = ended.stderr.splitlines()
    return line


def listening(root: psutil.Process) -> set[str]:
    """The addresses on which a process and its children wait for connections."""
    tree = [root, *root.children(recursive=True)]
    found = [each for process in tree for each in process.net_connections("inet")]
    return {each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_on_loopback_until_a_signal_ends_it_and_leaves_no_process(
    tmp_path: Path, signum: signal.Signals
) -> None:
    run_at(tmp_path / "outputs/runs/2030-01-02/10-00-00-aaaaaa")
    with subprocess.Popen(
        COMMAND, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # Nobody is there. It is for the way out, and the data server is on this machine.
        env={**os.environ, "http_proxy": "http://127.0.0.1:9", "no_proxy": "example.org"},
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        link = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
        assert link is not None, process.stderr.read()
        with urllib.request.urlopen(f"{link[0]}data/logdir", timeout=20) as answer:
            assert "10-00-00-aaaaaa" in answer.read().decode()
        root = psutil.Process(process.pid)
        children = root.children(recursive=True)
        if sys.platform == "linux":  # elsewhere only root may ask
            assert listening(root) == {"127.0.0.1"}
        process.send_signal(signum)
        assert process.wait(timeout=20) == 0
        assert "Traceback" not in process.stderr.read()
    assert not [child for child in children if child.is_running()]


def test_what_cannot_be_shown_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "folder='nowhere': there is no such folder" in refused(tmp_path, "nowhere")
    assert "folder='empty': holds no event file" in refused(tmp_path, "empty")
    assert "holds no run and no sweep yet" in refused(tmp_path)


def test_a_port_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    run_at(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused(tmp_path, "run", "--port", str(port))
    assert f"port={port}: cannot be used: " in line and "in use" in line
    assert "port=65536: is not a port" in refused(tmp_path, "run", "--port", "65536")


def test_the_newest_is_what_was_begun_last_and_has_events(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run and no sweep"):
        newest(tmp_path)
    sweep = tmp_path / "outputs/sweeps/2030-01-02/09-00-00-bbbbbb"
    run_at(sweep / "0_none_n1")
    assert newest(tmp_path) == sweep
    old = run_at(tmp_path / "outputs/runs/2030-01-01/23-00-00-cccccc")
    os.utime(sweep, (0, 0))  # not what was touched last
    assert newest(tmp_path) == sweep
    run = run_at(tmp_path / "outputs/runs/2030-01-02/09-00-01-aaaaaa")
    (tmp_path / "outputs/runs/2030-01-03/09-00-00-dddddd").mkdir(parents=True)
    assert newest(tmp_path) == run != old
