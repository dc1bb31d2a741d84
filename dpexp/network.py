"""Which network interface a run uses. No torch.

A run of one machine stays on loopback: nobody else can reach what its processes listen on.
"""

from __future__ import annotations

import socket
import sys

import psutil

from dpexp import env
from dpexp.errors import NO_VALUE, ConfigError
from dpexp.leftover import unused

LOOPBACK = "127.0.0.1"
KEY = "parallel.interface"


def loopback_interface() -> str:
    """The name of the loopback interface on this system."""
    return "lo0" if sys.platform == "darwin" else "lo"


def addresses() -> dict[str, str]:
    """The address of each interface that is up and has one, by the interface's name.

    IPv4 where there is one; an IPv6 address that is valid on its own link only does not count.
    """
    states = psutil.net_if_stats()
    found: dict[str, str] = {}
    for name, own in sorted(psutil.net_if_addrs().items()):
        if name in states and not states[name].isup:
            continue
        for family in (socket.AF_INET, socket.AF_INET6):
            usable = [
                each.address
                for each in own
                if each.family == family and not each.address.lower().startswith("fe80:")
            ]
            if usable:
                found[name] = usable[0]
                break
    return found


def address_of(interface: str) -> str:
    """The address on which to listen for others on that interface.

    Raises:
        ConfigError: there is no such interface, it is down, or it has no address.
    """
    known = addresses()
    if interface in known:
        return known[interface]
    problem = "there is no such network interface on this host"
    if interface in psutil.net_if_addrs() or interface in psutil.net_if_stats():
        problem = "this network interface is down or has no address"
    listed = ", ".join(f"{name} ({address})" for name, address in known.items())
    fix = f"{KEY}={next(iter(known), '<name>')}"
    raise ConfigError(KEY, interface, problem, allowed=listed or "none is up here", fix=fix)


def variables_for(interface: str) -> dict[str, str]:
    """What makes gloo and NCCL use that interface; for a process's environment."""
    # NCCL takes a bare name for the beginning of one: eth1 would be eth10 as well.
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}


def check_interface(asked: str | None, *, own_ranks: bool) -> None:
    """Refuse an interface that the run cannot use.

    Args:
        asked: `parallel.interface`.
        own_ranks: dpexp starts the run's processes itself, so all of them are on this machine.

    Raises:
        ConfigError: see the message.
    """
    loopback = loopback_interface()
    if own_ranks and asked not in (None, loopback):
        raise ConfigError(
            KEY,
            asked,
            "all ranks of this run are on this machine, and stay on its loopback interface",
            allowed=f"null or {loopback}; another one under torchrun or Slurm, on several hosts",
            fix=f"{KEY}=null",
        )
    if own_ranks and loopback not in addresses():
        raise ConfigError(
            f"network interface {loopback}",
            NO_VALUE,
            "loopback is down or has no address, and the processes of a run meet there",
            fix=f"ip link set {loopback} up",
        )
    if asked is None:
        return
    address_of(asked)
    for name, value in env.socket_interfaces().items():
        if value.lstrip("=") != asked:
            raise ConfigError(
                KEY,
                asked,
                f"the environment variable {name}={value} says otherwise",
                fix=f"unset {name}, or {KEY}=null",
            )


def notes(*, several_ranks: bool) -> tuple[str, ...]:
    """What a run that starts its processes itself has to say of the environment."""
    told = []
    named = unused(env.snapshot())
    if named:
        told.append(
            f"variables of other launchers are set and not used ({named}); "
            "this run starts its processes itself"
        )
    for name, value in env.socket_interfaces().items() if several_ranks else ():
        if value.lstrip("=") != loopback_interface():
            told.append(f"{name}={value}: the ranks listen there, and not on loopback only")
    return tuple(told)


def variables_of(asked: str | None, *, one_host: bool) -> dict[str, str]:
    """The variables of a run's ranks, where the user has not set them.

    Args:
        asked: `parallel.interface`.
        one_host: all ranks are on this machine.
    """
    if asked is not None:
        return variables_for(asked)
    return variables_for(loopback_interface()) if one_host else {}
