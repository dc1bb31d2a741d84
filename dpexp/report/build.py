"""A report's files, made from the results in its cells' folders alone."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from dpexp.files import write_whole
from dpexp.records import SCHEMA
from dpexp.report.boards import write_boards
from dpexp.report.cells import Run
from dpexp.report.content import Content, content_of
from dpexp.report.markdown import markdown
from dpexp.report.page import html_page
from dpexp.report.scaling import Cell
from dpexp.report.selection import boarded
from dpexp.report.waterfall import PARTS


def build(
    folder: Path,
    overrides: Sequence[str] | None = None,
    unwritten: Mapping[str, Run] | None = None,
) -> Report:
    """Write the report of a sweep, or of a single run, into its folder.

    Args:
        overrides: what the user typed, for the command that repeats the sweep; its
            ``multirun.yaml`` is asked first.
        unwritten: more results by folder name, whose ``run.json`` could not be written.

    Raises:
        OSError: the folder cannot be read.
    """
    content = content_of([folder], overrides, unwritten)
    single = (folder / "run.json").exists()
    return write(content, folder, boards=not single)


def write(content: Content, folder: Path, *, boards: bool = True) -> Report:
    """Write ``sweep.json``, ``summary.csv``, ``report.md``, ``report.html`` and the board.

    Each file is written whole or not at all. One that cannot be made does not keep the others from
    being written; the report says so.

    Args:
        folder: exists.
        boards: whether there is to be a TensorBoard run ``scaling``.
    """
    parts: dict[str, Callable[[], None]] = {
        "sweep.json": lambda: write_whole(folder / "sweep.json", _json(content)),
        "summary.csv": lambda: write_whole(folder / "summary.csv", _csv(content.cells)),
        "report.md": lambda: write_whole(folder / "report.md", markdown(content)),
        "report.html": lambda: write_whole(folder / "report.html", html_page(content)),
    }
    if boards:
        parts["scaling"] = lambda: write_boards(folder / "scaling", boarded(content.cells))
    problems, made = [], set()
    for name, make in parts.items():
        try:
            make()
            made.add(name)
        except Exception as problem:  # noqa: BLE001 - told; the other parts are wanted all the same
            why = problem.strerror if isinstance(problem, OSError) else None
            first = (why.lower() if why else f"{type(problem).__name__}: {problem}").partition(
                "\n"
            )[0]
            problems.append(f"{name} cannot be written: {first}")
    return Report(content, folder, tuple(problems), written=bool(made - {"scaling"}))


def _json(content: Content) -> str:
    plain = {
        "schema": SCHEMA,
        "command": content.command,
        "status": content.status,
        "environment": content.raw_environment,
        "cells": [asdict(cell) for cell in content.cells],
        "answers": content.answers,
        "warnings": content.warnings,
        "failures": [asdict(failure) for failure in content.failures],
        "resume": content.resume,
    }
    return json.dumps(plain, indent=2, allow_nan=False) + "\n"


def _csv(cells: Sequence[Cell]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [spec.name for spec in fields(Cell) if spec.name != "waterfall"]
    # What came to Cell later stands at the end: a reader may count on the places of the others.
    place = names.index("straggler") + 1
    first, later = names[:place], names[place:]
    writer.writerow([*first, *(f"lost_to_{part}_s" for part in PARTS), *later])
    for cell in cells:
        row = {name: getattr(cell, name) for name in names}
        row["notes"] = "; ".join(cell.notes)
        row["failures"] = "; ".join(cell.failures)
        row["folders"] = " ".join(cell.folders)
        lost = [None] * len(PARTS) if cell.waterfall is None else cell.waterfall.parts_s.values()
        writer.writerow([*(row[n] for n in first), *lost, *(row[n] for n in later)])
    return text.getvalue()


@dataclass(frozen=True)
class Report:
    """What was written."""

    content: Content
    folder: Path
    problems: tuple[str, ...]  # of parts that could not be written
    written: bool  # whether any part was
