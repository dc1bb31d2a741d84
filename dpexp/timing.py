"""The only place that reads clocks.

A step is a row of marks; the time between two marks is known at once on a CPU and only after a
flush on an accelerator, where a mark is an event on the device's stream. So the hot loop never
synchronises: it leaves marks, and :meth:`Clock.settle` waits for the device once per flush.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Generic, TypeVar, final

import torch

Mark = TypeVar("Mark")


def make_clock(device: torch.device) -> Clock[int] | Clock[torch.Event]:
    """The clock of a device: the host's on a CPU, stream events elsewhere."""
    return HostClock() if device.type == "cpu" else EventClock(device)


def now_s() -> float:
    """Monotonic seconds for pacing (flushes, progress), never for a measurement."""
    return time.monotonic()


class Clock(ABC, Generic[Mark]):
    """Marks points in time."""

    @abstractmethod
    def mark(self) -> Mark:
        """Leave a mark here. Never waits for a device."""

    @abstractmethod
    def seconds(self, earlier: Mark, later: Mark) -> float:
        """Seconds between two marks of one step. Only after :meth:`settle`."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until every mark left so far can be read: a synchronisation point."""


@final
class HostClock(Clock[int]):
    """The host's performance counter, in nanoseconds."""

    # The bare C function: the cheapest reading that Python offers (about 40 ns).
    mark = staticmethod(time.perf_counter_ns)

    def seconds(self, earlier: int, later: int) -> float:
        return (later - earlier) * 1e-9

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

    def mark(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        self._last = event
        return event

    def seconds(self, earlier: torch.Event, later: torch.Event) -> float:
        return earlier.elapsed_time(later) * 1e-3  # torch gives milliseconds

    def settle(self) -> None:
        # Events of one stream complete in order: the last one is enough.
        if self._last is not None:
            self._last.synchronize()
