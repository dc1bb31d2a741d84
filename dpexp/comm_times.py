"""When a flush's collectives were ready, needed and done, and how late a rank came to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, final

import numpy as np
import numpy.typing as npt

from dpexp import exposure, timing
from dpexp.parallel.collectives import Collective

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Steps:
    """The steps of a flush, as far as they matter here."""

    numbers: list[int]
    marks: Sequence[Sequence[Any]]  # as of recorder.Row
    phases_s: Floats  # shape [steps, phases]
    measured: Bools
    collectives: Sequence[Sequence[Collective]]


def times_of(steps: Steps, width: int, clock: timing.Clock[Any]) -> Times:
    """When each collective was ready, done and needed, and of what kind it is.

    Args:
        width: collectives of the step that has the most, over all ranks.
    """
    shape = (len(steps.numbers), width)
    ready, end, needed = (np.full(shape, np.nan) for _ in range(3))
    backward, blocking = np.zeros(shape, bool), np.zeros(shape, bool)
    counts = [len(entries) for entries in steps.collectives]
    rows = np.repeat(np.arange(len(counts)), counts)
    columns = np.concatenate([np.arange(count) for count in counts]) if counts else rows
    noted = list(chain.from_iterable(steps.collectives))
    ready[rows, columns] = clock.seconds([each.ready for each in noted])
    end[rows, columns] = clock.seconds([each.end for each in noted])
    backward[rows, columns] = [each.in_backward for each in noted]
    blocking[rows, columns] = [each.blocking for each in noted]
    awaited = [index for index, each in enumerate(noted) if each.needed is not None]
    needed[rows[awaited], columns[awaited]] = clock.seconds([noted[i].needed for i in awaited])
    return Times(ready, end, needed, backward, blocking)


@final
@dataclass(frozen=True)
class Times:
    """Of a flush's collectives: shape [steps, collectives], seconds; NaN where there is none."""

    ready: Floats
    end: Floats
    needed: Floats  # where the computation waits for it; NaN too where that was not noted
    backward: Bools  # begun in backward
    blocking: Bools  # the rank stands still for it

    @property
    def awaited(self) -> Bools:
        """The rank goes on computing until it needs it."""
        return ~np.isnan(self.needed) & ~self.blocking

    @property
    def beside(self) -> Bools:
        """The rank goes on computing until it has no more to compute."""
        return np.isnan(self.needed) & ~self.blocking

    def of(self, kind: Bools) -> Times:
        """Only those of a kind."""
        ready, end, needed = (
            np.where(kind, each, np.nan) for each in (self.ready, self.end, self.needed)
        )
        return Times(ready, end, needed, self.backward, self.blocking)

    def exposure(self, last_ready: Floats) -> exposure.Exposure:
        """What they cost.

        Args:
            last_ready: when the last of all ranks had each ready.
        """
        found = [exposure.nothing(len(self.ready))]
        if _any(self.blocking, self.ready):
            stands = self.of(self.blocking)
            found.append(exposure.of_blocking(stands.ready, stands.end, last_ready))
        if _any(self.beside, self.ready):
            beside = self.of(self.beside)
            last_beside = np.where(self.beside, last_ready, np.nan)
            found.append(exposure.of_buckets(beside.ready, beside.end, last_beside))
        if _any(self.awaited, self.ready):
            awaited = self.of(self.awaited)
            found.append(
                exposure.of_awaited(awaited.ready, awaited.end, last_ready, awaited.needed)
            )
        return exposure.together(*found)

    def stalls(self) -> Floats:
        """Seconds that the computation stood still for each awaited collective, before its end."""
        if not self.awaited.any():
            return np.zeros_like(self.ready)
        awaited = self.of(self.awaited)
        return exposure.stalls(awaited.ready, awaited.end, awaited.needed)[1]

    def stood(self) -> Floats:
        """Seconds that the rank stood still for each of those that have a wait of their own."""
        whole = np.where(self.blocking, np.nan_to_num(self.end - self.ready), 0.0)
        return whole + self.stalls()

    def worked(self) -> Floats:
        """When this rank would have had its last awaited collective ready without its stalls.

        The ranks go on computing through these, so one that is late stays late until another one
        waits for it. What tells them apart is how long each has computed.

        Returns:
            Shape [steps]; NaN where there are none.
        """
        if not self.awaited.any():
            return np.full(len(self.ready), np.nan)
        awaited = self.of(self.awaited)
        last: Floats = np.fmax.reduce(awaited.ready, axis=1)
        before = awaited.end <= last[:, None]
        worked: Floats = last - np.where(before, self.stalls(), 0.0).sum(axis=1)
        return worked

    def comes(self) -> Floats:
        """When this rank comes to each meeting of a step.

        Returns:
            Shape [steps, collectives + 2]; NaN where there is none. A blocking collective is a
            meeting of its own. Those that run beside the computation make one, at the last; and
            so do the awaited ones.
        """
        at_each = np.where(self.blocking, self.ready, np.nan)
        at_last = np.fmax.reduce(np.where(self.beside, self.ready, np.nan), axis=1)
        return np.column_stack([at_each, at_last, self.worked()])

    def meetings(self) -> int:
        """The most in a step whose lateness :func:`lateness` adds up."""
        each = int(self.blocking.any(axis=0).sum())
        return each + int(_any(self.beside, self.ready)) + int(self.awaited.any())


def legs(steps: Steps, times: Times, clock: timing.Clock[Any]) -> Floats:
    """What this rank did since the meeting before, without meetings: stragglers.LEGS.

    A flush is a meeting too, so nothing of the step before the first one counts.

    Returns:
        Shape [steps, legs].
    """
    data, transfer, forward_s, backward_s, optimizer, other = steps.phases_s.T
    before = [np.concatenate([[0.0], column[:-1]]) for column in (optimizer, other)]
    stood = times.stood()
    forward_s = forward_s - (stood * ~times.backward).sum(axis=1)
    backward_s = backward_s - (stood * times.backward).sum(axis=1)
    # What runs beside the computation is waited for at the end of backward.
    computed = np.fmax.reduce(times.of(times.beside).ready, axis=1)
    ended = clock.seconds([marks[-3] for marks in steps.marks])
    backward_s = backward_s - np.nan_to_num(ended - computed)
    return np.column_stack([*before, data, transfer, forward_s, backward_s])


def lateness(comes: Floats, first: Floats) -> Floats:
    """How much later than the first rank this one came to the meetings of a step: [steps].

    Args:
        comes: as of :meth:`Times.comes`.
        first: the same of the rank that came first to each meeting.
    """
    late: Floats = np.nan_to_num(comes - first).sum(axis=1)
    return late


def _any(kind: Bools, ready: Floats) -> bool:
    return bool((kind & ~np.isnan(ready)).any())
