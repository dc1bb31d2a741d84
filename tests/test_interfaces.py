"""The network's interfaces: which one a run uses, and what listens on it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import TESTS
from launched import DDP2

import dpexp
from dpexp import server

SOON_S = 120  # wide: a machine may be busy


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Have one fork server for all, started before any test sets a variable."""
    server.start(several_ranks=True)


@pytest.mark.parametrize("interface", ["nonexistent0", "^lo"])
def test_an_interface_that_is_not_there_is_named_with_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interface: str
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    began = time.monotonic()
    with pytest.raises(dpexp.ConfigError) as refusal:
        dpexp.run([*DDP2], folder=tmp_path)
    assert time.monotonic() - began < SOON_S
    assert "GLOO_SOCKET_IFNAME" in str(refusal.value)
    assert repr(interface) in str(refusal.value)


@pytest.mark.skipif(sys.platform == "darwin", reason="only root may list connections there")
def test_nothing_listens_beyond_loopback_during_a_ddp_run(tmp_path: Path) -> None:
    slow = ("model=custom", "model._target_=usercode.Slow", "+model.seconds=0.1")
    process = subprocess.Popen(
        [sys.executable, "-m", "dpexp", *DDP2, *slow, "task=train", "epochs=null", "steps=1000"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + SOON_S
        while not has_rows(tmp_path):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        parent = psutil.Process(process.pid)
        tree = [parent, *parent.children(recursive=True)]
        connections = [each for one in tree for each in one.net_connections(kind="inet")]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=SOON_S)
    assert len(tree) >= 4  # the parent, the fork server and two ranks
    assert any(each.status == psutil.CONN_LISTEN for each in connections)
    assert {each.laddr.ip for each in connections} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def has_rows(work: Path) -> bool:
    tables = list(work.glob("outputs/runs/*/*/steps.rank1.csv"))
    return bool(tables) and len(tables[0].read_text(encoding="utf-8").splitlines()) > 1
