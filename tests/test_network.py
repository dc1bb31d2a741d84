"""Interfaces and their addresses, what is refused of them, and what a run says of its variables."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from dpexp import network
from dpexp.errors import ConfigError
from dpexp.network import address_of, addresses, check_interface, loopback_interface, variables_of

LO = loopback_interface()
UP, DOWN = SimpleNamespace(isup=True), SimpleNamespace(isup=False)


def has(family: int, address: str) -> SimpleNamespace:
    return SimpleNamespace(family=family, address=address)


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with Ethernet, InfiniBand that is down, and two that are good for nothing."""
    four, six = socket.AF_INET, socket.AF_INET6
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {
        LO: [has(four, "127.0.0.1"), has(six, "::1")],
        "eth0": [has(six, "fe80::1%eth0"), has(six, "fd00::7"), has(four, "10.0.0.7")],
        "six0": [has(six, "fe80::2%six0"), has(six, "fd00::8")],
        "ib0": [has(four, "10.1.0.7")],
        "bare0": [has(six, "fe80::3%bare0")],
    })  # fmt: skip
    states = {LO: UP, "eth0": UP, "six0": UP, "ib0": DOWN, "bare0": UP}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: states)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def refusal(asked: str | None, *, own_ranks: bool) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        check_interface(asked, own_ranks=own_ranks)
    return refused.value


def test_this_machines_loopback_has_its_address() -> None:
    assert address_of(LO) == "127.0.0.1"
    assert addresses()[LO] == "127.0.0.1"


@pytest.mark.usefixtures("interfaces")
def test_an_interface_is_known_by_an_address_that_other_hosts_can_use() -> None:
    assert addresses() == {LO: "127.0.0.1", "eth0": "10.0.0.7", "six0": "fd00::8"}


@pytest.mark.usefixtures("interfaces")
@pytest.mark.parametrize(
    ("asked", "problem"),
    [("eth1", "no such network interface"), ("ib0", "is down"), ("bare0", "no address")],
)
def test_one_that_cannot_be_used_is_refused_with_those_that_can(asked: str, problem: str) -> None:
    refused = refusal(asked, own_ranks=False)
    assert (refused.key, refused.value) == ("parallel.interface", asked)
    assert problem in refused.problem
    assert refused.allowed == f"eth0 (10.0.0.7), {LO} (127.0.0.1), six0 (fd00::8)"


@pytest.mark.usefixtures("interfaces")
def test_ranks_that_dpexp_starts_stay_on_loopback() -> None:
    check_interface(None, own_ranks=True)
    check_interface(LO, own_ranks=True)
    check_interface("eth0", own_ranks=False)
    refused = refusal("eth0", own_ranks=True)
    assert "all ranks of this run are on this machine" in refused.problem
    assert LO in refused.allowed and "torchrun" in refused.allowed


@pytest.mark.usefixtures("interfaces")
@pytest.mark.parametrize("name", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_a_variable_that_says_otherwise_is_refused_with_both(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "ib0")
    text = str(refusal("eth0", own_ranks=False))
    assert "'eth0'" in text and f"{name}=ib0" in text
    monkeypatch.setenv(name, "eth0")
    check_interface("eth0", own_ranks=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=eth0")
    check_interface("eth0", own_ranks=False)


def test_without_loopback_nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    everything_down = dict.fromkeys(psutil.net_if_addrs(), DOWN)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: everything_down)
    refused = refusal(None, own_ranks=True)
    assert "loopback is down" in refused.problem and refused.fix == f"ip link set {LO} up"
    with pytest.raises(ConfigError, match="none is up here"):
        address_of("eth0")


def test_the_ranks_of_one_host_get_loopback_and_those_of_several_what_was_asked_for() -> None:
    eth = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}
    assert variables_of("eth0", one_host=False) == variables_of("eth0", one_host=True) == eth
    loopback = {"GLOO_SOCKET_IFNAME": LO, "NCCL_SOCKET_IFNAME": f"={LO}"}
    assert variables_of(None, one_host=True) == loopback
    assert variables_of(None, one_host=False) == {}


def test_a_note_says_what_is_set_and_not_used_and_where_ranks_listen_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network.env, "snapshot", lambda: {"SLURM_JOB_ID": "1", "RANK": "0"})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    others, exposed = network.notes(several_ranks=True)
    assert "not used (torchrun: RANK; Slurm: SLURM_JOB_ID)" in others
    assert exposed.startswith("GLOO_SOCKET_IFNAME=eth0: ") and "not on loopback only" in exposed
    assert network.notes(several_ranks=False) == (others,)
    monkeypatch.setattr(network.env, "snapshot", dict)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", LO)
    assert network.notes(several_ranks=True) == ()
