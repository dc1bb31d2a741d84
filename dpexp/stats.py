"""Summaries of measured values. Pure numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

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


@lru_cache(maxsize=256)
def t_quantile(probability: float, degrees: float) -> float:
    """The quantile of Student's t distribution.

    With t = sqrt(degrees) tan(a) the density becomes proportional to cos(a)^(degrees - 1), whose
    integral is found by Gauss and Legendre's rule and inverted by bisection. From 1,000 degrees on
    it is the normal quantile with the first term of Fisher and Cornish's expansion.

    Args:
        probability: 0.5 or more, below 1.
        degrees: of freedom, 1 or more; need not be whole.

    Raises:
        ValueError: an argument is out of its range.
    """
    if not 0.5 <= probability < 1 or degrees < 1:
        raise ValueError(f"no quantile at {probability} with {degrees} degrees of freedom")
    if degrees >= 1000:
        z = NormalDist().inv_cdf(probability)
        return z + (z**3 + z) / (4 * degrees)
    nodes, weights = np.polynomial.legendre.leggauss(96)
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)

    def above_half(angle: float) -> float:
        points = angle / 2 * (nodes + 1)
        return float(scale * angle / 2 * (weights * np.cos(points) ** (degrees - 1)).sum())

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        if 0.5 + above_half(middle) < probability:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan((low + high) / 2)
