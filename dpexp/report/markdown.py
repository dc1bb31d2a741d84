"""``report.md``. Every text of configs, models and errors is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from dpexp.report.content import PARITY_HEADER, Content
from dpexp.report.findings import Failure, MemoryPoint, ShapeRow
from dpexp.report.intervals import interval_lines
from dpexp.report.losses import LOSS_HEADER, loss_lines, loss_rows
from dpexp.report.numbers import count_of
from dpexp.report.selection import foremost
from dpexp.report.tables import HEADER, cell_row, scaling_title, settings, without_speedup
from dpexp.texts import first_line, visible

MOST = 100  # rows of a table, and lines of a list; the rest is only counted
LEGEND = (
    "Milliseconds of a mean step. `ideal` is the baseline's step, divided among the devices under "
    "strong scaling. `loss` is what the step takes more, and the parts add up to it: each is what "
    "the cell spends on it minus what the ideal one would. `overhead` is bookkeeping, and of "
    "emulated devices their backward in one thread; `residual` is what no part explains."
)
_FAILURE_HEADER = ("run", "end", "rank", "phase", "step", "why")
_MEMORY_HEADER = ("cell", "devices", "peak MiB", "of")
_SHAPES_HEADER = ("cell", "module", "replicas", "input", "output", "calls of each")
_MARKS = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "\\|", "`": "\\`", "*": "\\*", "~": "\\~"}
)
_PUNCTUATED = re.compile(r"\\(?=[!-/:-@\[-`{-~])")


def markdown(content: Content) -> str:
    """``report.md``, the answer first."""
    blocks = [
        f"# {escaped(content.title)}",
        *_answers(content),
        f"{escaped(scaling_title(content.cells))}.",
        *_cells(content),
        *_losses(content),
        *_section("Memory", _memory(content.memory)),
        *_section("Failed or skipped", _failures(content.failures)),
        *_section("Warnings", _list(content.warnings)),
        *_section("Parity", _table(PARITY_HEADER, content.parity, "run.json of the cells")),
        *_section("Shapes", _shapes(content)),
        *_section("Notes", _list(f"{folder}: {note}" for folder, note in content.notes)),
        *_section("Environment", _list(f"{key}: {value}" for key, value in content.environment)),
    ]
    for title, commands in (("Go on", content.resume), ("Again", content.command)):
        if commands:
            lines = commands.splitlines()
            blocks += [f"## {title}", "\n".join(f"    {visible(line)}" for line in lines)]
    return "\n\n".join(blocks) + "\n"


def escaped(text: str) -> str:
    """`text` in one line, which neither breaks a table nor is read as Markdown or HTML."""
    flat = " ".join(text.split())
    plain = "".join(each if each.isprintable() else "�" for each in flat)
    return _PUNCTUATED.sub(r"\\\\", plain).translate(_MARKS).replace("](", "]\\(")


def _answers(content: Content) -> Iterator[str]:
    yield f"**{escaped(content.answers[0])}**"
    if content.answers[1:]:
        yield "\n".join(f"- {escaped(line)}" for line in content.answers[1:])


def _cells(content: Content) -> Iterator[str]:
    shown = foremost(content.cells, MOST)
    if not shown:
        return
    yield _joined(HEADER, [cell_row(cell) for cell in shown])
    yield from _more(len(content.cells) - len(shown), "cell", "summary.csv")
    lines = [*settings(shown), *interval_lines(shown), *without_speedup(content.cells)]
    yield from _list(lines)


def _losses(content: Content) -> Iterator[str]:
    rows = loss_rows(foremost(content.cells, MOST))
    if not rows:
        return
    yield "## Where the time went"
    yield LEGEND
    yield from _table(LOSS_HEADER, rows, "summary.csv")
    yield from _list(loss_lines(foremost(content.cells, MOST)))


def _failures(failures: Sequence[Failure]) -> Iterator[str]:
    rows = [
        (
            each.folder,
            each.status if each.kind is None else f"{each.status} ({each.kind})",
            *("–" if value is None else str(value) for value in (each.rank, each.phase, each.step)),
            first_line(each.message),
        )
        for each in failures
    ]
    yield from _table(_FAILURE_HEADER, rows, "sweep.json")


def _shapes(content: Content) -> Iterator[str]:
    """A row for the replicas of a cell that saw the same shapes equally often."""
    replicas: dict[ShapeRow, list[str]] = {}
    for row in content.shapes:
        replicas.setdefault(replace(row, replica=0), []).append(str(row.replica))
    rows = [
        (row.folder, row.module or "the model", ", ".join(same), row.input_shape, row.output_shape,
         f"{row.count:,}")
        for row, same in replicas.items()
    ]  # fmt: skip
    yield from _table(_SHAPES_HEADER, rows, "shapes.csv of the cells")
    yield from _more(content.shapes_left, "cell", "their shapes.csv")


def _section(title: str, body: Iterable[str]) -> list[str]:
    blocks = list(body)
    return [f"## {title}", *blocks] if blocks else []


def _list(lines: Iterable[str]) -> Iterator[str]:
    every = list(lines)
    if every:
        yield "\n".join(f"- {escaped(line)}" for line in every[:MOST])
        yield from _more(len(every) - MOST, "line", "sweep.json")


def _memory(points: Sequence[MemoryPoint]) -> Iterator[str]:
    rows = []
    for point in points:
        peak = "not known" if point.peak_bytes is None else f"{point.peak_bytes / 2**20:,.0f}"
        told = f"{peak}, ran out of memory" if point.out_of_memory else peak
        rows.append(
            (point.folder, str(point.num_devices), told, f"the {point.scope} with the most")
        )
    yield from _table(_MEMORY_HEADER, rows, "summary.csv")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], rest: str) -> Iterator[str]:
    if rows:
        yield _joined(header, rows[:MOST])
        yield from _more(len(rows) - MOST, "row", rest)


def _joined(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(map(escaped, row)) + " |" for row in rows]
    return "\n".join(lines)


def _more(left: int, what: str, where: str) -> Iterator[str]:
    if left > 0:
        yield f"and {count_of(left, f'more {what}')} in {where}"
