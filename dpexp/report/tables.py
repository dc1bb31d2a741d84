"""Tables for the console, and texts that are in Markdown too."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dpexp.report.content import Content
from dpexp.report.findings import Failure
from dpexp.report.intervals import interval_lines, with_interval
from dpexp.report.losses import loss_lines
from dpexp.report.numbers import count_of, significant
from dpexp.report.scaling import Cell
from dpexp.report.selection import foremost, named
from dpexp.texts import first_line, visible

HEADER = (
    "#",
    "parallel",
    "dev.",
    "batch",
    "each",
    "samples/s",
    "ms/step",
    "speedup",
    "eff.",
    "status",
)

MOST_ROWS = 40  # on the console
MOST_LINES = 12  # of each kind below the table


def cell_row(cell: Cell) -> tuple[str, ...]:
    """The texts of one row of the scaling table."""
    return (
        number_in(cell.folder),
        cell.parallel + (" emulated" if cell.emulated else ""),
        number(cell.num_devices, "d"),
        number(cell.batch_global, "d"),
        number(cell.batch_per_device, "d"),
        "–" if cell.samples_per_s is None else significant(cell.samples_per_s),
        "–" if cell.step_p50_s is None else significant(cell.step_p50_s * 1e3),
        with_interval(cell),
        number(cell.efficiency, ".0%"),
        _status(cell),
    )


def number_in(folder: str) -> str:
    """A cell's number in its sweep: ``3`` of ``3_ddp_n2``."""
    sweep, slash, name = folder.rpartition("/")
    return sweep + slash + name.partition("_")[0]


def scaling_title(cells: Sequence[Cell]) -> str:
    """What the table shows: the scaling mode and what the speed-up refers to.

    ``batch`` is global, ``each`` per device, ``ms/step`` the median of the slowest rank's steps.
    """
    modes = " and ".join(sorted({cell.scaling for cell in cells if cell.scaling})) or "no"
    bases = sorted({cell.baseline for cell in cells if cell.baseline}, key=_number_of)
    shown = named(bases) if bases else "no cell that ran"
    return f"{modes} scaling; speed-up against {shown}"


def print_report(content: Content, console: Console) -> None:
    """The answer, the scaling table, what it says, and what failed or was skipped with reasons."""

    def line(text: str) -> None:
        console.print(escape(visible(text)), soft_wrap=True, highlight=False)

    for text in content.answers:
        line(text)
    line("")
    shown = foremost(content.cells, MOST_ROWS)
    line(scaling_title(content.cells))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for index, head in enumerate(HEADER):
        table.add_column(head, justify="right" if 2 <= index <= 8 else "left", no_wrap=True)
    for cell in shown:
        table.add_row(*(escape(visible(text)) for text in cell_row(cell)))
    console.print(table)
    if len(shown) < len(content.cells):
        line(f"and {count_of(len(content.cells) - len(shown), 'more cell')} in summary.csv")
    for lines in (
        settings(shown),
        loss_lines(shown),
        interval_lines(shown),
        checked(content.cells),
        without_speedup(content.cells),
        reasons(content.failures),
        content.warnings,
    ):
        for text in lines[:MOST_LINES]:
            line(text)
        if len(lines) > MOST_LINES:
            line(f"and {count_of(len(lines) - MOST_LINES, 'more line')} of this kind in report.md")
    for command in content.resume.splitlines():
        line(f"to go on: {command}")


def show(
    content: Content,
    folder: Path,
    problems: Sequence[str] = (),
    *,
    written: bool = True,
    board: bool = True,
) -> None:
    """Print a report in short on stdout, and where its files are; on stderr what is missing.

    Args:
        problems: of the files that could not be written.
        written: whether any was.
        board: whether there is a TensorBoard run.
    """
    console, errors = Console(), Console(stderr=True)
    print_report(content, wide(console))
    if written:
        page = folder / "report.html"
        path = page if page.exists() else folder / "report.md"
        for line in pointers("report", path, folder if board else None):
            console.print(escape(visible(line)), soft_wrap=True, highlight=False)
    else:
        reason = problems[0].partition(": ")[2]
        problems = [f"the report cannot be written to {folder}: {reason}"]
    for problem in problems:
        errors.print(escape(visible(f"dpexp: {problem}")), soft_wrap=True, highlight=False)


