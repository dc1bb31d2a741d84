"""Notes each collective of a step: how many bytes, when the rank had it ready, when it was done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from dpexp.exposure import bus_share
from dpexp.timing import Clock

BETWEEN_RANKS = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(slots=True)
class Collective:
    """One of a step. Marks are opaque; see timing.py."""

    kind: str
    num_bytes: int  # of the whole buffer: what is reduced, or what is there after a gather
    bus_bytes: float  # over each rank's link, on a ring; see exposure.bus_share
    in_backward: bool
    ready: Any
    end: Any = None
    blocking: bool = False  # the rank stands still for it; else it goes on computing
    # Where a rank that went on computing waits for it; None = where it has no more to compute.
    needed: Any = None


@final
class CollectiveLog:
    """The collectives of the current step, in the order in which they were ready.

    Args:
        blocking: the rank stands still for each unless told otherwise (FSDP on a CPU, the copies of
            dp); else it goes on computing.
        pause: called when a collective is done, before it is noted as done (``inject``); None =
            nothing.
    """

    def __init__(
        self,
        clock: Clock[Any],
        world_size: int,
        *,
        blocking: bool,
        pause: Callable[[], None] | None = None,
    ) -> None:
        self.blocking = blocking
        self._mark = clock.mark
        self._share = {kind: bus_share(kind, world_size) for kind in BETWEEN_RANKS}
        self._pause = pause
        self.noted: list[Collective] = []

    def begin(self, kind: str, num_bytes: int, *, blocking: bool | None = None) -> Collective:
        """Note that this rank has a collective ready."""
        # A graph task is at work in this thread: a backward pass.
        in_backward = torch._C._current_graph_task_id() != -1
        bus_bytes = num_bytes * self._share.get(kind, 1.0)
        stands = self.blocking if blocking is None else blocking
        entry = Collective(kind, num_bytes, bus_bytes, in_backward, self._mark(), None, stands)
        self.noted.append(entry)
        return entry

    def done(self, entry: Collective) -> None:
        """Note that it is done. May come from another thread."""
        if self._pause is not None:
            self._pause()
        entry.end = self._mark()

    def needed(self, entries: Sequence[Collective]) -> None:
        """Note that this rank's computation goes no further until these are done."""
        if not entries:
            return
        mark = self._mark()
        for entry in entries:
            entry.needed = mark

    def copied(self, kind: str, num_bytes: int, begin: Any, end: Any) -> None:
        """Note a copy between the devices of one process, with marks that are there already."""
        in_backward = torch._C._current_graph_task_id() != -1
        moved = float(num_bytes)
        self.noted.append(Collective(kind, num_bytes, moved, in_backward, begin, end, True))

    def pause(self) -> None:
        """Stand still for as long as ``inject.collective_delay_s`` says."""
        if self._pause is not None:
            self._pause()
