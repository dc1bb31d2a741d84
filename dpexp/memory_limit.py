"""Ends a rank that uses more memory than it may (``process_memory_mib``).

Watched from a thread while the rank works, so that a batch that is far too large ends before the
machine begins to swap. Costs a few microseconds a hundred times a second.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import final

import psutil

from dpexp.loop import Progress
from dpexp.records import ErrorRecord

POLL_S = 0.01


@final
class MemoryLimit:
    """Watches this process from :meth:`start` on, until it ends.

    Args:
        limit_bytes: resident memory of the whole process.
        progress: of the rank's main thread, for the place in the reason.
        keep: called with the reason before the process is ended.
    """

    def __init__(
        self,
        limit_bytes: int,
        rank: int,
        progress: Progress,
        keep: Callable[[ErrorRecord], None],
    ) -> None:
        self._limit_bytes = limit_bytes
        self._rank = rank
        self._progress = progress
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
                self._keep(self._record(used))
                os._exit(1)

    def _record(self, used_bytes: int) -> ErrorRecord:
        progress = self._progress
        step, phase = progress.current_step(), progress.phase
        at = "" if step is None else f"step {step}, "
        text = (
            f"the process of rank {self._rank} used {used_bytes / 2**20:.1f} MiB, more than "
            f"process_memory_mib={self._limit_bytes / 2**20:g} [rank {self._rank}, {at}{phase}]"
        )
        stack = traceback.format_stack(sys._current_frames()[threading.main_thread().ident or 0])
        during = progress.during or None
        return ErrorRecord(
            "oom",
            "MemoryLimit",
            text,
            self._rank,
            step,
            "Stack of the main thread:\n" + "".join(stack),
            phase=phase,
            during=during,
        )
