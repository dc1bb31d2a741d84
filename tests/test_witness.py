"""Which rank's end counts, when those of several hosts end one after the other."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from dpexp import witness
from dpexp.failures import LATE_PEER, LOST_PEER
from dpexp.records import ErrorRecord
from dpexp.witness import Witness, answers_there


def host(name: str, ranks: list[int], pids: list[int]) -> dict[str, Any]:
    return {"host": name, "address": "127.0.0.1", "ranks": ranks, "pids": pids}


def dead() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


ME = os.getpid()
HOSTS = [host("a", [0, 1], [ME, ME]), host("b", [2, 3], [ME, ME])]


def lost(rank: int) -> ErrorRecord:
    return ErrorRecord("crash", LOST_PEER, f"rank {rank} lost the connection", rank)


def late(rank: int) -> ErrorRecord:
    return ErrorRecord("hang", LATE_PEER, f"rank {rank} waited 6 s", rank)


def told(rank: int) -> ErrorRecord:
    return ErrorRecord("interrupted", "Interrupted", "stopped by SIGTERM", rank)


def firsts(errors: dict[int, ErrorRecord], hosts: list[dict[str, Any]]) -> list[ErrorRecord]:
    store = HashStore()
    with ThreadPoolExecutor(len(errors)) as pool:
        return list(pool.map(lambda rank: Witness(store, rank, hosts).first(errors[rank]), errors))


def test_who_lost_a_rank_tells_what_that_rank_has_said() -> None:
    error = ErrorRecord("user_error", "ValueError", "ValueError: boom", 3, 7)
    found = firsts({3: error, 0: lost(0), 1: late(1), 2: told(2)}, HOSTS)
    assert {(each.message, each.rank, each.host) for each in found} == {
        ("ValueError: boom", 3, "b")
    }


def test_a_rank_that_was_killed_is_named_and_one_that_only_waits_is_not() -> None:
    """Rank 1 says nothing either: it waits for rank 0. Rank 2 was told to end by its agent."""
    hosts = [HOSTS[0], host("b", [2, 3], [ME, dead()])]
    for each in firsts({0: lost(0), 2: told(2)}, hosts):
        assert (each.kind, each.rank, each.host) == ("crash", 3, "b")
        assert each.message.startswith("rank 3 on b ended without a word (killed?); then ")


def test_a_signal_to_one_agent_is_the_cause_although_other_ranks_wait() -> None:
    for each in firsts({2: told(2), 3: told(3)}, HOSTS):
        assert (each.kind, each.host, each.message) == ("interrupted", "b", "stopped by SIGTERM")


def test_a_host_of_which_nothing_is_heard_is_named() -> None:
    (found,) = firsts({0: lost(0)}, [host("a", [0], [ME]), host("b", [1], [dead()])])
    assert (found.rank, found.host) == (1, "b")


def test_a_rank_that_does_not_come_is_named_by_those_that_wait() -> None:
    for each in firsts({0: late(0), 1: late(1), 2: late(2)}, HOSTS):
        assert each.kind == "hang"
        assert each.message.endswith("waited 6 s. Nothing was heard of rank 3 on b")


class Gone(HashStore):
    """A store whose process has ended."""

    def set(self, *_args: Any) -> None:
        raise RuntimeError("Broken pipe")


@pytest.mark.parametrize(
    ("own", "holder", "begin", "rank"),
    [
        (lost(2), 0, "rank 0 on a ended without a word (killed?); then rank 2 lost", 0),
        (late(2), 0, "rank 2 waited 6 s. Nothing was heard of rank 0 on a", 2),
        (told(2), 0, "stopped by SIGTERM", 2),
        (lost(2), None, "rank 2 lost", 2),
    ],
    ids=["lost", "late", "told to end", "an agent's store"],
)
def test_a_store_that_is_gone_tells_of_the_rank_that_held_it(
    own: ErrorRecord, holder: int | None, begin: str, rank: int
) -> None:
    found = Witness(Gone(), 2, HOSTS, holder).first(own)
    assert found.message.startswith(begin)
    assert found.rank == rank


def test_a_host_that_is_cut_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(witness, "answers_there", lambda _address: False)
    (found,) = firsts({2: late(2)}, HOSTS)
    assert found.message == (
        "rank 2 waited 6 s. Not reachable from here: a (127.0.0.1, ranks 0 and 1)"
    )
    assert (found.rank, found.host) == (2, "b")


def test_a_host_that_refuses_a_connection_is_there() -> None:
    assert answers_there("127.0.0.1")
