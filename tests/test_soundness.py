"""Results that somebody has edited by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders import make_run_data

from dpexp.compare import read_side
from dpexp.soundness import fault


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ({"num_devices": "2"}, "num_devices is '2', not a whole number"),
        ({"num_devices": True}, "num_devices is True, not a whole number"),
        ({"num_devices": 10**400}, "num_devices is too large, not a whole number"),
        ({"emulated": 1}, "emulated is 1, not true or false"),
        ({"batch": [30]}, "batch is [30], not a set of keys"),
        ({"batch": {"global": ""}}, "batch.global is '', not a whole number"),
        ({"throughput": {"wall_s": -1.0}}, "throughput.wall_s is -1.0, not a finite number of 0"),
        ({"throughput": {"wall_s": 10**400}}, "throughput.wall_s is too large, not a finite"),
        ({"loss": {"first": float("nan")}}, "loss.first is nan, not a finite number"),
        ({"timing": {"x": {"mean_s": {}}}}, "timing.x.mean_s is {}, not a finite number of 0"),
        ({"ranks": {"0": 1}}, "ranks is {'0': 1}, not a list"),
        ({"comm": {"ranks": [{}, 5]}}, "comm.ranks.1 is 5, not a set of keys"),
        ({"error": {"message": ["a"]}}, "error.message is ['a'], not a text"),
        ({"notes": ["x" * 100, None, 3]}, "notes.2 is 3, not a text"),
    ],
)
def test_a_part_of_another_type_is_told_with_its_place(part: dict[str, Any], told: str) -> None:
    found = fault(part)
    assert found is not None
    assert found.startswith(told)


def test_what_is_not_known_or_null_is_sound() -> None:
    part = {"batch": None, "of_a_later_version": object(), "loss": {"first": -3, "last": None}}
    assert fault(part) is None
    assert fault(make_run_data("ddp", 2, rate=100.0)) is None


def test_compare_names_a_result_that_was_edited_and_reads_the_others(tmp_path: Path) -> None:
    for name, change in (("0_a", {}), ("1_b", {"injected": "NaN"}), ("2_c", {"label": None})):
        (tmp_path / name).mkdir()
        text = json.dumps({**make_run_data("ddp", 2, rate=100.0), **change})
        (tmp_path / name / "run.json").write_text(text)
    side = read_side("A", str(tmp_path))
    assert (side.runs, len(side.unreadable)) == (1, 2)
    assert side.unreadable[0].endswith("result: injected is 'NaN', not a list")
    assert side.unreadable[1].endswith("it has no label")
