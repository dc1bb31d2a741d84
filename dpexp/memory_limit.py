"""Ends a rank that uses more memory than it may: a try of the batch size search on a CPU.

Watched from a thread while the rank works, so that a batch that is far too large ends before the
machine begins to swap.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import final

import psutil

from dpexp.records import ErrorRecord

POLL_S = 0.01


@final
class MemoryLimit:
    """Watches this process from :meth:`start` on, until it ends.

    Args:
        limit_bytes: resident memory of the whole process.
        keep: called with the reason before the process is ended.
    """

    def __init__(self, limit_bytes: int, rank: int, keep: Callable[[ErrorRecord], None]) -> None:
        self._limit_bytes = limit_bytes
        self._rank = rank
        self._keep = keep
        self._never = threading.Event()

    def start(self) -> None:
        """Begin to watch."""
        threading.Thread(target=self._watch, name="dpexp-memory", daemon=True).start()

    def _watch(self) -> None:
        process = psutil.Process()
        while not self._never.wait(POLL_S):
            used = process.memory_info().rss
            if used > self._limit_bytes:
                text = (
                    f"rank {self._rank} used {used / 2**20:.1f} MiB, more than "
                    f"{self._limit_bytes / 2**20:.1f} MiB"
                )
                self._keep(ErrorRecord("oom", "MemoryLimit", text, self._rank))
                os._exit(1)
