"""The intervals of a sweep's figures, and how they are told."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from test_tables import CELL

from dpexp.comparing import Timed
from dpexp.report.intervals import (
    figures_against,
    interval_lines,
    own_figures,
    samples_of,
    steps_of,
    with_interval,
)
from dpexp.report.scaling import Cell

T1 = 12.7062  # Student's t at 97.5 % with 1 degree of freedom


def run(rate: float, seconds: float = 2.0, error: float | None = None) -> dict[str, Any]:
    """A run of 4 steps."""
    return {
        "status": "ok",
        "steps": {"measured": 4, "warmup": 1},
        "throughput": {
            "samples_per_s": rate,
            "samples_measured": rate * seconds,
            "wall_s": seconds,
        },
        "uncertainty": None if error is None else {"relative_standard_error": error},
    }


def pair(rate: float) -> list[dict[str, Any]]:
    """Two runs whose rates' logarithms have an error of 0.01."""
    return [run(rate * math.exp(-0.01)), run(rate * math.exp(0.01))]


REPEATED = replace(
    CELL,
    repeats=5,
    speedup=1.62,
    speedup_low=1.579,
    speedup_high=1.661,
    speedup_scope="5 repeats",
    verdict="faster",
)


def test_a_run_is_its_samples_and_steps_in_its_seconds_with_its_own_error() -> None:
    assert samples_of(run(100.0, 2.0, 0.03)) == Timed(200.0, 2.0, 0.03)
    assert steps_of(run(100.0, 2.0)) == Timed(4.0, 2.0, None)


def test_a_run_of_before_there_were_intervals_is_read() -> None:
    old = {"status": "ok", "throughput": {"samples_per_s": 80.0}}
    assert samples_of(old) == Timed(80.0, 1.0, None)
    assert steps_of(old) is None
    figures = own_figures([old])
    assert figures["samples_per_s"] == 80.0
    assert (figures["samples_per_s_low"], figures["interval_scope"]) == (None, None)


@pytest.mark.parametrize(
    "changes", [{"status": "failed"}, {"throughput": None}, {"throughput": {"samples_per_s": None}}]
)
def test_a_run_without_a_throughput_counts_for_nothing(changes: dict[str, Any]) -> None:
    assert samples_of({**run(1.0), **changes}) is None
    assert own_figures([{**run(1.0), **changes}]) == {}


def test_repeats_are_pooled_and_have_an_interval_and_a_noise_floor() -> None:
    figures = own_figures(pair(100.0))
    pooled = (math.exp(-0.01) + math.exp(0.01)) / 2 * 100  # both took 2 s
    assert figures["samples_per_s"] == pytest.approx(pooled)
    assert figures["samples_per_s_low"] == pytest.approx(pooled * math.exp(-T1 * 0.01), rel=1e-5)
    assert figures["samples_per_s_high"] == pytest.approx(pooled * math.exp(T1 * 0.01), rel=1e-5)
    assert figures["interval_scope"] == "2 repeats"
    assert figures["noise_floor"] == pytest.approx(math.expm1(T1 * 0.02), rel=1e-4)


def test_the_mean_step_is_all_seconds_by_all_steps() -> None:
    figures = own_figures([run(100.0, 2.0), run(100.0, 4.0)])
    assert figures["step_mean_s"] == pytest.approx(0.75)  # 6 s for 8 steps
    assert figures["step_mean_low_s"] < 0.75 < figures["step_mean_high_s"]


def test_speed_up_and_efficiency_have_the_same_interval_but_for_the_devices() -> None:
    figures = figures_against(pair(300.0), pair(100.0), devices=2)
    half = T1 * math.hypot(0.01, 0.01)
    assert figures["speedup"] == pytest.approx(3.0)
    assert figures["speedup_low"] == pytest.approx(3 * math.exp(-half), rel=1e-5)
    assert figures["efficiency"] == pytest.approx(1.5)
    assert figures["efficiency_high"] == pytest.approx(1.5 * math.exp(half), rel=1e-5)
    assert (figures["speedup_scope"], figures["verdict"]) == ("2 repeats", "faster")


def test_one_run_each_has_an_interval_within_the_run_and_no_verdict() -> None:
    figures = figures_against([run(300.0, error=0.01)], [run(100.0, error=0.01)], devices=2)
    assert figures["speedup_low"] == pytest.approx(3 * math.exp(-1.96 * 0.0141421), rel=1e-4)
    assert figures["speedup_scope"] == "within one run"
    assert figures["verdict"] == "one run each: repeats are needed to tell"


def test_the_table_shows_the_interval_of_repeats() -> None:
    assert with_interval(REPEATED) == "1.62× (1.58–1.66)"


def test_the_table_does_not_show_an_interval_that_does_not_know_how_runs_differ() -> None:
    assert with_interval(replace(REPEATED, speedup_scope="within one run")) == "1.62×"
    assert with_interval(replace(REPEATED, speedup_low=None, speedup_high=None)) == "1.62×"
    assert with_interval(replace(REPEATED, speedup=None)) == "–"


def test_a_cell_that_does_not_differ_is_told_with_its_interval() -> None:
    same = replace(
        REPEATED,
        verdict="no measurable difference",
        speedup=1.004,
        speedup_low=0.98,
        speedup_high=1.03,
    )
    assert interval_lines([same]) == [
        "1_dp_n2: no measurable difference from 0_none_n1: 1.00× (0.98–1.03)"
    ]
    assert interval_lines([REPEATED]) == []


@pytest.mark.parametrize(
    ("floor", "text"),
    [
        (0.0214, "2.1 %"),
        (1.0, "100 %"),
        (15.0, "a factor of 16"),
        (1e20, "a factor above 100"),
    ],
)
def test_the_noise_floor_is_that_of_the_baseline(floor: float, text: str) -> None:
    base = replace(REPEATED, folder="0_none_n1", noise_floor=floor, verdict=None)
    other = replace(REPEATED, noise_floor=0.5)
    assert interval_lines([base, other]) == [
        f"noise floor: two runs of 0_none_n1 differ by up to {text} (95%, 5 repeats)"
    ]


def test_without_repeats_the_report_says_what_would_tell() -> None:
    base = replace(CELL, folder="0_none_n1")
    line = "one run per cell: repeats=5 would tell whether a difference is real"
    assert interval_lines([base, CELL]) == [line]
    assert interval_lines([base]) == []
    lost: Cell = replace(CELL, speedup=None)
    assert interval_lines([base, lost]) == []
