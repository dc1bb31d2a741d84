"""What is in the folders of a sweep: the results, which steps can be read, what has changed."""

from __future__ import annotations

import csv
import hashlib
import json
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

Snapshot = dict[str, tuple[str, int]]


def cell_folder(sweep: Path, number: int) -> Path | None:
    """Of a cell by its number."""
    return next(iter(sweep.glob(f"{number}_*")), None)


def result(folder: Path | None) -> dict[str, Any] | None:
    """``run.json``; None if there is none, or none that can be read."""
    if folder is None:
        return None
    try:
        read: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return read


def statuses(sweep: Path, cells: int = 3) -> list[str | None]:
    """Of each cell; None of one without a result."""
    found = (result(cell_folder(sweep, number)) for number in range(cells))
    return [None if each is None else str(each["status"]) for each in found]


def steps_in_table(folder: Path | None, rank: int = 0) -> list[int]:
    """The steps of a rank that can be read; those of a line that is not whole do not count."""
    path = folder and folder / f"steps.rank{rank}.csv"
    if path is None or not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    whole = [dict(zip(rows[0], row, strict=True)) for row in rows[1:] if len(row) == len(rows[0])]
    return [int(row["step"]) for row in whole]


def steps_in_events(folder: Path | None) -> list[int]:
    """The steps that TensorBoard reads."""
    if folder is None or not list(folder.glob("events.out.tfevents.*")):
        return []
    board = EventAccumulator(str(folder))
    board.Reload()
    if "time/step_ms" not in board.Tags()["scalars"]:
        return []
    return [event.step for event in board.Scalars("time/step_ms")]


def snapshot(folder: Path) -> Snapshot:
    """Hash and time of change of every file."""
    return {
        str(path.relative_to(folder)): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mtime_ns,
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def finished(sweep: Path, cells: int = 3) -> dict[Path, Snapshot]:
    """The cells that have ended well, as they are now."""
    folders = [cell_folder(sweep, number) for number in range(cells)]
    good = [each for each in folders if (result(each) or {}).get("status") == "ok"]
    return {folder: snapshot(folder) for folder in good if folder is not None}


def lost(before: dict[Path, Snapshot]) -> int:
    """How many of these cells are not as they were."""
    return sum(snapshot(folder) != files for folder, files in before.items())


def seconds_between(first: Path, second: Path) -> float | None:
    """Between the changes of two files, by the file system's own clock; None if one is missing."""
    if not (first.exists() and second.exists()):
        return None
    return (second.stat().st_mtime_ns - first.stat().st_mtime_ns) / 1e9
