"""The two rates of a run."""

from __future__ import annotations

import pytest

from dpexp.rates import RateMeter


def read(window_s: float, readings: list[tuple[float, float]], begin_s: float = 0.0) -> RateMeter:
    meter = RateMeter(window_s, begin_s)
    for at_s, count in readings:
        meter.read(at_s, count)
    return meter


def test_the_rate_of_a_window_and_that_of_the_whole_run_are_two_figures() -> None:
    meter = read(0.5, [(2.0, 2), (2.5, 4)])
    assert meter.lately_per_s == 4.0  # 2 samples in 0.5 s
    assert meter.whole_per_s == 1.6  # 4 samples in 2.5 s


def test_readings_older_than_the_window_do_not_matter() -> None:
    meter = read(2.0, [(1.0, 100), (2.0, 200), (3.0, 210), (4.0, 220)])
    assert meter.lately_per_s == 10.0
    assert meter.whole_per_s == 55.0


def test_a_window_is_never_shorter_than_asked_for() -> None:
    meter = read(2.0, [(1.0, 100), (2.5, 200), (4.0, 220)])
    assert meter.lately_per_s == 40.0  # since 1.0; since 2.5 would be 1.5 s only


def test_before_a_window_is_over_both_are_the_same() -> None:
    meter = read(5.0, [(101.0, 30), (102.0, 90)], begin_s=100.0)
    assert meter.lately_per_s == meter.whole_per_s == 45.0


def test_a_count_that_stands_still_has_a_rate_of_zero() -> None:
    meter = read(1.0, [(1.0, 10), (2.0, 10), (3.0, 10)])
    assert meter.lately_per_s == 0.0


@pytest.mark.parametrize("readings", [[], [(0.0, 0)], [(0.0, 7)]])
def test_where_no_time_has_passed_there_is_no_rate(readings: list[tuple[float, float]]) -> None:
    meter = read(1.0, readings)
    assert (meter.lately_per_s, meter.whole_per_s) == (None, None)
