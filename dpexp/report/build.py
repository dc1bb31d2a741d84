"""A sweep's files, made from the results in its cells' folders alone."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from dpexp.comparing import WITHIN
from dpexp.files import write_whole
from dpexp.records import SCHEMA, read_run
from dpexp.report.scaling import Cell, analyse
from dpexp.report.tables import markdown
from dpexp.report.waterfall import PARTS

_NUMBER = re.compile(r"(\d+)_")


def read_cells(folder: Path) -> dict[str, dict[str, Any]]:
    """``run.json`` of every cell of a sweep, by folder name, in the order of the sweep."""
    found = {path.parent.name: read_run(path) for path in folder.glob("*/run.json")}
    return dict(sorted(found.items(), key=lambda entry: _position(entry[0])))


def build(
    folder: Path, overrides: list[str], unwritten: Mapping[str, dict[str, Any]] | None = None
) -> list[Cell]:
    """Write ``sweep.json``, ``summary.csv``, ``report.md`` and the TensorBoard run ``scaling``.

    Args:
        overrides: what the user typed, for the command that repeats the sweep.
        unwritten: more results, by folder name, whose ``run.json`` could not be written.
    """
    runs = {**read_cells(folder), **(unwritten or {})}
    cells = analyse(runs)
    command = shlex.join(["python", "-m", "dpexp", "-m", *overrides])
    # A cell that was refused may not know the machine.
    known = [run for run in runs.values() if run["status"] == "ok"] or list(runs.values())
    environment: dict[str, Any] = known[0]["environment"] if known else {}
    plain = {
        "schema": SCHEMA,
        "command": command,
        "status": _status(cells),
        "environment": environment,
        "cells": [asdict(cell) for cell in cells],
    }
    write_whole(folder / "sweep.json", json.dumps(plain, indent=2, allow_nan=False) + "\n")
    write_whole(folder / "summary.csv", _csv(cells))
    write_whole(folder / "report.md", markdown(f"Sweep {folder.name}", cells, environment, command))
    _write_boards(folder / "scaling", cells)
    return cells


def _status(cells: list[Cell]) -> str:
    states = {cell.status for cell in cells} - {"skipped"}
    if "interrupted" in states:
        return "interrupted"
    return "ok" if states <= {"ok"} else "failed"


def _csv(cells: list[Cell]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [spec.name for spec in fields(Cell) if spec.name != "waterfall"]
    writer.writerow([*names, *(f"lost_to_{part}_s" for part in PARTS)])
    for cell in cells:
        row = asdict(cell)
        row["notes"] = "; ".join(cell.notes)
        row["failures"] = "; ".join(cell.failures)
        row["folders"] = " ".join(cell.folders)
        lost = [None] * len(PARTS) if cell.waterfall is None else cell.waterfall.parts_s.values()
        writer.writerow([*(row[name] for name in names), *lost])
    return text.getvalue()


def _write_boards(folder: Path, cells: list[Cell]) -> None:
    """TensorBoard runs whose x axis is the number of devices.

    One run; a sweep that also varies other keys gets one below it for each of their settings,
    since a curve over devices means something only where the rest is equal.
    """
    for old in folder.glob("**/events.out.tfevents.*"):
        old.unlink()  # two files in one run would be read as one zigzag
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.samples_per_s is not None:
            groups.setdefault(cell.setting, []).append(cell)
    for setting, members in groups.items():
        _write_board(folder / setting if len(groups) > 1 else folder, members)


def _write_board(folder: Path, cells: list[Cell]) -> None:
    writer = EventFileWriter(str(folder))
    for cell in sorted(cells, key=lambda cell: (cell.parallel, cell.num_devices or 0)):
        figures = {
            "samples_per_s": cell.samples_per_s,
            "speedup": cell.speedup,
            "efficiency": cell.efficiency,
        }
        if cell.speedup_scope != WITHIN:  # that of a single run does not know how runs differ
            figures |= {"speedup_low": cell.speedup_low, "speedup_high": cell.speedup_high}
        values = [
            Summary.Value(tag=f"scaling/{cell.parallel}/{name}", simple_value=value)
            for name, value in figures.items()
            if value is not None
        ]
        writer.add_event(Event(step=cell.num_devices or 0, summary=Summary(value=values)))
    writer.close()


def _position(name: str) -> tuple[int, str]:
    number = _NUMBER.match(name)
    return (int(number.group(1)) if number else 0, name)
