"""How well a mean of measured steps is known, from the steps of one run. Pure numpy.

Steps are not independent: a busy neighbour slows down many in a row. So blocks of steps are
resampled and not steps. What differs from run to run (where memory lies, which cores are taken)
cannot be seen within one run; see comparing.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dpexp.stats import t_quantile

LEVEL = 0.95
SCOPE = "steps within this run"
METHOD = "circular block bootstrap, percentiles widened for few blocks"
FEWEST_STEPS = 8
RESAMPLES = 1000
MOST_VALUES = 2000  # more steps are first averaged into equal batches
MOST_VALUES_QUICK = 1000  # the same where the interval is asked for once a second

Values = npt.NDArray[np.float64]


def within_run(seconds: Sequence[float] | Values, global_rows: int) -> dict[str, Any]:
    """The intervals of a run's mean step and of its throughput: `uncertainty` of ``run.json``.

    The circular block bootstrap (Politis and Romano 1992): the mean of as many steps, put together
    from blocks of consecutive steps drawn with replacement, is recomputed 1,000 times with a fixed
    seed. The percentiles are taken further out than at `level`, as far as Student's t lies outside
    of the normal distribution for as many blocks (Hesterberg 2015, "What Teachers Should Know About
    the Bootstrap": expanded percentiles).

    Args:
        seconds: of the measured steps, in order.
        global_rows: of all of them together. The interval of samples/s takes the rows of a step to
            be their mean.

    Returns:
        JSON types. The figures are null, with a `reason`, for fewer than 8 steps.
    """
    steps = np.asarray(seconds, dtype=np.float64)
    plain: dict[str, Any] = {"level": LEVEL, "method": METHOD, "scope": SCOPE, "steps": len(steps)}
    if len(steps) < FEWEST_STEPS:
        nothing = {"block_steps": None, "step_mean_s": None, "samples_per_s": None}
        reason = f"{len(steps)} measured steps are too few: {FEWEST_STEPS} are needed"
        return {**plain, **nothing, "relative_standard_error": None, "reason": reason}
    values, batch = _batched(steps, MOST_VALUES)
    block = block_length(values)
    mean = float(steps.mean())
    low, high = _percentiles(values, block)
    rows = global_rows / len(steps)
    return {
        **plain,
        "block_steps": block * batch,
        "step_mean_s": {"mean": mean, "low": low, "high": high},
        "samples_per_s": {"mean": rows / mean, "low": rows / high, "high": rows / low},
        "relative_standard_error": _standard_error(values, block) / mean,
        "reason": None,
    }


def relative_half_width(seconds: Sequence[float] | Values) -> float | None:
    """Half the width of the interval of the mean step, as a share of it; None for few steps.

    For `until.ci`, which asks often: the standard error that the circular block bootstrap comes to,
    by its formula and without resampling, times Student's t. Costs less than a millisecond.

    Args:
        seconds: of the measured steps so far, in order.
    """
    steps = np.asarray(seconds, dtype=np.float64)
    if len(steps) < FEWEST_STEPS:
        return None
    values, _ = _batched(steps, MOST_VALUES_QUICK)
    block = block_length(values)
    error = _standard_error(values, block)
    return t_quantile(0.5 + LEVEL / 2, degrees(len(values), block)) * error / float(steps.mean())


def block_length(values: Values) -> int:
    """How many consecutive values a block should have so that it holds what they share.

    Politis and White 2004, "Automatic Block-Length Selection for the Dependent Bootstrap", as
    corrected by Patton, Politis and White 2009, for the circular bootstrap: it grows with the
    autocorrelation and with the third root of the number of values. At most a quarter of them.
    """
    count = len(values)
    most = max(1, min(math.ceil(3 * math.sqrt(count)), count // 4))
    known = max(5, math.ceil(math.sqrt(math.log10(count))))
    lags = min(count - 1, 2 * (math.ceil(math.sqrt(count)) + known))
    covariances = _autocovariances(values, lags)
    if covariances[0] <= (1e-9 * values.mean()) ** 2:  # all are equal, up to rounding
        return 1
    small = np.abs(covariances / covariances[0]) < 2 * math.sqrt(math.log10(count) / count)
    # The first lag after which `known` correlations in a row are as small as chance makes them.
    starts = range(max(1, lags - known + 1))
    last = next((lag for lag in starts if small[lag + 1 : lag + 1 + known].all()), lags // 2)
    reach = min(2 * max(last, 1), lags)
    lag = np.arange(1, reach + 1)
    weights = np.clip(2 * (1 - lag / reach), 0, 1)  # flat to the half, then down to 0
    inner = weights * covariances[1 : reach + 1]
    spectrum = covariances[0] + 2 * inner.sum()  # at frequency 0
    slope = 2 * (lag * inner).sum()
    if spectrum <= 0:
        return most
    length = (1.5 * (slope / spectrum) ** 2) ** (1 / 3) * count ** (1 / 3)
    return int(min(most, max(1, math.ceil(length))))


def degrees(count: int, block: int) -> int:
    """Degrees of freedom of a standard error that so many values in such blocks give."""
    return max(1, count // block - 1)


def _batched(steps: Values, most: int) -> tuple[Values, int]:
    """At most `most` means of equally many consecutive steps, and how many; the rest is left out.

    The rest is less than one batch.
    """
    size = math.ceil(len(steps) / most)
    whole = len(steps) // size
    return steps[: whole * size].reshape(whole, size).mean(axis=1), size


def _autocovariances(values: Values, lags: int) -> Values:
    """Of the lags 0 to `lags`, each divided by the number of values."""
    centred = values - values.mean()
    size = 1 << (2 * len(values) - 1).bit_length()
    power = np.abs(np.fft.rfft(centred, size)) ** 2
    found: Values = np.fft.irfft(power, size)[: lags + 1] / len(values)
    return found


def _block_means(values: Values, block: int) -> Values:
    """The mean of the block that begins at each value; the end goes on at the beginning."""
    around = np.concatenate([[0.0], np.cumsum(np.concatenate([values, values[: block - 1]]))])
    means: Values = (around[block:] - around[:-block]) / block
    return means


def _standard_error(values: Values, block: int) -> float:
    """Of the mean: what resampling blocks comes to, without resampling."""
    blocks = len(values) / block
    variance = float(_block_means(values, block).var())
    return math.sqrt(variance / max(1.0, blocks - 1))


def _percentiles(values: Values, block: int) -> tuple[float, float]:
    means = _block_means(values, block)
    blocks = max(2, round(len(values) / block))
    drawn = np.random.default_rng(0).integers(0, len(means), size=(RESAMPLES, blocks))
    resampled = means[drawn].mean(axis=1)
    further = t_quantile(0.5 + LEVEL / 2, degrees(len(values), block))
    outside = normal_tail(further * math.sqrt(blocks / (blocks - 1)))
    low, high = np.quantile(resampled, [outside, 1 - outside])
    return float(low), float(high)


def normal_tail(distance: float) -> float:
    """The share of a normal distribution that lies more than `distance` deviations above."""
    return 0.5 * math.erfc(distance / math.sqrt(2))
