"""``timeline.json``: phases and collectives of the first measured steps.

Of all ranks, or of some of very many (brought.py).

In Chrome's trace format, which Perfetto opens (ui.perfetto.dev, or any other viewer of it).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpexp.files import write_whole
from dpexp.records import PHASES, RankResult

PHASE_TRACK = 1
FIRST_TRACK = 2  # of collectives; one each, since they may overlap


def write_timeline(path: Path, ranks: Sequence[RankResult]) -> None:
    """Write the timeline of a run whose collectives were timed, whole or not at all."""
    begins_s = [step["begin_s"] for rank in ranks for step in (rank.comm or {}).get("timeline", [])]
    if not begins_s:
        return
    zero_s = min(begins_s)
    drawn = [rank for rank in ranks if (rank.comm or {}).get("timeline")]
    events = [event for rank in drawn for event in _rank_events(rank, zero_s)]
    write_whole(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def _rank_events(rank: RankResult, zero_s: float) -> list[dict[str, Any]]:
    """A process per rank, with a track for its phases and one for each collective of a step."""
    steps = (rank.comm or {})["timeline"]
    widest = max((len(step["collectives"]) for step in steps), default=0)
    events = [_name("process_name", rank.rank, 0, f"rank {rank.rank} on {rank.device}")]
    events.append(_name("thread_name", rank.rank, PHASE_TRACK, "phases"))
    for index in range(widest):
        label = f"collective {index}"
        events.append(_name("thread_name", rank.rank, FIRST_TRACK + index, label))
    for step in steps:
        at_s, number = step["begin_s"] - zero_s, {"step": step["step"]}
        for phase, seconds in zip(PHASES, step["phases_s"], strict=True):
            events.append(_slice(phase, rank.rank, PHASE_TRACK, at_s, seconds, number))
            at_s += seconds
        for index, each in enumerate(step["collectives"]):
            known = {**number, "bytes": each["num_bytes"]}
            # Two ranks' clocks may differ by a little: it ends after it starts all the same.
            start_s = min(each["start_s"], each["end_s"])
            spans = {
                "waiting for other ranks": (each["ready_s"], start_s),
                each["kind"]: (start_s, each["end_s"]),
            }
            events += [
                _slice(name, rank.rank, FIRST_TRACK + index, from_s - zero_s, to_s - from_s, known)
                for name, (from_s, to_s) in spans.items()
                if to_s > from_s
            ]
            if each["stall_s"] > 0:  # within its phase, on the track of what computes
                begin_s, stall_s = each["end_s"] - each["stall_s"] - zero_s, each["stall_s"]
                name = f"stands still for {each['kind']}"
                events.append(_slice(name, rank.rank, PHASE_TRACK, begin_s, stall_s, known))
    return events


def _name(kind: str, rank: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": track, "args": {"name": name}}


def _slice(
    name: str, rank: int, track: int, begin_s: float, length_s: float, args: dict[str, Any]
) -> dict[str, Any]:
    """A span; the format's times are microseconds."""
    return {
        "ph": "X", "name": name, "pid": rank, "tid": track, "ts": begin_s * 1e6,
        "dur": length_s * 1e6, "args": args,
    }  # fmt: skip
