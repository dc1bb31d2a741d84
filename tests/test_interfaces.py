"""An interface that the environment names and that is not there."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
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
