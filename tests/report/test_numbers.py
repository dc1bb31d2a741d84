"""Figures with no more digits than they are good for."""

from __future__ import annotations

import pytest

from dpexp.report.numbers import milliseconds, percent, ranged, significant, times


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.00012345, "0.000123"),
        (0.789, "0.789"),
        (9.996, "10.0"),
        (12.345, "12.3"),
        (1234.5, "1,230"),
        (49127.0, "49,100"),
        (-0.5, "-0.500"),
        (1e20, "100,000,000,000,000,000,000"),
    ],
)
def test_three_significant_digits(value: float, text: str) -> None:
    assert significant(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.789, "0.79"), (3.4, "3.40"), (12.345, "12.3"), (0.001, "0.00")]
)
def test_a_factor_has_two_decimals_below_ten(value: float, text: str) -> None:
    assert times(value) == text


@pytest.mark.parametrize(
    ("value", "low", "high", "text"),
    [
        (3.41, 3.3, 3.52, "3.4 (3.3–3.5)"),
        (3.41, 3.409, 3.411, "3.41 (3.41–3.41)"),
        (3.41, 3.41, 3.41, "3.41 (3.41–3.41)"),
        (49127.0, 46000.0, 52000.0, "49,000 (46,000–52,000)"),
        (2.0, 0.5, 8.0, "2.0 (0.5–8.0)"),
        (2.0, 1e-9, 1e9, "2 (too wide)"),
        (2.0, 0.0, 3.0, "2 (too wide)"),
    ],
)
def test_an_interval_rounds_its_figure(value: float, low: float, high: float, text: str) -> None:
    assert ranged(value, low, high) == text


def test_a_percentage_is_whole() -> None:
    assert [percent(share) for share in (0.8549, -0.001, 1.2)] == ["85 %", "0 %", "120 %"]


def test_what_is_left_of_rounding_is_no_milliseconds() -> None:
    assert milliseconds(-4.34e-19, signed=True) == "+0"
    assert milliseconds(0.00153, signed=True) == "+1.53"
    assert milliseconds(-0.000294, signed=True) == "-0.294"
    assert milliseconds(0.0007168) == "0.717"
