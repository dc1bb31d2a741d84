"""What the ranks of several hosts tell each other when their run fails: who was the first.

A rank that lost another one only knows that. So the rank that fails by itself says why, in the
store, and those that lost it look there. A rank that says nothing was killed, or does not get
there; a host that does not answer is cut off.
"""

from __future__ import annotations

import errno
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar, final

import psutil
from torch._C._distributed_c10d import Store

from dpexp.failures import LATE_PEER, LOST_PEER
from dpexp.hosts import host_of, where
from dpexp.records import ErrorRecord
from dpexp.timing import now_s

# How long the ranks that lost another one wait for its word, and for each other's. Less than what
# torchrun and the lifeline leave a rank to end.
WORDS_S = 1.5
LOOK_S = 0.05
# How long the store, or a host, may take to answer.
ANSWER_S = 2.0
# A port that nobody listens at: a host that is there refuses at once.
_NOBODYS_PORT = 9
_T = TypeVar("_T")


@final
@dataclass(frozen=True)
class Witness:
    """One rank, at the end of a round that fails.

    Args:
        store: the round's own part of it.
        hosts: see :func:`dpexp.hosts.hosts_of`.
        holder: the rank whose process holds the store; None where an agent does.
    """

    store: Store
    rank: int
    hosts: Sequence[dict[str, Any]]
    holder: int | None = None

    def first(self, own: ErrorRecord) -> ErrorRecord:
        """Why the round failed: this rank's error, or that of the rank which was the first."""
        own = replace(own, host=host_of(self.hosts, self.rank))
        if own.type not in (LOST_PEER, LATE_PEER) and own.kind != "interrupted":
            return _within(ANSWER_S, lambda: self._said(own)) or own
        answers = _Answers([each for each in self.hosts if self.rank not in each["ranks"]])
        found = _within(WORDS_S + ANSWER_S, lambda: self._of_others(own, answers))
        if found is not None:
            return found
        gone = [] if self.holder is None or own.kind == "interrupted" else [self.holder]
        return self._about(own, gone, answers)

    def _said(self, error: ErrorRecord) -> ErrorRecord:
        """Say why; what another rank has said before counts more."""
        text = self.store.compare_set("failed", "", json.dumps(asdict(error)))
        return ErrorRecord(**json.loads(text))

    def _of_others(self, own: ErrorRecord, answers: _Answers) -> ErrorRecord:
        """What another rank has said, else what this one can conclude from who says nothing."""
        left = {"error": asdict(own), "dead": self._dead_here()}
        self.store.set(f"left/{self.rank}", json.dumps(left))
        deadline_s = now_s() + WORDS_S
        while now_s() < deadline_s:
            if self.store.check(["failed"]):
                return ErrorRecord(**json.loads(self.store.get("failed")))
            time.sleep(LOOK_S)
        ranks = [rank for each in self.hosts for rank in each["ranks"]]
        words = {
            rank: json.loads(self.store.get(f"left/{rank}"))
            for rank in ranks
            if self.store.check([f"left/{rank}"])
        }
        stopped = [w["error"] for w in words.values() if w["error"]["kind"] == "interrupted"]
        silent = [rank for rank in ranks if rank not in words]
        if own.type != LATE_PEER:
            silent = sorted({rank for word in words.values() for rank in word["dead"]} - set(words))
            if stopped and not silent:
                return self._said(ErrorRecord(**stopped[0]))
            silent = silent or self._unheard(words)
        return self._said(self._about(own, silent, answers))

    def _unheard(self, words: dict[int, Any]) -> list[int]:
        """The ranks of hosts without a word. On others, those that say nothing live."""
        return [
            r for each in self.hosts if not set(each["ranks"]) & set(words) for r in each["ranks"]
        ]

    def _dead_here(self) -> list[int]:
        own = next(each for each in self.hosts if self.rank in each["ranks"])
        ranks_and_pids = zip(own["ranks"], own["pids"], strict=True)
        return [rank for rank, pid in ranks_and_pids if not _lives(pid)]

    def _about(self, own: ErrorRecord, silent: list[int], answers: _Answers) -> ErrorRecord:
        """This rank's error, with what is known of ranks and hosts that do not answer."""
        message = own.message.rstrip(".")
        gone = answers.unreachable()
        if gone:
            listed = "; ".join(
                f"{each['host']} ({each['address']}, {where([], each['ranks'])})" for each in gone
            )
            return replace(own, message=f"{message}. Not reachable from here: {listed}")
        if not silent:
            return own
        told, host = where(self.hosts, silent), host_of(self.hosts, silent[0])
        if own.type == LATE_PEER:
            return replace(own, message=f"{message}. Nothing was heard of {told}")
        text = f"{told} ended without a word (killed?); then {message}"
        return replace(own, kind="crash", message=text, rank=silent[0], host=host)


@final
class _Answers:
    """Whether hosts answer; they are being asked from now on."""

    def __init__(self, hosts: Sequence[dict[str, Any]]) -> None:
        self._hosts = hosts
        self._there: dict[int, bool] = {}
        self._threads = [
            threading.Thread(target=self._ask, args=(number,), daemon=True)
            for number, each in enumerate(hosts)
            if each["address"]
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        self._there[number] = answers_there(self._hosts[number]["address"])

    def unreachable(self) -> list[dict[str, Any]]:
        """Those that do not answer. Waits until all have, or their time is up."""
        for thread in self._threads:
            thread.join(ANSWER_S)
        return [each for number, each in enumerate(self._hosts) if self._there.get(number) is False]


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def answers_there(address: str) -> bool:
    """Whether a host takes part in the network: it refuses a connection, or accepts it."""
    try:
        with socket.create_connection((address, _NOBODYS_PORT), ANSWER_S):
            return True
    except OSError as error:
        return error.errno == errno.ECONNREFUSED


def _within(seconds: float, ask: Callable[[], _T]) -> _T | None:
    """What the store says; None if it does not answer in time, as one that is cut off."""
    found: list[_T] = []

    def asked() -> None:
        try:
            found.append(ask())
        except RuntimeError:  # the store is gone, or was told to stop waiting
            return

    thread = threading.Thread(target=asked, name="dpexp-witness", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
