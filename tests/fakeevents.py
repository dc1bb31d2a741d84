"""A stand-in for torch.Event: a device that takes 5 ms from one event to the next."""

from __future__ import annotations

from typing import ClassVar

import torch


class Event:
    """Notes how often the host waited for it."""

    made: ClassVar[list[Event]] = []

    def __init__(self, device: torch.device, enable_timing: bool) -> None:
        if not enable_timing:
            raise ValueError("an event without timing cannot be read")
        self.device = device
        self.at_ms: float | None = None
        self.synchronized = 0
        Event.made.append(self)

    def record(self) -> None:
        self.at_ms = 5.0 * len(Event.made)

    def synchronize(self) -> None:
        self.synchronized += 1

    def elapsed_time(self, later: Event) -> float:
        assert self.at_ms is not None
        assert later.at_ms is not None
        return later.at_ms - self.at_ms


def waits(events: list[Event]) -> int:
    """How often the host waited. Settling a clock waits twice: for the last mark and an anchor."""
    return sum(event.synchronized for event in events)
