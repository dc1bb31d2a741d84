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
from dpexp.exposure import Exposure, of_blocking, of_buckets
from dpexp.parallel.collectives import Collective
from dpexp.records import COMM_PARTS, PhaseSummary
from dpexp.stats import summarize
from dpexp.stragglers import StragglerCount

Floats = npt.NDArray[np.float64]
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
    measured: npt.NDArray[np.bool_]
    collectives: Sequence[Sequence[Collective]]


@final
class CommRecorder:
    """Collects what collectives cost.

    Args:
        blocking: whether the rank stands still for each (FSDP on gloo, dp), else it computes on.
    """

    def __init__(self, comm: Comm, clock: timing.Clock[Any], *, blocking: bool) -> None:
        self._comm, self._clock, self._blocking = comm, clock, blocking
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
        ready, end, backward = self._times(steps, max(width, 1))
        begins_s = self._clock.seconds([marks[0] for marks in steps.marks])
        last_ready = ready
        if self._several and together:
            last_ready = self._compare(steps, ready, end, backward)
        own = late = self._exposure(ready, end, last_ready)
        if self._blocking:  # else all of them lie in backward
            hidden = np.where(backward, 1.0, np.nan)
            late = self._exposure(ready * hidden, end * hidden, last_ready * hidden)
        arrival_s = np.fmin.reduce(ready, axis=1) - begins_s
        num_bytes = [sum(each.num_bytes for each in entries) for entries in steps.collectives]
        if self._several and not together:
            unknown = np.full(len(begins_s), np.nan)
            own, late = (
                Exposure(unknown, unknown, each.overlapped_s, unknown) for each in (own, late)
            )
        rates = self._rates(steps, own)
        self._keep(steps, own, late, num_bytes)
        self._draw(steps, begins_s, ready, last_ready, end)
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

    def _exposure(self, ready: Floats, end: Floats, last_ready: Floats) -> Exposure:
        return (of_blocking if self._blocking else of_buckets)(ready, end, last_ready)

    def _times(self, steps: Steps, width: int) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
        """When each collective was ready and done, and whether in backward: [steps, width]."""
        shape = (len(steps.numbers), width)
        ready, end = np.full(shape, np.nan), np.full(shape, np.nan)
        backward = np.zeros(shape, dtype=bool)
        counts = [len(entries) for entries in steps.collectives]
        rows = np.repeat(np.arange(len(counts)), counts)
        columns = np.concatenate([np.arange(count) for count in counts]) if counts else rows
        noted = list(chain.from_iterable(steps.collectives))
        ready[rows, columns] = self._clock.seconds([each.ready for each in noted])
        end[rows, columns] = self._clock.seconds([each.end for each in noted])
        backward[rows, columns] = [each.in_backward for each in noted]
        return ready, end, backward

    def _compare(
        self, steps: Steps, ready: Floats, end: Floats, backward: npt.NDArray[np.bool_]
    ) -> Floats:
        """When the last of all ranks had each collective ready. Waits for all ranks."""
        offset_s = self._offset.offset_s
        legs = self._legs(steps, ready, end, backward)
        own = np.concatenate([ready - offset_s, legs], axis=1)
        everyone = self._comm.exchange(torch.from_numpy(own)).numpy()
        width = ready.shape[1]
        arrivals, all_legs = everyone[:, :, :width], everyone[:, :, width:]
        measured = steps.measured
        if self._stragglers is not None and self._comm.rank == 0:
            late = self._late(arrivals)
            step_s = steps.phases_s.sum(axis=1)
            meetings = width if self._blocking else 1
            self._stragglers.add(
                late[:, measured], all_legs[:, measured], step_s[measured], meetings
            )
        last: Floats = np.fmax.reduce(arrivals, axis=0) + offset_s
        return np.where(np.isnan(ready), np.nan, last)  # nobody waits where it does not take part

    def _late(self, arrivals: Floats) -> Floats:
        """How much later than the first rank each came to a step's meetings: [ranks, steps]."""
        if not self._blocking:
            arrivals = np.fmax.reduce(arrivals, axis=2, keepdims=True)
        late: Floats = np.nan_to_num(arrivals - np.fmin.reduce(arrivals, axis=0)).sum(axis=2)
        return late

    def _legs(
        self, steps: Steps, ready: Floats, end: Floats, backward: npt.NDArray[np.bool_]
    ) -> Floats:
        """What this rank did since the meeting before, without meetings: stragglers.LEGS.

        A flush is a meeting too, so nothing of the step before the first one counts.
        """
        data, transfer, forward_s, backward_s, optimizer, other = steps.phases_s.T
        before = [np.concatenate([[0.0], column[:-1]]) for column in (optimizer, other)]
        stood = np.nan_to_num(end - ready)
        if self._blocking:
            forward_s = forward_s - (stood * ~backward).sum(axis=1)
            backward_s = backward_s - (stood * backward).sum(axis=1)
        else:
            ended = self._clock.seconds([marks[-3] for marks in steps.marks])
            backward_s = backward_s - np.nan_to_num(ended - np.fmax.reduce(ready, axis=1))
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

    def _keep(self, steps: Steps, own: Exposure, late: Exposure, num_bytes: list[int]) -> None:
        measured = steps.measured
        for part, seconds in zip(
            COMM_PARTS, (own.exposed_s, own.overlapped_s, own.waiting_s), strict=True
        ):
            self._seconds[part].append(_there(seconds[measured]))
        self._backward_s["exposed"].append(_there(late.exposed_s[measured]))
        self._backward_s["waiting"].append(_there(late.waiting_s[measured]))
        self._steps += int(measured.sum())
        self._bytes += sum(n for n, counts in zip(num_bytes, measured, strict=True) if counts)
        self._count += sum(
            len(entries)
            for entries, counts in zip(steps.collectives, measured, strict=True)
            if counts
        )

    def _draw(
        self, steps: Steps, begins_s: Floats, ready: Floats, start: Floats, end: Floats
    ) -> None:
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
                            "ready_s": float(ready[index, column] - self._offset.offset_s),
                            # It starts when the last rank has it ready.
                            "start_s": float(start[index, column] - self._offset.offset_s),
                            "end_s": float(end[index, column] - self._offset.offset_s),
                        }
                        for column, each in enumerate(steps.collectives[index])
                    ],
                }
            )


def _there(seconds: Floats) -> Floats:
    there: Floats = seconds[~np.isnan(seconds)]
    return there


def _known(seconds: Floats) -> list[float | None]:
    return [None if np.isnan(value) else value for value in seconds.tolist()]
