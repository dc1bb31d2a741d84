"""How fast a run goes: over its last seconds, and as a whole. Pure."""

from __future__ import annotations

from collections import deque
from typing import final


@final
class RateMeter:
    """Two rates from readings of a growing count. They are not the same thing.

    Args:
        window_s: how far back "lately" goes at least; readings are rarely so fine as to hit it.
        at_s: when the count was 0.
    """

    def __init__(self, window_s: float, at_s: float) -> None:
        self._window_s = window_s
        self._began_s = at_s
        # The oldest one is the latest that lies a whole window back, or the begin.
        self._readings: deque[tuple[float, float]] = deque([(at_s, 0.0)])

    def read(self, at_s: float, count: float) -> None:
        """Note that there were `count` in all at `at_s`. Times and counts do not fall."""
        self._readings.append((at_s, count))
        while len(self._readings) > 2 and self._readings[1][0] <= at_s - self._window_s:
            self._readings.popleft()

    @property
    def whole_per_s(self) -> float | None:
        """From the begin to the last reading; None where no time has passed."""
        at_s, count = self._readings[-1]
        return count / (at_s - self._began_s) if at_s > self._began_s else None

    @property
    def lately_per_s(self) -> float | None:
        """Over the last `window_s`, or from the begin while less has passed."""
        (then_s, before), (at_s, count) = self._readings[0], self._readings[-1]
        return (count - before) / (at_s - then_s) if at_s > then_s else None
