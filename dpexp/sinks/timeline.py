"""``timeline.json``: phases and collectives of the first measured steps of all ranks.

In Chrome's trace format, which Perfetto opens (ui.perfetto.dev, or any other viewer of it).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpexp.files import write_whole
from dpexp.records import PHASES, RankResult

TRACKS = {1: "phases", 2: "collectives"}


def write_timeline(path: Path, ranks: Sequence[RankResult]) -> None:
    """Write the timeline of a run whose collectives were timed, whole or not at all."""
    begins_s = [step["begin_s"] for rank in ranks for step in (rank.comm or {}).get("timeline", [])]
    if not begins_s:
        return
    events = [event for rank in ranks for event in _rank_events(rank, min(begins_s))]
    write_whole(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def _rank_events(rank: RankResult, zero_s: float) -> list[dict[str, Any]]:
    """A process per rank, with a track for its phases and one for its collectives."""
    name = {"name": f"rank {rank.rank} on {rank.device}"}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank.rank, "args": name}
    ]
    for track, label in TRACKS.items():
        events.append(
            {
                "ph": "M", "name": "thread_name", "pid": rank.rank, "tid": track,
                "args": {"name": label},
            }
        )  # fmt: skip
    for step in (rank.comm or {})["timeline"]:
        at_s = step["begin_s"] - zero_s
        for phase, seconds in zip(PHASES, step["phases_s"], strict=True):
            events.append(_slice(phase, rank.rank, 1, at_s, seconds, {"step": step["step"]}))
            at_s += seconds
        for each in step["collectives"]:
            begin_s = each["ready_s"] - zero_s
            known = {"step": step["step"], "bytes": each["num_bytes"]}
            length_s = each["end_s"] - each["ready_s"]
            events.append(_slice(each["kind"], rank.rank, 2, begin_s, length_s, known))
    return events


def _slice(
    name: str, rank: int, track: int, begin_s: float, length_s: float, args: dict[str, Any]
) -> dict[str, Any]:
    """A span; the format's times are microseconds."""
    return {
        "ph": "X", "name": name, "pid": rank, "tid": track, "ts": begin_s * 1e6,
        "dur": length_s * 1e6, "args": args,
    }  # fmt: skip
