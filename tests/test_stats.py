"""Summaries of measured values."""

from __future__ import annotations

import pytest

from dpexp.records import PhaseSummary
from dpexp.stats import percentile, summarize


@pytest.mark.parametrize(("percent", "value"), [(50, 2.5), (95, 3.85), (25, 1.75), (0.5, 1.015)])
def test_percentiles_of_one_to_four_are_interpolated_linearly(percent: float, value: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == pytest.approx(value, abs=1e-12)


def test_every_percentile_of_one_value_is_that_value() -> None:
    assert percentile([7.0], 95) == 7.0


@pytest.mark.parametrize("percent", [0, 100, 101, -1, float("nan")])
def test_a_percentile_outside_of_0_to_100_is_refused_by_its_number(percent: float) -> None:
    with pytest.raises(ValueError, match=f"percentile {percent} "):
        percentile([1.0, 2.0], percent)


def test_the_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_a_summary_of_ninety_short_and_ten_long_steps() -> None:
    summary = summarize([0.010] * 90 + [0.100] * 10)
    assert summary.mean_s == pytest.approx(0.019)
    assert summary.p50_s == pytest.approx(0.010)
    assert summary.p95_s == pytest.approx(0.100)
    assert summary.min_s == pytest.approx(0.010)
    assert summary.max_s == pytest.approx(0.100)
    assert summary.count == 100


def test_a_summary_of_one_to_four() -> None:
    assert summarize([4.0, 1.0, 3.0, 2.0]) == PhaseSummary(
        mean_s=2.5, p50_s=2.5, p95_s=pytest.approx(3.85), min_s=1.0, max_s=4.0, count=4
    )


def test_a_summary_of_nothing_is_null_with_count_zero() -> None:
    assert summarize([]) == PhaseSummary(None, None, None, None, None, 0)


def test_a_summary_holds_plain_floats_that_json_can_write() -> None:
    summary = summarize([1, 2])
    assert [type(value) for value in (summary.mean_s, summary.p50_s, summary.max_s)] == [float] * 3
