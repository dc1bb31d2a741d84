"""All that a report says, as plain data: no Markdown, no HTML, no figure.

The files of a report, its page and the console are made from it.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpexp.report.answers import answers_of, best_of
from dpexp.report.cells import Run
from dpexp.report.findings import (
    BREAKDOWN_PARTS,
    CUT_OFF,
    UNREADABLE,
    Breakdown,
    Failure,
    MemoryPoint,
    ShapeRow,
    breakdowns_of,
    failures_of,
    memory_of,
    parity_of,
)
from dpexp.report.reading import Source, read_sources
from dpexp.report.remarks import environment_of, notes_of, warnings_of
from dpexp.report.scaling import Cell, analyse
from dpexp.report.selection import foremost

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
# Of so many cells the shapes are in the report, and of each so many rows.
SHAPES_OF_CELLS = 24
SHAPES_OF_A_CELL = 64
# What comes of a result whose parts are not of the types and names that they should have.
MALFORMED = (AttributeError, LookupError, TypeError, ValueError, ArithmeticError)


@dataclass(frozen=True)
class Content:
    """What a report says of one sweep or of several. Every text is as it was found: not escaped.

    With several sweeps the names of folders begin with that of their sweep.
    """

    title: str  # "Sweep <folder>", "Run <folder>" or "3 sweeps and runs"
    answers: tuple[str, ...]  # the answer in one sentence, then one per setting, then caveats
    command: str  # what repeats it, quoted for a shell; a line per sweep; "" where it is not known
    status: str  # ok | failed | interrupted
    cells: tuple[Cell, ...]
    breakdowns: tuple[Breakdown, ...]
    memory: tuple[MemoryPoint, ...]
    shapes: tuple[ShapeRow, ...]
    shapes_left: int  # cells whose shapes are, in part or all, only in their shapes.csv
    failures: tuple[Failure, ...]
    parity: tuple[tuple[str, ...], ...]  # columns: PARITY_HEADER
    warnings: tuple[str, ...]  # each with the cells it is about
    environment: tuple[tuple[str, str], ...]  # name, value
    notes: tuple[tuple[str, str], ...]  # the folders of the cells it is of, note
    raw_environment: Mapping[str, Any]  # of a cell that ran, as its run.json has it
    best: str | None = None  # the folder of the cell that scales best, as far as it can be believed
    resume: str = ""  # what goes on with a sweep that is not done, as `command`


def content_of(
    folders: Sequence[Path],
    overrides: Sequence[str] | None = None,
    unwritten: Mapping[str, Run] | None = None,
) -> Content:
    """Read sweeps, or single runs, and say what a report says of them.

    Each sweep is compared within itself; all single runs count as one sweep.

    Args:
        overrides: what the user typed, for a sweep whose folder does not say it.
        unwritten: of a single sweep, more results by folder name, whose ``run.json`` could not be
            written.

    Raises:
        OSError: one of the folders cannot be read. A result that cannot is a failure in the report.
    """
    sources = read_sources(folders, overrides, unwritten or {})
    try:
        return _content(sources)
    except MALFORMED:
        sound = [_without_malformed(source) for source in sources]
        if sound == sources:  # it is not one result's fault
            raise
        return _content(sound)


def _without_malformed(source: Source) -> Source:
    """`source` without the results that make a report fail: those are unreadable."""
    bad: dict[str, str] = {}
    for name, run in source.runs.items():
        try:
            _content([replace(source, runs={name: run}, unreadable={})])
        except MALFORMED as problem:
            bad[name] = f"run.json is not as it should be: {type(problem).__name__}: {problem}"
    runs = {name: run for name, run in source.runs.items() if name not in bad}
    return replace(source, runs=runs, unreadable={**source.unreadable, **bad})


def _content(sources: Sequence[Source]) -> Content:
    alone = len(sources) == 1
    runs: dict[str, Run] = {}
    cells: list[Cell] = []
    failures: list[Failure] = []
    places: dict[str, Path] = {}
    for name, members in _sweeps(sources):
        prefix = "" if alone or not name else f"{name}/"
        own, where = _gathered(members, prefix)
        found = analyse(own)
        if prefix:  # curves of two sweeps are not one
            found = [replace(cell, setting=f"{prefix}{cell.setting}".rstrip("/")) for cell in found]
        places |= where
        runs |= own
        cells += found
        failures += failures_of(found, own)
        failures += [
            _without_result(_named(each, folder, prefix), status, why)
            for each in members
            for status, lost in ((UNREADABLE, each.unreadable), (CUT_OFF, each.cut_off))
            for folder, why in lost.items()
        ]
    shapes, left, unread = _shapes(cells, places)
    best = best_of(cells, runs)
    missing = sum(source.missing for source in sources)
    cut_off = sum(len(source.cut_off) for source in sources)
    return Content(
        title=_title(sources),
        answers=answers_of(cells, runs, failures, missing, cut_off),
        command="\n".join(dict.fromkeys(each.command for each in sources if each.command)),
        status=_status(cells, failures, missing + cut_off),
        cells=tuple(cells),
        breakdowns=tuple(breakdowns_of(cells, runs)),
        memory=tuple(memory_of(cells, runs)),
        shapes=tuple(shapes),
        shapes_left=left,
        failures=tuple(failures),
        parity=tuple(parity_of(cells, runs)),
        warnings=(*warnings_of(cells, runs), *unread),
        environment=environment_of(runs),
        notes=notes_of(cells, runs),
        raw_environment=_environment(runs),
        best=None if best is None else best.folder,
        resume="\n".join(source.resume for source in sources if source.resume),
    )


def _sweeps(sources: Sequence[Source]) -> Iterator[tuple[str, list[Source]]]:
    """What is compared within itself, with its name; single runs are compared with one another."""
    for source in sources:
        if not source.single:
            yield source.name, [source]
    runs = [source for source in sources if source.single]
    if runs:
        yield "", runs


def _gathered(sources: Sequence[Source], prefix: str) -> tuple[dict[str, Run], dict[str, Path]]:
    """The runs of what is compared within itself, and where each lies."""
    runs: dict[str, Run] = {}
    places: dict[str, Path] = {}
    for source in sources:
        for folder, run in source.runs.items():
            name = _named(source, folder, prefix)
            runs[name] = run
            places[name] = source.folder if source.single else source.folder / folder
    return runs, places


def _named(source: Source, folder: str, prefix: str) -> str:
    return source.name if source.single else f"{prefix}{folder}"


def _title(sources: Sequence[Source]) -> str:
    if len(sources) != 1:
        return f"{len(sources)} sweeps and runs"
    return f"{'Run' if sources[0].single else 'Sweep'} {sources[0].folder.absolute().name}"


def _status(cells: Sequence[Cell], failures: Sequence[Failure], without_end: int) -> str:
    states = {cell.status for cell in cells} - {"skipped"}
    if "interrupted" in states or without_end:
        return "interrupted"
    lost = any(each.status == UNREADABLE for each in failures)
    return "ok" if states <= {"ok"} and not lost else "failed"


def _without_result(folder: str, status: str, why: str) -> Failure:
    label = folder.rpartition("/")[2].partition("_")[2].replace("_", "-")
    return Failure(folder, label or folder, status, None, None, None, None, why, None)


def _environment(runs: Mapping[str, Run]) -> Mapping[str, Any]:
    # A cell that was refused may not know the machine.
    known = [run for run in runs.values() if run["status"] == "ok"] or list(runs.values())
    return known[0]["environment"] or {} if known else {}


def _shapes(
    cells: Sequence[Cell], places: Mapping[str, Path]
) -> tuple[list[ShapeRow], int, list[str]]:
    """The shapes of the cells that come first, of how many some are left out, and warnings."""
    known = [cell for cell in cells if (places[cell.folder] / "shapes.csv").exists()]
    shown = foremost(known, SHAPES_OF_CELLS)
    rows: list[ShapeRow] = []
    left, warnings = len(known) - len(shown), []
    for cell in shown:
        try:
            own = list(_rows(cell, places[cell.folder] / "shapes.csv"))
        except (OSError, csv.Error) as problem:
            warnings.append(f"shapes.csv of {cell.folder} cannot be read: {problem}")
            continue
        rows += own[:SHAPES_OF_A_CELL]
        left += len(own) > SHAPES_OF_A_CELL
    return rows, left, warnings


def _rows(cell: Cell, path: Path) -> Iterator[ShapeRow]:
    """What a ``shapes.csv`` says; a row that is cut off is left out."""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        for row in csv.DictReader(file):
            replica, calls = row.get("replica") or "", row.get("count") or ""
            if replica.isdecimal() and calls.isdecimal():
                texts = [row.get(key) or "" for key in ("module", "input_shape", "output_shape")]
                module, taken, given = texts
                yield ShapeRow(
                    cell.folder, cell.label, module, int(replica), taken, given, int(calls)
                )
