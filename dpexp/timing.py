"""The only place that reads clocks.

A step is a row of marks; the time between two marks is known at once on a CPU and only after a
flush on an accelerator, where a mark is an event on the device's stream. So the hot loop never
synchronises: it leaves marks, and :meth:`Clock.settle` waits for the device once per flush.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Generic, TypeVar, final

import numpy as np
import numpy.typing as npt
import torch

Mark = TypeVar("Mark")


def make_clock(device: torch.device) -> Clock[int] | Clock[torch.Event]:
    """The clock of a device: the host's on a CPU, stream events elsewhere."""
    return HostClock() if device.type == "cpu" else EventClock(device)


def now_s() -> float:
    """Monotonic seconds for pacing, and for what lies around the steps; never inside a step."""
    return time.monotonic()


def host_s() -> float:
    """Seconds of the clock that marks are in: one for all processes of a host."""
    return time.perf_counter_ns() * 1e-9


class Clock(ABC, Generic[Mark]):
    """Marks points in time."""

    @abstractmethod
    def mark(self) -> Mark:
        """Leave a mark here. Never waits for a device."""

    @abstractmethod
    def spans(self, rows: Sequence[Sequence[Mark]]) -> npt.NDArray[np.float64]:
        """Seconds between neighbouring marks. Only after :meth:`settle`.

        Args:
            rows: of equal length n; the marks of a row belong to one step, in order.

        Returns:
            Shape [len(rows), n - 1].
        """

    @abstractmethod
    def seconds(self, marks: Sequence[Mark]) -> npt.NDArray[np.float64]:
        """When the marks were reached, on the host's clock (see :func:`host_s`).

        Only after :meth:`settle`.

        Returns:
            Shape [len(marks)].
        """

    @abstractmethod
    def settle(self) -> None:
        """Wait until every mark left so far can be read: a synchronisation point."""


@final
class HostClock(Clock[int]):
    """The host's performance counter, in nanoseconds."""

    # The bare C function: the cheapest reading that Python offers (about 40 ns).
    mark = staticmethod(time.perf_counter_ns)

    def spans(self, rows: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
        nanoseconds = np.array(rows, dtype=np.int64)
        return (nanoseconds[:, 1:] - nanoseconds[:, :-1]).astype(np.float64) * 1e-9

    def seconds(self, marks: Sequence[int]) -> npt.NDArray[np.float64]:
        return np.array(marks, dtype=np.float64) * 1e-9

    def settle(self) -> None:
        return None


@final
class EventClock(Clock[torch.Event]):
    """Events on a device's current stream.

    The time between two events is the device's own: what the host does while the device is
    still busy with earlier work costs nothing here, exactly as it costs the step nothing. Not run
    on a GPU yet; tested with a stand-in for torch.Event.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.Event | None = None
        # An event whose place on the host's clock is known, since the host waited for it.
        self._anchor: tuple[torch.Event, float] | None = None

    def mark(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        self._last = event
        return event

    def spans(self, rows: Sequence[Sequence[torch.Event]]) -> npt.NDArray[np.float64]:
        # torch gives milliseconds
        return np.array(
            [[a.elapsed_time(b) * 1e-3 for a, b in pairwise(row)] for row in rows],
            dtype=np.float64,
        )

    def seconds(self, marks: Sequence[torch.Event]) -> npt.NDArray[np.float64]:
        if self._anchor is None:
            raise RuntimeError("seconds() needs settle() before it")
        anchor, anchor_s = self._anchor
        # Off by what the host takes to notice the end of the wait, the same for all marks.
        return np.array(
            [anchor_s - mark.elapsed_time(anchor) * 1e-3 for mark in marks], dtype=np.float64
        )

    def settle(self) -> None:
        # Events of one stream complete in order: the last one is enough. Those of other streams
        # (collectives) are done by then, since the stream of the last one has waited for them. So
        # it must be one of the computing stream: a step's end is.
        if self._last is None:
            return
        self._last.synchronize()
        anchor = torch.Event(self._device, enable_timing=True)
        anchor.record()
        anchor.synchronize()
        self._anchor = anchor, host_s()
