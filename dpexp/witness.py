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
    """

    store: Store
    rank: int
    hosts: Sequence[dict[str, Any]]

    def first(self, own: ErrorRecord) -> ErrorRecord:
        """Why the round failed: this rank's error, or that of the rank which was the first."""
        own = replace(own, host=host_of(self.hosts, self.rank))
        if own.type not in (LOST_PEER, LATE_PEER):
            return _within(ANSWER_S, lambda: self._said(own)) or own
        found = _within(WORDS_S + ANSWER_S, lambda: self._of_others(own))
        if found is not None:
            return found
        return self._with_unreachable(own)

    def _said(self, error: ErrorRecord) -> ErrorRecord:
        """Say why; what another rank has said before counts more."""
        text = self.store.compare_set("failed", "", json.dumps(asdict(error)))
        return ErrorRecord(**json.loads(text))

    def _of_others(self, own: ErrorRecord) -> ErrorRecord:
        ranks = [rank for each in self.hosts for rank in each["ranks"]]
        self.store.set(f"left/{self.rank}", own.message)
        deadline_s = now_s() + WORDS_S
        while now_s() < deadline_s:
            if self.store.check(["failed"]):
                return ErrorRecord(**json.loads(self.store.get("failed")))
            time.sleep(LOOK_S)
        silent = [rank for rank in ranks if not self.store.check([f"left/{rank}"])]
        return self._said(self._about(own, silent))

    def _about(self, own: ErrorRecord, silent: list[int]) -> ErrorRecord:
        """This rank's error, with what is known of ranks that have not said a word."""
        if not silent:
            return self._with_unreachable(own)
        told = where(self.hosts, silent)
        if own.type == LATE_PEER:
            return self._with_unreachable(
                replace(own, message=f"{own.message}. Not heard of since: {told}")
            )
        text = f"{told} ended without a word (killed?); {own.message}"
        host = host_of(self.hosts, silent[0])
        return replace(own, message=text, rank=silent[0], host=host)

    def _with_unreachable(self, own: ErrorRecord) -> ErrorRecord:
        """The error, with the hosts that do not answer."""
        others = [each for each in self.hosts if self.rank not in each["ranks"]]
        answers: dict[int, bool] = {}

        def ask(number: int, address: str) -> None:
            answers[number] = answers_there(address)

        threads = [
            threading.Thread(target=ask, args=(number, each["address"]), daemon=True)
            for number, each in enumerate(others)
            if each["address"]
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(ANSWER_S + 1)
        gone = [each for number, each in enumerate(others) if answers.get(number) is False]
        if not gone:
            return own
        listed = "; ".join(
            f"{each['host']} ({each['address']}, {where([], each['ranks'])})" for each in gone
        )
        return replace(own, message=f"{own.message}. Not reachable from here: {listed}")


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
