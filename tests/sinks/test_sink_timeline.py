"""timeline.json: Chrome's trace format, in microseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from builders import make_rank_result

from dpexp.records import PHASES, RankResult
from dpexp.sinks import write_timeline


def drawn(step: int, begin_s: float, *collectives: tuple[float, float, float]) -> dict[str, Any]:
    """A step whose phases take 1 to 6 ms."""
    return {
        "step": step,
        "begin_s": begin_s,
        "phases_s": [0.001, 0.002, 0.003, 0.004, 0.005, 0.006],
        "collectives": [
            {
                "kind": "all_reduce",
                "num_bytes": 48,
                "ready_s": ready,
                "start_s": start,
                "end_s": end,
                "stall_s": 0.0,
            }
            for ready, start, end in collectives
        ],
    }


def rank_of(rank: int, *timeline: dict[str, Any]) -> RankResult:
    return make_rank_result(rank, comm={"timeline": list(timeline)})


def written(tmp_path: Path, *ranks: RankResult) -> dict[str, Any]:
    path = tmp_path / "timeline.json"
    write_timeline(path, ranks)
    parsed: dict[str, Any] = json.loads(path.read_text(), parse_constant=lambda name: 1 / 0)
    return parsed


def slices(trace: dict[str, Any], rank: int, track: int) -> list[tuple[str, int, int]]:
    """Name, begin and length, in whole microseconds."""
    return [
        (event["name"], round(event["ts"]), round(event["dur"]))
        for event in trace["traceEvents"]
        if event["ph"] == "X" and (event["pid"], event["tid"]) == (rank, track)
    ]


def test_phases_follow_each_other_from_the_first_steps_begin(tmp_path: Path) -> None:
    trace = written(tmp_path, rank_of(0, drawn(3, 500.0), drawn(4, 500.025)))
    first = [
        ("data", 0, 1000), ("transfer", 1000, 2000), ("forward", 3000, 3000),
        ("backward", 6000, 4000), ("optimizer", 10000, 5000), ("other", 15000, 6000),
    ]  # fmt: skip
    second = [(name, begin + 25000, length) for name, begin, length in first]
    assert slices(trace, 0, 1) == [*first, *second]
    assert [name for name, _, _ in first] == list(PHASES)
    numbers = [e["args"]["step"] for e in trace["traceEvents"] if e["ph"] == "X"]
    assert numbers == [3] * 6 + [4] * 6


def test_where_the_computation_stands_still_for_a_collective_is_within_its_phase(
    tmp_path: Path,
) -> None:
    step = drawn(0, 500.0, (500.004, 500.004, 500.0055), (500.0055, 500.0055, 500.007))
    step["collectives"][0]["stall_s"] = 0.001
    trace = written(tmp_path, rank_of(0, step))
    phases = slices(trace, 0, 1)
    # Forward lasts from 3 to 6 ms; the second collective is not waited for.
    assert [each for each in phases if each[0] not in PHASES] == [
        ("stands still for all_reduce", 4500, 1000)
    ]
    assert slices(trace, 0, 2) == [("all_reduce", 4000, 1500)]


def test_a_collective_is_a_wait_for_the_last_rank_and_then_transport(tmp_path: Path) -> None:
    trace = written(tmp_path, rank_of(0, drawn(0, 500.0, (500.007, 500.008, 500.0095))))
    assert slices(trace, 0, 2) == [
        ("waiting for other ranks", 7000, 1000),
        ("all_reduce", 8000, 1500),
    ]
    for event in trace["traceEvents"]:
        if event["tid"] == 2 and event["ph"] == "X":
            assert event["args"] == {"step": 0, "bytes": 48}


def test_collectives_of_a_step_that_overlap_have_a_track_each(tmp_path: Path) -> None:
    both = drawn(0, 500.0, (500.007, 500.007, 500.0095), (500.008, 500.008, 500.01))
    trace = written(tmp_path, rank_of(0, both))
    assert slices(trace, 0, 2) == [("all_reduce", 7000, 2500)]
    assert slices(trace, 0, 3) == [("all_reduce", 8000, 2000)]


def test_the_ranks_are_processes_on_one_axis(tmp_path: Path) -> None:
    late = drawn(0, 500.002, (500.008, 500.008, 500.009))
    trace = written(tmp_path, rank_of(0, drawn(0, 500.0)), rank_of(1, late))
    assert slices(trace, 0, 1)[0] == ("data", 0, 1000)
    assert slices(trace, 1, 1)[0] == ("data", 2000, 1000)
    assert slices(trace, 1, 2) == [("all_reduce", 8000, 1000)]
    names = {
        (event["pid"], event.get("tid")): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["ph"] == "M"
    }
    assert names == {
        (0, 0): "rank 0 on cpu", (0, 1): "phases",
        (1, 0): "rank 1 on cpu", (1, 1): "phases", (1, 2): "collective 0",
    }  # fmt: skip


def test_the_file_is_what_chrome_calls_a_trace(tmp_path: Path) -> None:
    trace = written(tmp_path, rank_of(0, drawn(0, 1.0, (1.001, 1.001, 1.002))))
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    for event in trace["traceEvents"]:
        assert event["ph"] in ("M", "X")
        assert isinstance(event["pid"], int) and isinstance(event["name"], str)
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
            assert isinstance(event["tid"], int)


def test_without_timed_collectives_there_is_no_file(tmp_path: Path) -> None:
    write_timeline(tmp_path / "timeline.json", [make_rank_result(0), make_rank_result(1)])
    write_timeline(tmp_path / "timeline.json", [rank_of(0)])
    assert list(tmp_path.iterdir()) == []
