"""The communication of the steps: from marks to seconds, compared over the ranks at each flush."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch

from dpexp import timing
from dpexp.comm import Comm
from dpexp.comm_times import Steps, Times, lateness, legs, times_of
from dpexp.exposure import Exposure
from dpexp.records import COMM_PARTS, PhaseSummary
from dpexp.stats import summarize
from dpexp.stragglers import LEGS, StragglerCount

Floats = npt.NDArray[np.float64]
TIMELINE_STEPS = 20
# Who is late is told to rank 0 when it would hear of as many steps as it has heard of, or of these.
MOST_UNTOLD = 4096


class StepComm(NamedTuple):
    """Of each step of a flush. None = not known.

    When the ranks could not be compared nobody can tell what of a wait was for the transport.
    """

    exposed_s: list[float | None]
    overlapped_s: list[float | None]
    waiting_s: list[float | None]  # None too where there is one rank only
    arrival_s: list[float | None]  # None too in a step without a collective
    num_bytes: list[int]
    bus_bytes_per_s: list[float | None]


@final
class _Untold:
    """Measured steps of this rank of which rank 0 has not heard."""

    def __init__(self) -> None:
        self.steps = 0
        self.meetings = 0
        self.late_s: list[Floats] = []
        self.legs_s = np.zeros(len(LEGS))
        self.step_s: list[Floats] = []


@final
class CommRecorder:
    """Collects what collectives cost."""

    def __init__(self, comm: Comm, clock: timing.Clock[Any]) -> None:
        self._comm, self._clock = comm, clock
        self._several = comm.world_size > 1
        self._width = 1  # collectives of the step that has had the most, the same on every rank
        self._offset = comm.clock()
        self._seconds: dict[str, list[Floats]] = {part: [] for part in COMM_PARTS}
        self._backward_s: dict[str, list[Floats]] = {"exposed": [], "waiting": []}
        self._bus: list[tuple[float, float]] = []  # bytes, seconds
        self._bytes = 0
        self._count = 0
        self._steps = 0
        error_s = comm.max(self._offset.error_s)
        counts = self._several and comm.rank == 0
        self._stragglers = StragglerCount(comm.world_size, error_s) if counts else None
        self._untold = _Untold()
        self._told = 0  # measured steps of which rank 0 has heard
        self._timeline: list[dict[str, Any]] = []

    def account(
        self, steps: Steps, *, together: bool, beside: Sequence[float] = ()
    ) -> tuple[StepComm, list[float]]:
        """Count some steps. Waits for all ranks if `together`.

        Args:
            beside: numbers that travel along, so that they need no exchange of their own.

        Returns:
            What the steps cost, and the largest of each of those numbers over the ranks.
        """
        if self._several and together:
            times, last_ready, highest = self._compare(steps, beside)
        else:
            times = times_of(steps, max(_most(steps), 1), self._clock)
            last_ready, highest = times.ready, list(beside)
        begins_s = self._clock.seconds([marks[0] for marks in steps.marks])
        own = times.exposure(last_ready)
        all_backward = bool((times.backward | np.isnan(times.ready)).all())
        in_backward = own if all_backward else times.of(times.backward).exposure(last_ready)
        arrival_s = np.fmin.reduce(times.ready, axis=1) - begins_s
        num_bytes = [sum(each.num_bytes for each in entries) for entries in steps.collectives]
        if self._several and not together:
            unknown = np.full(len(begins_s), np.nan)
            own, in_backward = (
                Exposure(unknown, unknown, unknown, unknown) for _ in (own, in_backward)
            )
        rates = self._rates(steps, own)
        self._keep(steps, own, in_backward, num_bytes)
        self._draw(steps, begins_s, times, last_ready)
        nobody: list[float | None] = [None] * len(begins_s)
        found = StepComm(
            _known(own.exposed_s),
            _known(own.overlapped_s),
            _known(own.waiting_s) if self._several else nobody,
            _known(arrival_s),
            num_bytes,
            rates,
        )
        return found, highest

    def finish(self) -> None:
        """After the last step: rank 0 gets what it has not heard yet. Waits for all ranks."""
        if self._untold.steps:  # the same on every rank
            self._tell()

    def timing(self) -> dict[str, PhaseSummary]:
        """Statistics over the measured steps."""
        return {
            part: summarize(np.concatenate(seconds) if seconds else [])
            for part, seconds in self._seconds.items()
            if self._several or part != "straggler_wait"
        }

    def summary(self) -> dict[str, Any]:
        """What this rank has to say; means over the measured steps."""
        moved, busy_s = (sum(column) for column in zip((0.0, 0.0), *self._bus, strict=True))
        return {
            "bytes_per_step": self._bytes / self._steps if self._steps else None,
            "collectives_per_step": self._count / self._steps if self._steps else None,
            "bus_gb_per_s": moved / busy_s / 1e9 if busy_s > 0 and moved > 0 else None,
            **{f"{part}_mean_s": self._mean(part, s) for part, s in self._seconds.items()},
            **{f"{k}_backward_mean_s": self._mean(k, s) for k, s in self._backward_s.items()},
            "clock_offset_s": self._offset.offset_s,
            "clock_error_s": self._offset.error_s,
            "stragglers": None if self._stragglers is None else self._stragglers.summary(),
            "timeline": self._timeline,
        }

    def _mean(self, part: str, chunks: list[Floats]) -> float | None:
        """Of the measured steps; None where there is no other rank to wait for."""
        if not self._several and part in ("straggler_wait", "waiting"):
            return None
        values = np.concatenate(chunks) if chunks else np.zeros(0)
        return float(values.mean()) if len(values) else None

    def _compare(self, steps: Steps, beside: Sequence[float]) -> tuple[Times, Floats, list[float]]:
        """When the last of all ranks had each collective ready. Waits for all ranks.

        A rank gets no rows of the others: what it needs of them is the first and the last one, and
        only rank 0 gets from each a number per step. So a flush costs a rank as much among 1,024
        as among two.

        Returns:
            This rank's times, when the last rank was ready, and the highest of `beside`.
        """
        times, first, last, highest = self._agree(steps, beside)
        measured = steps.measured
        if measured.any():  # the same on every rank
            self._untold.late_s.append(
                lateness(times.comes() - self._offset.offset_s, first)[measured]
            )
            self._untold.legs_s += legs(steps, times, self._clock)[measured].sum(axis=0)
            self._untold.step_s.append(steps.phases_s.sum(axis=1)[measured])
            self._untold.meetings = max(self._untold.meetings, times.meetings())
            self._untold.steps += int(measured.sum())
        if self._untold.steps >= min(max(self._told, 1), MOST_UNTOLD):
            self._tell()
        # Nobody waits where it does not take part.
        last_ready = np.where(np.isnan(times.ready), np.nan, last + self._offset.offset_s)
        return times, last_ready, highest

    def _tell(self) -> None:
        """Let rank 0 know how late each rank was. Waits for all ranks."""
        untold, self._untold = self._untold, _Untold()
        self._told += untold.steps
        late_s = np.concatenate(untold.late_s)
        everyone = self._comm.collect(torch.from_numpy(np.concatenate([late_s, untold.legs_s])))
        if everyone is not None and self._stragglers is not None:
            late_s, legs_s = np.split(everyone.numpy(), [len(late_s)], axis=1)
            self._stragglers.add(late_s, legs_s, np.concatenate(untold.step_s), untold.meetings)

    def _agree(
        self, steps: Steps, beside: Sequence[float]
    ) -> tuple[Times, Floats, Floats, list[float]]:
        """Exchange times with all ranks: their shape has to be the same on each.

        How many collectives each has at most travels along. Only where that is more than ever
        before are the times sent once more: each exchange is a wait for a process that may have to
        wait for a core.

        Returns:
            This rank's times; on rank 0's clock, when the first rank came to each meeting and when
            the last one had each collective ready; and the highest of `beside`.
        """
        width = _most(steps)
        while True:
            times = times_of(steps, max(self._width, width), self._clock)
            own = np.full((len(steps.numbers), 2 * self._width + 2), np.nan)  # see Times.comes
            if width <= self._width:
                ready, comes = (x - self._offset.offset_s for x in (times.ready, times.comes()))
                own = np.column_stack([ready, -comes])
            sent = np.concatenate([np.where(np.isnan(own), -np.inf, own).ravel(), [width], beside])
            found = self._comm.highest(torch.from_numpy(sent)).numpy()
            widest = int(found[own.size])
            if widest <= self._width:
                break
            self._width = widest
        times_s = found[: own.size].reshape(own.shape)
        times_s[np.isneginf(times_s)] = np.nan  # no rank took part
        last, first = np.split(times_s, [self._width], axis=1)
        return times, -first, last, found[own.size + 1 :].tolist()

    def _rates(self, steps: Steps, own: Exposure) -> list[float | None]:
        rates: list[float | None] = []
        for entries, busy_s, measured in zip(
            steps.collectives, own.bus_s.tolist(), steps.measured.tolist(), strict=True
        ):
            moved = sum([each.bus_bytes for each in entries])
            rates.append(moved / busy_s if moved and busy_s > 0 else None)
            if measured and not np.isnan(busy_s):
                self._bus.append((moved, busy_s))
        return rates

    def _keep(
        self, steps: Steps, own: Exposure, in_backward: Exposure, num_bytes: list[int]
    ) -> None:
        measured = steps.measured
        for part, seconds in zip(
            COMM_PARTS, (own.exposed_s, own.overlapped_s, own.waiting_s), strict=True
        ):
            self._seconds[part].append(_there(seconds[measured]))
        self._backward_s["exposed"].append(_there(in_backward.exposed_s[measured]))
        self._backward_s["waiting"].append(_there(in_backward.waiting_s[measured]))
        self._steps += int(measured.sum())
        self._bytes += sum(n for n, counts in zip(num_bytes, measured, strict=True) if counts)
        self._count += sum(
            len(entries)
            for entries, counts in zip(steps.collectives, measured, strict=True)
            if counts
        )

    def _draw(self, steps: Steps, begins_s: Floats, times: Times, start: Floats) -> None:
        """Keep the first measured steps for the timeline, on rank 0's clock."""
        stalls = times.stalls()
        for index, number in enumerate(steps.numbers):
            if len(self._timeline) >= TIMELINE_STEPS:
                return
            if not steps.measured[index]:
                continue
            self._timeline.append(
                {
                    "step": number,
                    "begin_s": float(begins_s[index] - self._offset.offset_s),
                    "phases_s": steps.phases_s[index].tolist(),
                    "collectives": [
                        {
                            "kind": each.kind,
                            "num_bytes": each.num_bytes,
                            "ready_s": float(times.ready[index, column] - self._offset.offset_s),
                            # It starts when the last rank has it ready.
                            "start_s": float(start[index, column] - self._offset.offset_s),
                            "end_s": float(times.end[index, column] - self._offset.offset_s),
                            # Of an awaited one: so long before its end this rank stood still.
                            "stall_s": float(stalls[index, column]),
                        }
                        for column, each in enumerate(steps.collectives[index])
                    ],
                }
            )


def _most(steps: Steps) -> int:
    """Collectives of the step that has the most."""
    return max((len(entries) for entries in steps.collectives), default=0)


def _there(seconds: Floats) -> Floats:
    there: Floats = seconds[~np.isnan(seconds)]
    return there


def _known(seconds: Floats) -> list[float | None]:
    return [None if np.isnan(value) else value for value in seconds.tolist()]
