"""All that a report says, as plain data: no Markdown, no HTML, no figure.

The files of a report, its page and the console are made from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpexp.report.build import read_cells
from dpexp.report.findings import (
    BREAKDOWN_PARTS,
    Breakdown,
    Failure,
    MemoryPoint,
    ShapeRow,
    breakdowns_of,
    failures_of,
    memory_of,
    parity_of,
)
from dpexp.report.scaling import Cell, analyse

__all__ = [
    "BREAKDOWN_PARTS",
    "PARITY_HEADER",
    "Breakdown",
    "Cell",
    "Content",
    "Failure",
    "MemoryPoint",
    "ShapeRow",
    "content_of",
]

PARITY_HEADER = ("cell", "verdict", "loss", "gradients", "weights", "reason")


@dataclass(frozen=True)
class Content:
    """What a report says of one sweep or of several. Every text is as it was found: not escaped.

    Lists are whole; where one would be too long to be read, its `_left` counts what was left out.
    """

    title: str  # "Sweep <folder>", "Run <folder>" or "3 sweeps"
    answers: tuple[str, ...]  # the answer in one sentence, then one per setting, then caveats
    command: str  # what repeats it, quoted for a shell; a line per sweep
    cells: tuple[Cell, ...]
    breakdowns: tuple[Breakdown, ...]
    memory: tuple[MemoryPoint, ...]
    shapes: tuple[ShapeRow, ...]
    shapes_left: int  # cells whose shapes are only in their shapes.csv
    failures: tuple[Failure, ...]
    parity: tuple[tuple[str, ...], ...]  # columns: PARITY_HEADER
    warnings: tuple[str, ...]  # each with the cells it is about
    environment: tuple[tuple[str, str], ...]  # name, value
    notes: tuple[tuple[str, str], ...]  # cell's folder, note


def content_of(folders: Sequence[Path]) -> Content:
    """Read sweeps, or single runs, and say what a report says of them."""
    runs = {name: run for folder in folders for name, run in read_cells(folder).items()}
    cells = analyse(runs)
    environment: dict[str, Any] = next(
        (run["environment"] for run in runs.values() if run["environment"]), {}
    )
    return Content(
        title=f"Sweep {folders[0].name}" if len(folders) == 1 else f"{len(folders)} sweeps",
        answers=(),
        command="",
        cells=tuple(cells),
        breakdowns=tuple(breakdowns_of(cells, runs)),
        memory=tuple(memory_of(cells, runs)),
        shapes=(),
        shapes_left=0,
        failures=tuple(failures_of(cells, runs)),
        parity=tuple(parity_of(cells, runs)),
        warnings=(),
        environment=tuple((name, str(value)) for name, value in environment.items()),
        notes=tuple((cell.folder, note) for cell in cells for note in cell.notes),
    )
