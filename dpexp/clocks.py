"""How the clocks of several hosts differ. Pure but for the machine's identity."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Containers of one kernel may have been given clocks of their own.
_CLOCKS = Path("/proc/self/ns/time")


class ClockOffset(NamedTuple):
    """A clock minus that of rank 0, and how far off that may be."""

    offset_s: float
    error_s: float


def closest(answers: Sequence[tuple[float, float, float]]) -> ClockOffset:
    """The offset of a peer's clock, from the answer that took the least time.

    The peer read its clock between question and answer; half of that time is the largest error.
    Source: Cristian, "Probabilistic clock synchronization", 1989.

    Args:
        answers: of each question (asked, the peer's clock, answered), in seconds.
    """
    asked_s, peer_s, answered_s = min(answers, key=lambda each: each[2] - each[0])
    return ClockOffset(peer_s - (asked_s + answered_s) / 2, (answered_s - asked_s) / 2)


def machine_id() -> str:
    """What processes with one clock have in common: their kernel's boot, else the host.

    Hosts that are only other networks of one kernel (containers) are one machine here.
    """
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()
    try:
        return f"{boot} {_CLOCKS.readlink()}"
    except OSError:
        return boot


def clock_key() -> int:
    """:func:`machine_id` as a number of 63 bits: as short for the ranks to exchange as it gets."""
    digest = hashlib.sha256(machine_id().encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