def settings(cells: Sequence[Cell]) -> list[str]:
    """Which rows have which values of the keys that vary besides strategy and devices."""
    rows: dict[str, list[str]] = {}
    for cell in cells:
        if cell.setting and not cell.folder.startswith(f"{cell.setting}/"):  # else it says that
            rows.setdefault(cell.setting, []).append(f"#{number_in(cell.folder)}")
    return [f"{setting}: {named(numbers, 12)}" for setting, numbers in rows.items()]


def reasons(failures: Sequence[Failure]) -> list[str]:
    """One line per run that did not end well."""
    return [f"{each.folder}: {_end(each)}: {_reason(each.message)}" for each in failures]


def without_speedup(cells: Sequence[Cell]) -> list[str]:
    """One line per cell that ended well, and has no speed-up for a reason."""
    return [
        f"{cell.folder}: no speed-up: {_reason(cell.reason)}"
        for cell in cells
        if cell.status == "ok" and cell.reason is not None
    ]


def checked(cells: Sequence[Cell]) -> list[str]:
    """Which cells' first steps are those of a single device."""
    passed = [cell.folder for cell in cells if cell.parity == "pass"]
    if not passed:
        return []
    return [f"parity: the first steps are those of a single device in {named(passed)}"]


def _end(failure: Failure) -> str:
    """The status with kind, rank, phase and step, as far as they are known."""
    where = [
        f"{name} {value}"
        for name, value in (("rank", failure.rank), ("step", failure.step))
        if value is not None
    ]
    kind = [failure.kind] if failure.kind and failure.status != "skipped" else []
    phase = [f"in {failure.phase}"] if failure.phase else []
    told = ", ".join([*kind, *where, *phase])
    return f"{failure.status} ({told})" if told else failure.status


def wide(console: Console) -> Console:
    """A console that cuts nothing where nobody sets a width: a pipe or a file."""
    if console.is_terminal:
        return console
    return Console(file=console.file, width=max(console.width, 120))


def _reason(text: str | None) -> str:
    """The first line of a message, or a word for none."""
    return first_line(text or "") or "no reason recorded"


def pointers(what: str, path: Path, board: Path | None) -> list[str]:
    """Where to look next: a path and a command that can be pasted from this folder."""
    if board is None:
        return [f"{what}: {_near(path)}"]
    found = shutil.which("python")
    same = found is not None and Path(found).parent == Path(sys.executable).parent
    python = "python" if same else shlex.quote(str(_near(Path(sys.executable))))
    return [
        f"{what}: {_near(path)}",
        f"look:   {python} -m dpexp.board {shlex.quote(str(_near(board)))}",
    ]


def _near(path: Path) -> Path:
    """The path from here, where it lies below."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _status(cell: Cell) -> str:
    """The status; of a cell with repeats how many of them ended well."""
    if len(cell.folders) < 2 or not cell.repeats:
        return f"failed ({cell.kind})" if cell.status == "failed" and cell.kind else cell.status
    whole = cell.repeats == len(cell.folders)
    return f"{cell.repeats} ok" if whole else f"{cell.repeats} of {len(cell.folders)} ok"


def _number_of(folder: str) -> tuple[int, str]:
    """A cell's place in its sweep, which its folder's name begins with."""
    number = folder.partition("_")[0]
    return (int(number) if number.isdigit() else 0, folder)


def number(value: float | None, form: str, unit: str = "") -> str:
    """A figure as text, a dash for none."""
    return "–" if value is None else f"{value:{form}}{unit}"
