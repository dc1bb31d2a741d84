"""Ranks that agree in a store which an earlier round of the same launch has used."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, Store

from dpexp import meeting
from dpexp.env import OuterLauncher
from dpexp.errors import ConfigError
from dpexp.meeting import Meeting, meet, reach_store, round_store

LONG_S = 30.0


def outer(rank: int, ranks: int) -> OuterLauncher:
    return OuterLauncher(rank, rank, ranks, ranks, "abc", "127.0.0.1", 29500)


def go(store: Store, rank: int, ranks: int, said: Any, timeout_s: float = LONG_S) -> Meeting:
    def answered(token: str, everyone: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"token": token, "sum": sum(each["value"] for each in everyone)}

    return meet(store, outer(rank, ranks), "run", {"value": said}, answered, timeout_s)


def round_of(store: Store, values: Sequence[int]) -> list[Meeting]:
    with ThreadPoolExecutor(len(values)) as pool:
        ranks = range(len(values))
        return list(pool.map(lambda rank: go(store, rank, len(values), values[rank]), ranks))


def test_all_know_what_each_has_said_and_what_rank_0_answers() -> None:
    meetings = round_of(HashStore(), [1, 20, 300])
    assert meetings[0] == meetings[1] == meetings[2]
    assert [each["value"] for each in meetings[0].said] == [1, 20, 300]
    assert meetings[0].answer == {"token": meetings[0].token, "sum": 321}


def test_a_later_round_takes_nothing_for_its_own_that_an_earlier_one_has_left() -> None:
    """Also with fewer ranks, and when the others come before rank 0 does."""
    store = HashStore()
    first = round_of(store, [1, 20, 300])[0]
    with ThreadPoolExecutor(1) as pool:
        early: Future[Meeting] = pool.submit(go, store, 1, 2, 50)
        with pytest.raises(TimeoutError):
            early.result(timeout=0.3)
        second = go(store, 0, 2, 4)
        assert early.result(timeout=LONG_S) == second
    assert second.token != first.token
    assert second.answer["sum"] == 54


def test_a_round_has_a_part_of_the_store_for_itself() -> None:
    store = HashStore()
    round_store(store, "one").set("address", "of a dead rank")
    assert not round_store(store, "two").check(["address"])


def test_rank_0_stays_with_its_store_until_all_have_its_answer() -> None:
    """Its process may end right after: all are refused, say."""
    store = HashStore()
    with ThreadPoolExecutor(1) as pool:
        leader = pool.submit(go, store, 0, 2, 1)
        while not store.check(["dpexp/run/leader"]):
            time.sleep(0.01)
        token = store.get("dpexp/run/leader").decode()
        store.set(f"dpexp/run/{token}/1", '{"nonce": "n", "said": {"value": 2}}')
        with pytest.raises(TimeoutError):
            leader.result(timeout=0.3)
        store.add(f"dpexp/run/{token}/heard", 1)
        assert leader.result(timeout=LONG_S).answer["sum"] == 3


def test_rank_0_is_where_the_others_look_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"eth0": "10.0.0.1", "ib0": "10.1.0.1", "lo": "127.0.0.1"}
    monkeypatch.setattr(meeting, "addresses", lambda: known)
    monkeypatch.setattr(meeting, "address_of", known.__getitem__)
    monkeypatch.setattr(meeting, "loopback_interface", lambda: "lo")

    def end(master: str) -> str:
        return meeting._own_end(replace(outer(0, 2), master_addr=master), "ib0")

    assert {end(master) for master in ("10.1.0.1", "127.0.0.1", "10.9.0.9")} == {"10.1.0.1"}
    with pytest.raises(ConfigError, match=r"other ranks look for it at 10\.0\.0\.1") as refused:
        end("10.0.0.1")
    assert refused.value.fix == "MASTER_ADDR=10.1.0.1"


def test_an_address_of_no_host_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_args: Any, **_more: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(RuntimeError, match=r"127\.0\.0\.1 is the address of no host: Name"):
        reach_store(outer(0, 2), 1.0)


def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(RuntimeError, match=r"Timed out waiting 0\.5 s .* not come: 1, 2$"):
        go(HashStore(), 0, 3, 1, timeout_s=0.5)


def test_a_rank_that_is_not_answered_gives_up() -> None:
    with pytest.raises(RuntimeError, match=r"Timed out waiting 0\.3 s for rank 0"):
        go(HashStore(), 1, 2, 1, timeout_s=0.3)
