"""Summaries of measured values. Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dpexp.records import PhaseSummary


def percentile(values: Sequence[float] | npt.NDArray[np.float64], percent: float) -> float:
    """The linear-interpolated percentile (Hyndman and Fan's type 7, numpy's default).

    Args:
        values: at least one number.
        percent: strictly between 0 and 100.

    Raises:
        ValueError: `percent` is outside (0, 100), or there are no values.
    """
    if not 0 < percent < 100:
        raise ValueError(f"percentile {percent} is not between 0 and 100")
    if len(values) == 0:
        raise ValueError("the percentile of no values is not defined")
    return float(np.percentile(np.asarray(values, dtype=np.float64), percent))


def summarize(seconds: Sequence[float] | npt.NDArray[np.float64]) -> PhaseSummary:
    """Mean, median, 95th percentile, extremes and count; all null when there is nothing."""
    if len(seconds) == 0:
        return PhaseSummary(None, None, None, None, None, 0)
    array = np.asarray(seconds, dtype=np.float64)
    return PhaseSummary(
        mean_s=float(array.mean()),
        p50_s=percentile(seconds, 50),
        p95_s=percentile(seconds, 95),
        min_s=float(array.min()),
        max_s=float(array.max()),
        count=len(seconds),
    )
