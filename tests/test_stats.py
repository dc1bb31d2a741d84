"""Summaries of measured values."""

from __future__ import annotations

import pytest

from dpexp.records import PhaseSummary
from dpexp.stats import percentile, summarize, t_quantile


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


@pytest.mark.parametrize(
    ("probability", "degrees", "expected"),  # from the table of the distribution
    [
        (0.975, 1, 12.7062),
        (0.975, 2, 4.3027),
        (0.975, 4, 2.7764),
        (0.975, 9, 2.2622),
        (0.975, 30, 2.0423),
        (0.995, 5, 4.0321),
        (0.95, 10, 1.8125),
        (0.975, 999, 1.9623),
        (0.975, 1000, 1.9623),
        (0.975, 1e9, 1.9600),
        (0.5, 3, 0.0),
    ],
)
def test_students_t_is_that_of_its_table(
    probability: float, degrees: float, expected: float
) -> None:
    assert t_quantile(probability, degrees) == pytest.approx(expected, abs=6e-5)


@pytest.mark.parametrize(("probability", "degrees"), [(0.4, 3), (1.0, 3), (0.975, 0.5)])
def test_students_t_outside_of_its_range_is_refused(probability: float, degrees: float) -> None:
    with pytest.raises(ValueError, match="no quantile"):
        t_quantile(probability, degrees)
