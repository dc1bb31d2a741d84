"""Where each rank stands, in memory that it shares with the launching process.

A rank that is killed cannot say where it was, and one that hangs does not: so each writes step and
phase as it goes on. A write is an assignment to an array, about a quarter of a microsecond with all
around it (see tests/test_beacon.py), no system call, and nobody waits for anybody.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import dataclass
from typing import Any

# What a rank can be at. "launch" is before it has run a line of ours.
PHASES = (
    "launch",
    "set-up",
    "data",
    "transfer",
    "forward",
    "backward",
    "optimizer",
    "other",
    "parity",
    "finish",
    "trace",
    "compute",
)
CODES = {name: code for code, name in enumerate(PHASES)}
# What is going on when it is not the run's own steps.
DURING = ("", "the parity check", "the calibration", "the checkpoint")

# A rank's cells: changes of phase so far; the last step whose batch has come; codes of the phase
# and of what it is part of; whether it has waited for another rank until its time was up; when its
# first step began, in µs of Unix time.
TICKS, STEP, PHASE, PART, WAITED, BEGAN = range(6)
WIDTH = 8  # of 8 bytes: a cache line each, so that ranks do not slow each other down

Cells = MutableSequence[int]


@dataclass(frozen=True)
class Position:
    """Where a rank stood when it was looked at."""

    rank: int
    ticks: int  # changes of phase: all ranks go through the same ones, so the least is behind
    step: int | None
    phase: str
    during: str | None
    waited: bool


def step_at(step: int, phase: str) -> int | None:
    """The step at work, from the last one whose batch has come: while waiting, the next one."""
    if phase in ("launch", "set-up"):
        return None
    return step + 1 if phase == "data" else step


def own_cells(shared: Any, rank: int) -> Cells:
    """A rank's part of the memory for all; writing there is as fast as to a list."""
    view = memoryview(shared).cast("B").cast("q")
    return view[rank * WIDTH : (rank + 1) * WIDTH]  # type: ignore[return-value]


def position(cells: Cells, rank: int) -> Position:
    """Read a rank's cells."""
    phase = PHASES[cells[PHASE]]
    step, during = step_at(cells[STEP], phase), DURING[cells[PART]] or None
    return Position(rank, cells[TICKS], step, phase, during, bool(cells[WAITED]))
