"""All ranks of a host give their results through one pipe.

torch's context makes a queue per rank and hands every rank the queues of all: at some 120 ranks
those are more files than a fork server can pass on to a process, and the run cannot be started.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from typing import Any, final

from torch.distributed.elastic import multiprocessing as elastic


@contextmanager
def one_queue() -> Iterator[None]:
    """Contexts that torch's agent makes meanwhile have one queue."""
    theirs = elastic.MultiprocessContext
    elastic.MultiprocessContext = _Context  # type: ignore[misc]
    try:
        yield
    finally:
        elastic.MultiprocessContext = theirs  # type: ignore[misc]


@final
class _Context(elastic.MultiprocessContext):
    """torch's processes, with one queue instead of one per rank."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        for queue in self._ret_vals.values():
            queue.close()
        shared: SimpleQueue[tuple[int, Any]] = get_context(self.start_method).SimpleQueue()
        waiting: dict[int, Any] = {}
        slots: Any = {rank: _Slot(shared, rank, waiting) for rank in range(self.nprocs)}
        self._ret_vals = slots


@final
class _Slot:
    """What looks to torch like a rank's own queue. It takes one value.

    Args:
        waiting: values that have been read and not yet asked for, by rank.
    """

    def __init__(
        self, shared: SimpleQueue[tuple[int, Any]], rank: int, waiting: dict[int, Any]
    ) -> None:
        self._shared, self._rank, self._waiting = shared, rank, waiting

    @property
    def reader(self) -> Any:
        """Readable when some rank's value is there: the same one for all."""
        return self._shared._reader  # type: ignore[attr-defined]

    def put(self, value: Any) -> None:
        self._shared.put((self._rank, value))

    def empty(self) -> bool:
        while not self._shared.empty():
            rank, value = self._shared.get()
            self._waiting[rank] = value
        return self._rank not in self._waiting

    def get(self) -> Any:
        return self._waiting.pop(self._rank)
