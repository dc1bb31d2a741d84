"""What repeats of runs say: intervals of rates, of their ratios, and the machine's noise floor.

Pure numpy. A bootstrap over three to ten repeats is too narrow (its spread is that of so few
values, and divides by their number instead of one less), so the intervals here are Student's t on
logarithms: rates differ by factors, and the ratio of two rates becomes a difference. The interval
of a ratio takes as many degrees of freedom as the smaller of the two groups has: then it misses in
at most 5 % of the cases, however different the two spreads are (Mickey and Brown 1966, "Bounds on
the distribution functions of the Behrens-Fisher statistic"; Welch's degrees of freedom, which are
more, promise that only about).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from dpexp.stats import t_quantile
from dpexp.uncertainty import LEVEL

FASTER = "faster"
SLOWER = "slower"
NO_DIFFERENCE = "no measurable difference"
NOT_COMPARABLE = "not comparable"
ONE_RUN = "one run each: repeats are needed to tell"
WITHIN = "within one run"
_UPPER = 0.5 + LEVEL / 2


@dataclass(frozen=True)
class Timed:
    """What one run measured."""

    amount: float  # samples, or steps
    seconds: float
    relative_standard_error: float | None = None  # from the steps within the run


@dataclass(frozen=True)
class Interval:
    """A figure with the interval that holds the true one in 95 % of the cases."""

    value: float
    low: float | None = None
    high: float | None = None
    scope: str | None = None  # what the interval comes from; None = there is none

    def scaled(self, factor: float) -> Interval:
        """The same in another unit."""
        low = None if self.low is None else self.low * factor
        high = None if self.high is None else self.high * factor
        return Interval(self.value * factor, low, high, self.scope)

    def inverse(self) -> Interval:
        """One divided by it: seconds per step from steps per second."""
        low = None if self.high is None else 1 / self.high
        high = None if self.low is None else 1 / self.low
        return Interval(1 / self.value, low, high, self.scope)


def rate(runs: Sequence[Timed]) -> Interval:
    """All runs' amounts by all their seconds, with its interval.

    Between runs if there are several, else from the steps within the one (its scope says so: it
    does not know how runs differ), else none.

    Args:
        runs: at least one; the repeats of one cell.
    """
    error = _error(runs)
    value = _pooled(runs)
    if error is None:
        return Interval(value)
    return _around(value, _quantile(len(runs)) * error, _scope(runs))


def ratio(runs: Sequence[Timed], base: Sequence[Timed]) -> Interval:
    """The rate of `runs` by that of `base`, with its interval.

    With one run on a side its error within the run is all there is, and the scope says so.
    """
    own, other = _error(runs), _error(base)
    value = _pooled(runs) / _pooled(base)
    if own is None or other is None:
        return Interval(value)
    fewest = min((runs, base), key=len)
    return _around(value, _quantile(len(fewest)) * math.hypot(own, other), _scope(fewest))


def verdict(runs: Sequence[Timed], base: Sequence[Timed]) -> str:
    """Whether `runs` are faster than `base`. Nothing is claimed from a single run.

    With r repeats on each side a difference is claimed where there is none in at most 5 % of the
    comparisons.
    """
    if min(len(runs), len(base)) < 2:
        return ONE_RUN
    found = ratio(runs, base)
    assert found.low is not None and found.high is not None  # there are two runs on each side
    if found.low > 1:
        return FASTER
    return SLOWER if found.high < 1 else NO_DIFFERENCE


def lost_more_than(limit: float, found: Interval) -> bool | None:
    """Whether a rate has become lower by more than `limit`; None where the interval holds both.

    True and False are wrong in at most 2.5 % of the cases each.

    Args:
        limit: a share of the old rate, 0 or more and less than 1.
        found: the new rate by the old one, of repeats.
    """
    assert found.low is not None and found.high is not None  # there are two runs on each side
    if found.high < 1 - limit:
        return True
    return False if found.low >= 1 - limit else None


def noise_floor(runs: Sequence[Timed]) -> float | None:
    """How much two runs of the same cell differ by chance, as a share; None for one run.

    The difference of the logarithms of two rates has the standard deviation s sqrt(2); 95 % of such
    differences are smaller than that times Student's t.
    """
    if len(runs) < 2:
        return None
    return math.expm1(_quantile(len(runs)) * _deviation(runs) * math.sqrt(2))


def _pooled(runs: Sequence[Timed]) -> float:
    return sum(run.amount for run in runs) / sum(run.seconds for run in runs)


def _deviation(runs: Sequence[Timed]) -> float:
    """Of the logarithms of the rates, between runs."""
    return float(np.std([math.log(run.amount / run.seconds) for run in runs], ddof=1))


def _error(runs: Sequence[Timed]) -> float | None:
    """The standard error of the logarithm of the pooled rate; None where nothing tells it.

    That of a logarithm is the relative one of the figure itself (the delta method).
    """
    if len(runs) > 1:
        return _deviation(runs) / math.sqrt(len(runs))
    return runs[0].relative_standard_error


def _quantile(repeats: int) -> float:
    return t_quantile(_UPPER, repeats - 1) if repeats > 1 else NormalDist().inv_cdf(_UPPER)


def _scope(runs: Sequence[Timed]) -> str:
    return WITHIN if len(runs) == 1 else f"{len(runs)} repeats"


def _around(value: float, half: float, scope: str) -> Interval:
    """`value` with an interval that is symmetric on logarithms."""
    return Interval(value, value * math.exp(-half), value * math.exp(half), scope)
