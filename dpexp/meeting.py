"""How the ranks of an outer launcher's run agree on something before there is a process group.

The store that the launcher has named holds what earlier rounds of the same launch have left there:
an agent keeps it over a restart. So nothing in it counts but what answers this very round, and the
process group gets a part of the store that is new in each round (a rank that reads the address of
a dead one hangs or fails).
"""

from __future__ import annotations

import errno
import json
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from dpexp.env import OuterLauncher
from dpexp.errors import ConfigError
from dpexp.network import address_of, addresses, loopback_interface
from dpexp.timing import now_s

# Between two looks of a rank that waits for its answer: soon, then seldom, for the store's sake.
FIRST_LOOK_S, LAST_LOOK_S = 0.005, 0.2
HEARD_S = 5.0  # some times LAST_LOOK_S, on a busy machine too
_PREFIX = "dpexp"


@dataclass(frozen=True)
class Meeting:
    """What a round has agreed on."""

    token: str  # of this round; no other round has it
    said: tuple[dict[str, Any], ...]  # by each rank, in order
    answer: dict[str, Any]  # rank 0's


@lru_cache(maxsize=1)
def reach_store(outer: OuterLauncher, timeout_s: float, interface: str | None = None) -> Store:
    """The store of this launch, where an agent or rank 0 holds it; one per process.

    Rank 0 listens at one address only: that of `interface`, else the one that all were told. An
    agent's store listens as torch has it.

    Raises:
        ConfigError: rank 0 has no such interface, or the others look for it at another one.
        RuntimeError: it does not answer within `timeout_s`, or cannot listen there.
    """
    if outer.rank == 0 and not outer.agents_store:
        address = outer.master_addr if interface is None else _own_end(outer, interface)
        listener = _listener(address, outer.master_port)
        if listener is not None:
            return TCPStore(
                address,
                outer.master_port,
                outer.world_size,
                is_master=True,
                timeout=timedelta(seconds=timeout_s),
                master_listen_fd=listener.detach(),
            )
    made = rendezvous("env://", outer.rank, outer.world_size, timeout=timedelta(seconds=timeout_s))
    store: Store = next(made)[0]
    return store


def _own_end(outer: OuterLauncher, interface: str) -> str:
    """The address of `interface`, if that is where the others look for rank 0.

    A name that leads to loopback here leads elsewhere on their hosts.

    Raises:
        ConfigError: there is no such interface, or they look at another one of this host.
    """
    address = address_of(interface)
    others = {
        own for name, own in addresses().items() if name not in (interface, loopback_interface())
    }
    try:
        found = socket.getaddrinfo(outer.master_addr, None, type=socket.SOCK_STREAM)
    except OSError:
        return address  # they may know the name
    theirs = {str(where[0]) for *_, where in found}
    if address not in theirs and theirs & others:
        raise ConfigError(
            "parallel.interface",
            interface,
            f"rank 0 would listen at {address}, and the other ranks look for it at "
            f"{outer.master_addr} ({', '.join(sorted(theirs & others))}), another interface",
            fix=f"MASTER_ADDR={address}",
        )
    return address


def _listener(address: str, port: int) -> socket.socket | None:
    """A socket that listens there; None if the address is not this host's, as behind a router."""
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RuntimeError(f"{address} is the address of no host: {error.strerror}") from error
    family, kind, protocol, _, where = found[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(where)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise RuntimeError(f"rank 0 cannot listen at {address}:{port}: {error.strerror}") from error
    return listener


def meet(
    store: Store,
    outer: OuterLauncher,
    about: str,
    said: dict[str, Any],
    answered: Callable[[str, Sequence[dict[str, Any]]], dict[str, Any]],
    timeout_s: float,
) -> Meeting:
    """Every rank says something, rank 0 answers, and all know both. Waits for all ranks.

    Args:
        about: a name, the same on all ranks, another one for each meeting of a round.
        said: JSON's types, like the answer.
        answered: called on rank 0, with the round's token and what each rank has said.

    Raises:
        RuntimeError: not all ranks came within `timeout_s`; the text names those that lack.
    """
    mine = json.dumps({"nonce": secrets.token_hex(8), "said": said})
    if outer.rank == 0:
        return _lead(store, outer, f"{_PREFIX}/{about}", mine, answered, timeout_s)
    return _follow(store, outer, f"{_PREFIX}/{about}", mine, timeout_s)


def _lead(
    store: Store,
    outer: OuterLauncher,
    about: str,
    mine: str,
    answered: Callable[[str, Sequence[dict[str, Any]]], dict[str, Any]],
    timeout_s: float,
) -> Meeting:
    token = secrets.token_hex(8)
    keys = [f"{about}/{token}/{rank}" for rank in range(outer.world_size)]
    store.set(keys[0], mine)
    store.set(f"{about}/leader", token)
    _await(store, keys, timeout_s)
    words = [json.loads(store.get(key)) for key in keys]
    said = [word["said"] for word in words]
    answer = answered(token, said)
    told = {"nonces": [word["nonce"] for word in words], "said": said, "answer": answer}
    store.set(f"{about}/{token}/answer", json.dumps(told))
    if not outer.agents_store:  # it ends with this process, which the answer may end
        _heard(store, f"{about}/{token}/heard", outer.world_size - 1)
    return Meeting(token, tuple(said), answer)


def _follow(store: Store, outer: OuterLauncher, about: str, mine: str, timeout_s: float) -> Meeting:
    nonce, token, leader = json.loads(mine)["nonce"], "", f"{about}/leader"
    deadline_s, look_s = now_s() + timeout_s, FIRST_LOOK_S
    while now_s() < deadline_s:
        # The leader of an earlier round stands there until rank 0 of this one has come. What it
        # has answered was not for this nonce.
        if store.check([leader]) and (now := store.get(leader).decode()) != token:
            token = now
            store.set(f"{about}/{token}/{outer.rank}", mine)
        if token and store.check([f"{about}/{token}/answer"]):
            told = json.loads(store.get(f"{about}/{token}/answer"))
            if told["nonces"][outer.rank : outer.rank + 1] == [nonce]:
                store.add(f"{about}/{token}/heard", 1)
                return Meeting(token, tuple(told["said"]), told["answer"])
        time.sleep(look_s)
        look_s = min(2 * look_s, LAST_LOOK_S)
    raise RuntimeError(f"Timed out waiting {timeout_s:g} s for rank 0, or for a rank it waits for")


def _heard(store: Store, counter: str, ranks: int) -> None:
    """Wait until so many ranks have the answer; those that are gone by now not for ever."""
    deadline_s = now_s() + HEARD_S
    while store.add(counter, 0) < ranks and now_s() < deadline_s:
        time.sleep(FIRST_LOOK_S)


def _await(store: Store, keys: Sequence[str], timeout_s: float) -> None:
    try:
        store.wait(list(keys), timedelta(seconds=timeout_s))
    except RuntimeError as error:
        lacking = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if not lacking:
            return
        listed = ", ".join(map(str, lacking))
        raise RuntimeError(
            f"Timed out waiting {timeout_s:g} s for ranks that have not come: {listed}"
        ) from error


def round_store(store: Store, token: str) -> Store:
    """The part of the store that this round alone uses."""
    return PrefixStore(f"{_PREFIX}/{token}", store)


def own_address(outer: OuterLauncher) -> str | None:
    """This host's address as the host of the store sees it; None where there is no way there.

    Nothing is sent: a datagram socket is only told where it would send to.
    """
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            outer.master_addr, outer.master_port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError:
        return None
