"""``report.html``: all that a report says in one file that needs no network and no script."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from dpexp.report.colors import variables
from dpexp.report.content import PARITY_HEADER, Content
from dpexp.report.findings import Breakdown, Failure, ShapeRow
from dpexp.report.intervals import interval_lines
from dpexp.report.markup import without_addresses
from dpexp.report.pictures import (
    breakdown_pictures,
    memory_pictures,
    scaling_pictures,
    shown_breakdowns,
    shown_settings,
)
from dpexp.report.selection import foremost
from dpexp.report.tables import HEADER, cell_row, scaling_title, without_speedup
from dpexp.report.waterfall import shown
from dpexp.texts import visible

MOST_ROWS = 200  # of a table
MOST_LINES = 100  # of a list
MOST_FAILURES = 50
MOST_TEXT = 6000  # characters of a message or a traceback: of a longer one, its last ones
_GOOD, _BAD = ("ok", "pass"), ("failed", "fail", "unreadable", "cut off")
MARKS = {**dict.fromkeys(_GOOD, "✓"), **dict.fromkeys(_BAD, "✗")}
TONES = {**dict.fromkeys(_GOOD, "good"), **dict.fromkeys(_BAD, "bad")}


@dataclass(frozen=True)
class Table:
    """A table of the page. Rows that are left out are counted."""

    caption: str
    heads: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    left: int = 0
    names: int = 1  # how many columns hold names; the others hold figures


def html_page(content: Content) -> str:
    """The page of a report, as one HTML file.

    Whatever is long is cut, and says how much is left out and where it is to be found.
    """
    environment = Environment(
        loader=PackageLoader("dpexp.report"),
        autoescape=True,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.globals |= {"tone": _tone, "mark": _mark}
    environment.filters["unbroken"] = _unbroken
    return without_addresses(environment.get_template("report.html.j2").render(_view(content)))


def _view(content: Content) -> dict[str, Any]:
    """What the template shows, by the names it uses."""
    skipped = [failure for failure in content.failures if failure.status == "skipped"]
    failed = [failure for failure in content.failures if failure.status != "skipped"]
    return {
        "content": content,
        "light": [(name, shade.light) for name, shade in variables().items()],
        "dark": [(name, shade.dark) for name, shade in variables().items()],
        "scaling_title": scaling_title(content.cells),
        "cells": _cells_table(content),
        "remarks": _remarks(content)[:MOST_LINES],
        "settings": _settings_line(content),
        "scaling": scaling_pictures(content),
        "time": breakdown_pictures(content),
        "bars": _bars_line(content),
        "parts": _parts_table(content.breakdowns),
        "memory": memory_pictures(content),
        "shapes": _shapes_table(content),
        "parity": Table("Parity", PARITY_HEADER, *_cut(content.parity), names=6),
        "failures": [(failure, _where(failure)) for failure in failed[:MOST_FAILURES]],
        "failures_left": max(0, len(failed) - MOST_FAILURES),
        "failed": len(failed),
        "skipped": skipped[:MOST_LINES],
        "skipped_left": max(0, len(skipped) - MOST_LINES),
        "notes": content.notes[:MOST_LINES],
        "notes_left": max(0, len(content.notes) - MOST_LINES),
        "warnings": content.warnings[:MOST_LINES],
        "warnings_left": max(0, len(content.warnings) - MOST_LINES),
        "environment": Table("Environment", ("name", "value"), content.environment, names=2),
        "ending": _ending,
    }


def _printable(value: Any) -> Any:
    """Every value that the template shows passes through here, before it is escaped."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return visible(value)
    return value


def _unbroken(sentence: str) -> Markup:
    """The sentence, escaped; ``(1.9–2.1)`` and ``85 %`` in it stay on one line each."""
    escaped = str(escape(visible(sentence)))
    figures = r"\([\d.,]+–[\d.,]+\)|[\d.,]+ %"
    return Markup(re.sub(figures, r'<span class="whole">\g<0></span>', escaped))


