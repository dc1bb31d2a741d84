"""Which rank the others wait for, how long, and in which phase it lost the time. Pure numpy.

An all-reduce makes every rank look equally slow: those that came early wait in it. So the ranks
are compared by when they come to it.
"""

from __future__ import annotations

from typing import Any, final

import numpy as np
import numpy.typing as npt

from dpexp.stats import t_quantile

Floats = npt.NDArray[np.float64]
# What a rank does from one meeting to the next, in this order.
LEGS = ("optimizer", "other", "data", "transfer", "forward", "backward")
# A rank that comes later by less than this share of a step holds nobody up.
NOTABLE = 0.01
# Groups of steps that are kept of a flush, for the error of a mean.
GROUPS = 16
# Of more, neighbours are made one: else rank 0's memory would grow through a run of days.
MOST_GROUPS = 1024
# A rank is named when it is later than another one by what chance gives in one of 700 comparisons.
# Of few groups the standard error is itself uncertain, hence Student's t and not the normal one.
CHANCE = 1 / 700


@final
class StragglerCount:
    """Adds up, flush by flush, who came late.

    Args:
        world_size: number of ranks, at least 2.
        clock_error_s: how far off any of their clocks may be (see clocks.py).
    """

    def __init__(self, world_size: int, clock_error_s: float = 0.0) -> None:
        self._ranks = world_size
        self._clock_error_s = clock_error_s
        self._meetings = 0
        self._steps = 0
        self._step_s = 0.0
        self._last = np.zeros(world_size)
        self._held_s = np.zeros(world_size)
        self._legs_s = np.zeros((world_size, len(LEGS)))
        self._groups: list[tuple[int, Floats]] = []

    def add(self, late_s: Floats, legs_s: Floats, step_s: Floats, meetings: int = 1) -> None:
        """Count some steps.

        Args:
            late_s: shape [ranks, steps]; how much later than the first rank each came to the
                meetings of a step. The last one has the largest number.
            legs_s: shape [ranks, legs]; what each rank spent on each of LEGS over these steps.
            step_s: shape [steps].
            meetings: the most in a step whose lateness is added up.
        """
        steps = late_s.shape[1]
        if not steps:
            return
        self._steps += steps
        self._meetings = max(self._meetings, meetings)
        self._step_s += float(step_s.sum())
        last = late_s.argmax(axis=0)
        others = (late_s.max(axis=0) * self._ranks - late_s.sum(axis=0)) / (self._ranks - 1)
        notable = others > NOTABLE * step_s
        self._last += np.bincount(last[notable], minlength=self._ranks)
        self._held_s += np.bincount(last, weights=others, minlength=self._ranks)
        others_legs_s = (legs_s.sum(axis=0) - legs_s) / (self._ranks - 1)
        self._legs_s += legs_s - others_legs_s
        count = min(steps, max(1, min(GROUPS, 4096 // self._ranks)))
        for group in np.array_split(late_s - late_s.mean(axis=0), count, axis=1):
            self._groups.append((group.shape[1], group.mean(axis=1)))
        if len(self._groups) > MOST_GROUPS:
            self._groups = _joined(self._groups)

    def summary(self) -> dict[str, Any] | None:
        """The record for run.json; None without a step."""
        if not self._steps:
            return None
        weights = np.array([count for count, _ in self._groups], dtype=np.float64)
        means = np.array([mean for _, mean in self._groups])
        late_s = np.average(means, axis=0, weights=weights)
        slowest = int(late_s.argmax())
        named = self._is_named(slowest, late_s, means, weights)
        legs_s = self._legs_s / self._steps
        ranks = [
            {
                "rank": rank,
                "late_mean_s": float(late_s[rank]),
                "share_of_steps": float(self._last[rank] / self._steps),
                "others_wait_mean_s": float(self._held_s[rank] / self._steps),
                "excess_mean_s": dict(zip(LEGS, map(float, legs_s[rank]), strict=True)),
            }
            for rank in range(self._ranks)
        ]
        return {
            "rank": slowest if named else None,
            "reason": "" if named else "no rank is later than all others by more than chance",
            "phase": LEGS[int(legs_s[slowest].argmax())] if named else None,
            "steps": self._steps,
            "ranks": ranks,
        }

    def _is_named(self, slowest: int, late_s: Floats, means: Floats, weights: Floats) -> bool:
        """Whether one rank is later than each other one by more than chance and clocks explain."""
        if len(means) < 2:
            return False
        step_s = self._step_s / self._steps
        sure = t_quantile(1 - CHANCE, len(means) - 1)
        # A clock that is off is off in every step: no number of steps makes that smaller.
        least_s = max(NOTABLE * step_s, 2 * self._clock_error_s * self._meetings)
        for rank in range(self._ranks):
            if rank == slowest:
                continue
            ahead_s = late_s[slowest] - late_s[rank]
            apart = means[:, slowest] - means[:, rank]
            if ahead_s <= least_s or ahead_s <= sure * standard_error(apart, weights):
                return False
        return True


def _joined(groups: list[tuple[int, Floats]]) -> list[tuple[int, Floats]]:
    """Each two neighbouring groups as one of as many steps as both."""
    pairs = zip(groups[::2], groups[1::2], strict=False)
    made = [(n + m, (n * first + m * second) / (n + m)) for (n, first), (m, second) in pairs]
    return made + groups[2 * len(made) :]


def standard_error(values: Floats, weights: Floats) -> float:
    """Of a weighted mean of group means, from how they scatter; infinite for a single group.

    Args:
        values, weights: shape [groups]; neighbouring steps are in one group, so that what they have
            in common does not count as many observations.
    """
    if len(values) < 2:
        return float("inf")
    share = weights / weights.sum()
    mean = float((share * values).sum())
    squares = float((share**2 * (values - mean) ** 2).sum())
    return float(np.sqrt(squares * len(values) / (len(values) - 1)))
