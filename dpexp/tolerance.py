"""How far two runs of the same mathematics may lie apart. Pure numpy.

Sums of floating-point numbers depend on their order. Taken in another order, a sum of n terms
differs by about u * sqrt(n) of its size, where u is the unit roundoff: the probabilistic bound of
Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", SIAM J. Sci. Comput. 41
(2019), whose certain bound would be u * n.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

# Unit roundoffs: half the distance from 1 to the next number.
SINGLE = 2.0**-24
UNIT_ROUNDOFF = {"fp32": SINGLE, "tf32": 2.0**-11, "bf16": 2.0**-8, "fp16": 2.0**-11}
# Below the smallest normal number, fp16's numbers are so far apart.
FP16_SPACING = 2.0**-24
# The constant of the bound: it holds with a probability of 1 - 2 exp(-8**2 / 2) for each sum.
CONFIDENCE = 8.0
# Of an update that is divided by the gradient's own size, in learning rates: from one direction to
# the other. Adam's is at most 1 in its first step and 1.3 in its 30th (Cauchy and Schwarz).
LARGEST_CHANGE = 3.0
PART = 2**15  # entries that are compared at a time
Array = npt.NDArray[Any]
Allowed = Callable[[slice], "Array | float"]


def relative_tolerance(terms: int, short: float | None = None) -> float:
    """What a sum may differ by when its terms are added in another order, relative to its size.

    Args:
        terms: how many numbers a sum is made of.
        short: unit roundoff of a shorter format that terms or results are rounded to on the way.
    """
    return CONFIDENCE * (SINGLE * math.sqrt(terms) + (short or 0.0))


def gradient_tolerance(
    relative: float, largest: float, largest_of_all: float, noise: float = 0.0, spacing: float = 0.0
) -> float:
    """What the entries of a gradient may differ by; absolute.

    A gradient whose terms cancel (of a bias in front of a normalisation, say) is nothing but
    rounding, and has no size to which a difference could be compared. For it counts what another
    order of the rows changes on a single device, up to what the largest gradient would be allowed.

    Args:
        relative: of :func:`relative_tolerance`.
        largest: absolute value of the gradient's entries.
        largest_of_all: the same over all gradients of the model.
        noise: what another order of the rows changed on a single device.
        spacing: of the smallest numbers in the format of transport.
    """
    cancelled = min(CONFIDENCE * noise, relative * largest_of_all)
    return relative * largest + cancelled + CONFIDENCE * spacing


def weight_tolerance(
    largest: float,
    gradient: Array | None,
    gradient_error: float,
    rate: float,
    step: int,
    *,
    normalises: bool,
    roundoff: float = SINGLE,
) -> Array | float:
    """What the entries of a weight may differ by after one update from equal weights; absolute.

    Args:
        largest: absolute value of the weight's entries after the update.
        gradient: that the update was made from; None = there was none.
        gradient_error: what a gradient up to this step may have differed by.
        rate: the learning rate.
        step: number of updates before; an optimizer may remember the gradients of all of them.
        normalises: the optimizer divides by the gradient's own size, as Adam does. Then an entry's
            update is little more than `rate` at most, and a gradient's relative error is the
            update's: an entry that is nothing but rounding may move in either direction. After n
            updates Adam divides by the root of a mean of n squares, of which the gradient's is
            one: by no less than its size / sqrt(n).
        roundoff: of the weight's format.

    Returns:
        For each entry of the gradient, or one number for all.
    """
    stored = CONFIDENCE * roundoff * largest
    if gradient is None or gradient_error == 0.0:
        return stored
    carried = stored + 4.0 * (step + 1) * rate * gradient_error
    if not normalises:
        return carried
    with np.errstate(divide="ignore", over="ignore"):
        share = 4.0 * math.sqrt(step + 1) * gradient_error / np.abs(gradient.astype(np.float64))
    bound: Array = carried + rate * np.minimum(LARGEST_CHANGE, share)
    return bound


@dataclass(frozen=True)
class Deviation:
    """How far results lie from the reference's, over all tensors and steps looked at."""

    largest_absolute: float
    largest_relative: float  # to the largest absolute value of the reference's tensor
    # Of the entry that comes nearest to what it is allowed, or exceeds it most; relative as above.
    difference: float
    tolerance: float
    share: float  # the one divided by the other; more than 1 = too far
    step: int
    tensor: str


def deviation(
    got: Array, reference: Array, allowed: float | Allowed, step: int, tensor: str
) -> Deviation:
    """The largest difference of two finite tensors of one shape.

    Args:
        allowed: absolute, for all entries, or a function of a slice of them (of the flat tensor).
    """
    size = largest_of(reference)
    flat = got.reshape(-1), reference.reshape(-1)
    seen: Deviation | None = None
    # In parts that fit into a cache: several times as fast for a large tensor.
    for start in range(0, got.size, PART):
        part = slice(start, start + PART)
        difference = np.abs(np.subtract(flat[0][part], flat[1][part], dtype=np.float64))
        limits = allowed(part) if callable(allowed) else allowed
        found = _nearest(difference, limits, size, step, tensor)
        seen = found if seen is None else worse(seen, found)
    return seen or Deviation(0.0, 0.0, 0.0, 0.0, 0.0, step, tensor)


def _nearest(
    difference: Array, limits: Array | float, size: float, step: int, tensor: str
) -> Deviation:
    most = place = int(difference.argmax())
    if not isinstance(limits, np.ndarray):
        limit, share = limits, _ratio(float(difference[most]), limits)
    else:
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = np.where(difference == 0.0, 0.0, difference / limits)
        # Where all agree, the place with the least room is shown.
        place = int(shares.argmax()) if shares.any() else int(limits.argmin())
        limit, share = float(limits[place]), float(shares[place])
    absolute = float(difference[most])
    return Deviation(
        absolute,
        _ratio(absolute, size),
        _ratio(float(difference[place]), size),
        _ratio(limit, size),
        share,
        step,
        tensor,
    )


def worse(first: Deviation | None, second: Deviation) -> Deviation:
    """Both in one: the largest differences, and the place that is nearer to its limit."""
    if first is None:
        return second
    return replace(
        first if first.share >= second.share else second,
        largest_absolute=max(first.largest_absolute, second.largest_absolute),
        largest_relative=max(first.largest_relative, second.largest_relative),
    )


def verdict(found: dict[str, Deviation | None], unknown: str | None) -> tuple[str, str | None]:
    """Pass, fail or unknown, and why.

    Args:
        found: by what was compared: loss, gradients, weights. None = nothing could be.
        unknown: why not everything could be compared. What could be and failed is a failure.
    """
    plural = {"loss": "losses"}
    for what, each in found.items():
        if each is not None and not each.share <= 1.0:
            return "fail", (
                f"{plural.get(what, what)} differ from a single device's by "
                f"{each.difference:.2g} of their size, where {each.tolerance:.2g} is allowed "
                f"(step {each.step}, {each.tensor})"
            )
    if unknown is None and any(each is None for each in found.values()):
        unknown = "nothing was compared"
    return ("pass", None) if unknown is None else ("unknown", unknown)


def largest_of(values: Array) -> float:
    """The largest absolute value: 0 of none, NaN where there is one."""
    return max(float(values.max()), -float(values.min())) if values.size else 0.0


def _ratio(value: float, size: float) -> float:
    if size:
        return value / size
    return 0.0 if value == 0.0 else math.inf