def _tone(status: str) -> str:
    """The class of a status: its colour, which never stands alone."""
    return TONES.get(_last_word(status), "caution")


def _mark(status: str) -> str:
    return MARKS.get(_last_word(status), "–")


def _last_word(status: str) -> str:
    """``ok`` of ``3 ok``; but all of ``2 of 3 ok``, which is not well."""
    return status if " of " in status else status.rpartition(" ")[2]


def _ending(text: str) -> str:
    """The text, or its end where it is long: a traceback tells most there."""
    if len(text) <= MOST_TEXT:
        return text
    return (
        f"[{len(text) - MOST_TEXT:,} characters left out; run.json has them]\n"
        + (text[-MOST_TEXT:])
    )


def _cut(rows: Sequence[Any]) -> tuple[Sequence[Any], int]:
    return rows[:MOST_ROWS], max(0, len(rows) - MOST_ROWS)


def _cells_table(content: Content) -> Table:
    cells = foremost(content.cells, MOST_ROWS)
    several = len({cell.setting for cell in content.cells}) > 1
    heads = ("cell", *(("setting",) if several else ()), *HEADER[1:])
    rows = [
        (cell.folder, *((cell.setting,) if several else ()), *cell_row(cell)[1:]) for cell in cells
    ]
    left = len(content.cells) - len(cells)
    return Table("Cells", heads, rows, left, names=3 if several else 2)


def _parts_table(breakdowns: Sequence[Breakdown]) -> Table:
    """Milliseconds; the last columns add up to the step."""
    shown_rows, left = _cut(breakdowns)
    parts = list(breakdowns[0].parts_s) if breakdowns else []
    rows = [
        (
            f"{each.folder}{' emulated' * each.emulated}",
            *(f"{part_s * 1e3:.3f}" for part_s in (each.step_s, *each.parts_s.values())),
        )
        for each in shown_rows
    ]
    heads = ("cell", "step", *map(shown, parts))
    return Table("Milliseconds of a mean step", heads, rows, left)


def _shapes_table(content: Content) -> Table:
    """A row for the replicas of a cell that saw the same shapes equally often."""
    replicas: dict[ShapeRow, list[str]] = {}
    for row in content.shapes:
        replicas.setdefault(replace(row, replica=0), []).append(str(row.replica))
    rows, left = _cut(list(replicas.items()))
    heads = ("cell", "module", "replicas", "input", "output", "calls of each")
    texts = [
        (
            row.folder,
            row.module or "the model",
            ", ".join(same),
            row.input_shape,
            row.output_shape,
            f"{row.count:,}",
        )
        for row, same in rows
    ]
    return Table("Shapes", heads, texts, left, names=5)


def _where(failure: Failure) -> str:
    """Which kind of failure, where and when, as far as it is known."""
    known = (
        (failure.kind, "{}"),
        (failure.rank, "rank {}"),
        (failure.phase, "in {}"),
        (failure.step, "step {}"),
    )
    return ", ".join(form.format(value) for value, form in known if value is not None)


def _remarks(content: Content) -> list[str]:
    """What is to be said of the table of cells."""
    intervals = interval_lines(foremost(content.cells, MOST_ROWS))
    return [*intervals, *without_speedup(content.cells)]


def _settings_line(content: Content) -> str:
    """Which settings have figures, where not all have them."""
    every = len({cell.setting for cell in content.cells})
    settings = shown_settings(content.cells)
    if every <= len(settings):
        return ""
    return (
        f"Figures show the {len(settings)} of {every} settings that scale best; summary.csv has "
        "them all."
    )


def _bars_line(content: Content) -> str:
    """How many cells have a bar, where not all have one."""
    bars, every = len(shown_breakdowns(content)), len(content.breakdowns)
    return "" if bars == every else f"The figure shows {bars} of {every} cells with timings."
