"""The communication of the steps: from marks to seconds, compared over the ranks at each flush."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch

from dpexp import timing
from dpexp.comm import Comm
from dpexp.exposure import Exposure, of_blocking, of_buckets, together
from dpexp.parallel.collectives import Collective
from dpexp.records import COMM_PARTS, PhaseSummary
from dpexp.stats import summarize
from dpexp.stragglers import StragglerCount

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
TIMELINE_STEPS = 20


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


@dataclass(frozen=True)
class Steps:
    """The steps of a flush, as far as they matter here."""

    numbers: list[int]
    marks: Sequence[Sequence[Any]]  # as of recorder.Row
    phases_s: Floats  # shape [steps, phases]
    measured: Bools
    collectives: Sequence[Sequence[Collective]]


@dataclass(frozen=True)
class Times:
    """Of a flush's collectives: shape [steps, collectives], seconds; NaN where there is none."""

    ready: Floats
    end: Floats
    backward: Bools  # begun in backward
    blocking: Bools  # the rank stands still for it

    def of(self, kind: Bools) -> Times:
        """Only those of a kind."""
        ready, end = (np.where(kind, each, np.nan) for each in (self.ready, self.end))
        return Times(ready, end, self.backward, self.blocking)

    def exposure(self, last_ready: Floats) -> Exposure:
        """What they cost.

        Args:
            last_ready: when the last of all ranks had each ready.
        """
        stands, beside = self.of(self.blocking), self.of(~self.blocking)
        return together(
            of_blocking(stands.ready, stands.end, last_ready),
            of_buckets(beside.ready, beside.end, np.where(self.blocking, np.nan, last_ready)),
        )


@final
class CommRecorder:
    """Collects what collectives cost."""

    def __init__(self, comm: Comm, clock: timing.Clock[Any]) -> None:
        self._comm, self._clock = comm, clock
        self._several = comm.world_size > 1
        self._offset = comm.clock()
        self._seconds: dict[str, list[Floats]] = {part: [] for part in COMM_PARTS}
        self._backward_s: dict[str, list[Floats]] = {"exposed": [], "waiting": []}
        self._bus: list[tuple[float, float]] = []  # bytes, seconds
        self._bytes = 0
        self._count = 0
        self._steps = 0
        error_s = comm.max(self._offset.error_s)
        self._stragglers = StragglerCount(comm.world_size, error_s) if self._several else None
        self._timeline: list[dict[str, Any]] = []

    def account(self, steps: Steps, *, together: bool) -> StepComm:
        """Count some steps. Waits for all ranks if `together`."""
        width = max((len(entries) for entries in steps.collectives), default=0)
        if self._several and together:
            width = int(self._comm.max(width))
        times = self._times(steps, max(width, 1))
        begins_s = self._clock.seconds([marks[0] for marks in steps.marks])
        last_ready = times.ready
        if self._several and together:
            last_ready = self._compare(steps, times)
        own = times.exposure(last_ready)
        in_backward = times.of(times.backward).exposure(last_ready)
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
        return StepComm(
            _known(own.exposed_s),
            _known(own.overlapped_s),
            _known(own.waiting_s) if self._several else nobody,
            _known(arrival_s),
            num_bytes,
            rates,
        )

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

    def _times(self, steps: Steps, width: int) -> Times:
        """When each collective was ready and done, and of what kind it is."""
        shape = (len(steps.numbers), width)
        times = Times(
            np.full(shape, np.nan), np.full(shape, np.nan), np.zeros(shape, bool),
            np.zeros(shape, bool),
        )  # fmt: skip
        counts = [len(entries) for entries in steps.collectives]
        rows = np.repeat(np.arange(len(counts)), counts)
        columns = np.concatenate([np.arange(count) for count in counts]) if counts else rows
        noted = list(chain.from_iterable(steps.collectives))
        times.ready[rows, columns] = self._clock.seconds([each.ready for each in noted])
        times.end[rows, columns] = self._clock.seconds([each.end for each in noted])
        times.backward[rows, columns] = [each.in_backward for each in noted]
        times.blocking[rows, columns] = [each.blocking for each in noted]
        return times

    def _compare(self, steps: Steps, times: Times) -> Floats:
        """When the last of all ranks had each collective ready. Waits for all ranks."""
        offset_s, ready = self._offset.offset_s, times.ready
        own = np.concatenate([ready - offset_s, self._legs(steps, times)], axis=1)
        everyone = self._comm.exchange(torch.from_numpy(own)).numpy()
        width = ready.shape[1]
        arrivals, all_legs = everyone[:, :, :width], everyone[:, :, width:]
        measured = steps.measured
        if self._stragglers is not None and self._comm.rank == 0:
            step_s = steps.phases_s.sum(axis=1)
            stands = times.blocking.any(axis=0)
            meetings = int(stands.sum()) + int(not stands.all())
            self._stragglers.add(
                _late(arrivals, times.blocking)[:, measured],
                all_legs[:, measured],
                step_s[measured],
                meetings,
            )
        last: Floats = np.fmax.reduce(arrivals, axis=0) + offset_s
        return np.where(np.isnan(ready), np.nan, last)  # nobody waits where it does not take part

    def _legs(self, steps: Steps, times: Times) -> Floats:
        """What this rank did since the meeting before, without meetings: stragglers.LEGS.

        A flush is a meeting too, so nothing of the step before the first one counts.
        """
        data, transfer, forward_s, backward_s, optimizer, other = steps.phases_s.T
        before = [np.concatenate([[0.0], column[:-1]]) for column in (optimizer, other)]
        stood = np.where(times.blocking, np.nan_to_num(times.end - times.ready), 0.0)
        forward_s = forward_s - (stood * ~times.backward).sum(axis=1)
        backward_s = backward_s - (stood * times.backward).sum(axis=1)
        # What runs beside the computation is waited for at the end of backward.
        computed = np.fmax.reduce(times.of(~times.blocking).ready, axis=1)
        ended = self._clock.seconds([marks[-3] for marks in steps.marks])
        backward_s = backward_s - np.nan_to_num(ended - computed)
        return np.column_stack([*before, data, transfer, forward_s, backward_s])

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
                        }
                        for column, each in enumerate(steps.collectives[index])
                    ],
                }
            )


def _late(arrivals: Floats, blocking: Bools) -> Floats:
    """How much later than the first rank each came to the meetings of a step: [ranks, steps].

    Args:
        arrivals: shape [ranks, steps, collectives].
    """
    at_each = np.where(blocking, arrivals, np.nan)
    at_last = np.fmax.reduce(np.where(blocking, np.nan, arrivals), axis=2, keepdims=True)
    late: Floats = sum(
        np.nan_to_num(come - np.fmin.reduce(come, axis=0)).sum(axis=2)
        for come in (at_each, at_last)
    )
    return late


def _there(seconds: Floats) -> Floats:
    there: Floats = seconds[~np.isnan(seconds)]
    return there


def _known(seconds: Floats) -> list[float | None]:
    return [None if np.isnan(value) else value for value in seconds.tolist()]
