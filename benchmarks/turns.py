"""Two configurations that took turns in the same processes: how much they differ. Pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from benchmarks.common import DRAWS

# Twice the reference: how much it differs from itself is the noise of the method.
SIDES = ("ours", "reference", "reference again")
STRETCH = 5  # steps of a side before another one goes on; the first of them does not count
Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Paired:
    """Seconds of a step by launch, turn and side: shape [launches, turns, 3], sides as in SIDES.

    Args:
        limit: of ours / reference, or of ours - reference in microseconds when `difference` is set.
    """

    name: str
    step_s: list[list[list[float]]]
    limit: float
    difference: bool = False

    @property
    def outcome(self) -> float:
        """The median over all turns of ours against the mean of both references."""
        return float(np.median(np.concatenate(self._against())))

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of `outcome`: launches are drawn with replacement, then turns of each."""
        return _interval(self._against())

    @property
    def noise(self) -> tuple[float, float]:
        """The same interval of the reference against itself."""
        return _interval([self._apart(turns[:, 2], turns[:, 1]) for turns in self._launches()])

    def median_us(self, side: str) -> float:
        """Of a side's steps, over all launches and turns."""
        position = SIDES.index(side)
        return 1e6 * statistics.median(turn[position] for turns in self.step_s for turn in turns)

    def _launches(self) -> list[Floats]:
        return [np.asarray(turns) for turns in self.step_s]

    def _against(self) -> list[Floats]:
        return [self._apart(turns[:, 0], turns[:, 1:].mean(axis=1)) for turns in self._launches()]

    def _apart(self, ours: Floats, reference: Floats) -> Floats:
        return 1e6 * (ours - reference) if self.difference else ours / reference


def _interval(launches: list[Floats]) -> tuple[float, float]:
    """Percentiles of medians; the seed is fixed."""
    draw = np.random.default_rng(0)
    medians = []
    for _ in range(DRAWS):
        chosen = [launches[i] for i in draw.integers(len(launches), size=len(launches))]
        drawn = [turns[draw.integers(len(turns), size=len(turns))] for turns in chosen]
        medians.append(np.median(np.concatenate(drawn)))
    low, high = np.quantile(medians, (0.025, 0.975))
    return float(low), float(high)
