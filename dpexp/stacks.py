"""Stacks of a rank's threads, for a process outside: written by the rank's own signal handler.

The handler is faulthandler's, in C: it also works while the rank is stuck in C code that never
gives Python a turn.
"""

from __future__ import annotations

import contextlib
import faulthandler
import linecache
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

# Not one that ends a rank (lifeline.py). A user's handler of the same signal wins; then there is
# no stack of that rank.
ASK = signal.SIGUSR2
ANSWER_S, LOOK_S = 3.0, 0.05
# faulthandler writes at most 100 frames of 100 threads, each of some 600 bytes. What is not written
# takes no room on the disk.
PLACE_BYTES = 16 * 2**20
NO_ANSWER = "no stack: the process did not answer (stopped, or its memory is being written out)"
_THREAD = "(most recent call first):"
_FRAME = re.compile(r'\s*File "(.+)", line (\d+) in (.+)')


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"

    def shown(self) -> str:
        """As a traceback shows it, with the line's text."""
        text = linecache.getline(self.file, self.line).strip()
        return f'  File "{self.file}", line {self.line}, in {self.function}\n    {text}\n'


def offer(path: Path, rank: int) -> None:
    """From here on this process writes the stacks of all its threads to `path` when asked.

    Args:
        path: one file for all ranks, in which each has its place.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)  # open as long as the process lives
    os.lseek(handle, rank * PLACE_BYTES, os.SEEK_SET)
    faulthandler.register(ASK, file=handle, all_threads=True, chain=False)


def collect(pids: dict[int, int], path: Path) -> dict[int, str]:
    """The stacks of living ranks, by rank.

    Args:
        pids: of the ranks that have called :func:`offer`: the signal would end another process.
        path: what they gave it.
    """
    asked = []
    for rank, pid in pids.items():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, ASK)
            asked.append(rank)
    texts = dict.fromkeys(asked, "")
    for _ in range(int(ANSWER_S / LOOK_S)):
        time.sleep(LOOK_S)
        before, texts = texts, {rank: _written(path, rank) for rank in asked}
        if texts == before and all(texts.values()):  # nobody is still writing
            break
    return {rank: text or NO_ANSWER for rank, text in texts.items()}


def _written(path: Path, rank: int) -> str:
    with path.open("rb") as file:
        file.seek(rank * PLACE_BYTES)
        return file.read(PLACE_BYTES).partition(b"\0")[0].decode("utf-8", "replace")


def threads(text: str) -> list[list[Frame]]:
    """The frames of each thread in faulthandler's text, innermost first; the main thread first."""
    found: list[list[Frame]] = []
    for line in text.splitlines():
        if line.endswith(_THREAD):
            found.append([])
        elif found and (frame := _FRAME.fullmatch(line)):
            found[-1].append(Frame(frame[1], int(frame[2]), frame[3]))
    return found[::-1]  # the interpreter lists its newest thread first
