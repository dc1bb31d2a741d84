"""Figures as a reader wants them: no more digits than they are good for."""

from __future__ import annotations

import math

DIGITS = 3  # significant ones that a figure has at most
# The ends of an interval that are further apart than this factor say nothing but that.
WIDEST = 100.0


def significant(value: float, digits: int = DIGITS) -> str:
    """``0.789``, ``12.3``, ``49,100``: rounded to so many significant digits."""
    return _fixed(value, _places(value, digits))


def times(value: float) -> str:
    """A factor: two decimals below ten, ``0.79``, ``3.42``, ``12.3``."""
    return _fixed(value, min(2, _places(value, DIGITS)))


def ranged(value: float, low: float, high: float, unit: str = "") -> str:
    """A figure with its interval, ``3.4× (3.3–3.5)``: rounded to what the interval supports.

    That is two significant digits at least: the reader sees by the interval what they are worth.
    """
    if low <= 0 or high / low > WIDEST:
        return f"{significant(value, 1)}{unit} (too wide)"
    half = (high - low) / 2
    places = _places(value, DIGITS)
    if half > 0:
        places = max(min(places, _places(half, 1)), _places(value, 2))
    return f"{_fixed(value, places)}{unit} ({_fixed(low, places)}–{_fixed(high, places)})"


def milliseconds(seconds: float, *, signed: bool = False) -> str:
    """``0.717``, ``1,230``, signed ``+1.53``. What is left of rounding where parts add up is 0."""
    value = round(seconds * 1e3, 6) + 0.0  # -0.0 is 0
    form = ",.0f" if abs(value) >= 999.5 else ".3g"
    return format(value, f"+{form}" if signed else form)


def percent(share: float) -> str:
    """``85 %``."""
    return f"{_fixed(share * 100, 0)} %"


def count_of(number: int, name: str) -> str:
    """``1 cell``, ``1,000 cells``."""
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def _places(value: float, digits: int) -> int:
    """After the decimal point; negative where the last digits before it are zeros."""
    if value == 0 or not math.isfinite(value):
        return 0
    rounded = float(f"{value:.{digits - 1}e}")  # 9.996 is 10.0, which has one place less
    return digits - 1 - math.floor(math.log10(abs(rounded)))


def _fixed(value: float, places: int) -> str:
    text = f"{round(value, places):,.{max(0, places)}f}"
    return text.removeprefix("-") if not any(digit in text for digit in "123456789") else text
