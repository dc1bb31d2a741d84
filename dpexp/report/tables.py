"""Tables for the console and for Markdown."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dpexp.report.intervals import interval_lines, with_interval
from dpexp.report.losses import loss_lines, loss_table
from dpexp.report.scaling import Cell

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

LEGEND = (
    "Milliseconds of a mean step. `ideal` is the baseline's step, divided among the devices under "
    "strong scaling. `loss` is what the step takes more, and the parts add up to it: each is what "
    "the cell spends on it minus what the ideal one would. `overhead` is bookkeeping, and of "
    "emulated devices their backward in one thread; `residual` is what no part explains.",
)
# More than perfect scaling by so much is no scaling: the baseline was disturbed.
SUSPECT = 1.2


def cell_row(cell: Cell) -> tuple[str, ...]:
    """The texts of one row of the scaling table."""
    return (
        cell.folder.split("_")[0],
        cell.parallel + (" emulated" if cell.emulated else ""),
        number(cell.num_devices, "d"),
        number(cell.batch_global, "d"),
        number(cell.batch_per_device, "d"),
        number(cell.samples_per_s, ",.0f"),
        "–" if cell.step_p50_s is None else f"{cell.step_p50_s * 1e3:.3f}",
        with_interval(cell),
        number(cell.efficiency, ".0%"),
        _status(cell),
    )


def scaling_title(cells: Sequence[Cell]) -> str:
    """What the table shows: the scaling mode and what the speed-up refers to.

    ``batch`` is global, ``each`` per device, ``ms/step`` the median of the slowest rank's steps.
    """
    modes = " and ".join(sorted({cell.scaling for cell in cells if cell.scaling})) or "no"
    bases = sorted({cell.baseline for cell in cells if cell.baseline}, key=_number_of)
    shown = ", ".join(bases) if bases else "no cell that ran"
    return f"{modes} scaling; speed-up against {shown}"


def print_scaling(cells: Sequence[Cell], console: Console) -> None:
    """The scaling table, then what failed or was skipped, with reasons."""
    console.print(escape(scaling_title(cells)), soft_wrap=True, highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for index, head in enumerate(HEADER):
        table.add_column(head, justify="right" if 2 <= index <= 8 else "left", no_wrap=True)
    for cell in cells:
        table.add_row(*(escape(text) for text in cell_row(cell)))
    console.print(table)
    for line in (
        *settings(cells),
        *loss_lines(cells),
        *interval_lines(cells),
        *checked(cells),
        *reasons(cells),
    ):
        console.print(escape(line), soft_wrap=True, highlight=False)


def settings(cells: Sequence[Cell]) -> list[str]:
    """Which rows have which values of the keys that vary besides strategy and devices."""
    rows: dict[str, list[str]] = {}
    for cell in cells:
        if cell.setting:
            rows.setdefault(cell.setting, []).append(f"#{cell_row(cell)[0]}")
    return [f"{setting}: {', '.join(numbers)}" for setting, numbers in rows.items()]


def reasons(cells: Sequence[Cell]) -> list[str]:
    """One line per cell that gave no figure, and per repeat that did not end well."""
    lines: list[str] = []
    for cell in cells:
        if cell.failures:
            lines.extend(first_line(failure) for failure in cell.failures)
        elif cell.status != "ok":
            lines.append(f"{cell.folder}: {cell.status}: {first_line(cell.reason)}")
        elif cell.reason is not None:
            lines.append(f"{cell.folder}: no speed-up: {first_line(cell.reason)}")
    failed = sum(cell.status == "failed" for cell in cells)
    if failed:
        some = " (or some of their repeats)" if any(cell.failures for cell in cells) else ""
        lines.append(f"{failed} of {len(cells)} cells failed{some}")
    if any(cell.status == "interrupted" for cell in cells):
        lines.append("the sweep was interrupted: cells after the last one have not run")
    if any(cell.efficiency is not None and cell.efficiency > SUSPECT for cell in cells):
        lines.append(
            f"an efficiency above {SUSPECT:.0%} says that the baseline was slowed down by "
            "something else; measure again on an idle machine, or with OMP_NUM_THREADS=1"
        )
    return lines


def checked(cells: Sequence[Cell]) -> list[str]:
    """Which cells' first steps are those of a single device."""
    passed = [cell.folder for cell in cells if cell.parity == "pass"]
    if not passed:
        return []
    return [f"parity: the first steps are those of a single device in {', '.join(passed)}"]


def wide(console: Console) -> Console:
    """A console that cuts nothing where nobody sets a width: a pipe or a file."""
    if console.is_terminal:
        return console
    return Console(file=console.file, width=max(console.width, 120))


def first_line(text: str | None) -> str:
    """The first line of a message, or a word for none."""
    return (text or "").partition("\n")[0] or "no reason recorded"


def markdown(title: str, cells: Sequence[Cell], environment: dict[str, Any], command: str) -> str:
    """``report.md``."""
    lines = [f"# {title}", "", scaling_title(cells) + ".", ""]
    lines += ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    lines += [
        "| " + " | ".join(_cell_text(text) for text in cell_row(cell)) + " |" for cell in cells
    ]
    for line in settings(cells):
        lines += ["", _cell_text(line)]
    for line in interval_lines(cells):
        lines += ["", _cell_text(line)]
    for line in checked(cells):
        lines += ["", _cell_text(line)]
    lost = loss_table(cells)
    if lost:
        lines += ["", "## Where the time went", "", *LEGEND, ""]
        lines += [*lost, "", *(f"- {_cell_text(line)}" for line in loss_lines(cells))]
    bad = reasons(cells)
    if bad:
        lines += ["", "## Remarks on cells", "", *(f"- {_cell_text(line)}" for line in bad)]
    notes = list(dict.fromkeys(f"{cell.folder}: {note}" for cell in cells for note in cell.notes))
    if any(cell.emulated for cell in cells):
        notes.insert(
            0,
            "dp ran on virtual devices that share the CPU (emulated): its times show what "
            "dp's four steps cost, not what several GPUs would give",
        )
    if notes:
        lines += ["", "## Notes", "", *(f"- {_cell_text(note)}" for note in notes)]
    lines += ["", "## Environment", ""]
    variables = environment.get("variables") or {}
    shown = {k: v for k, v in environment.items() if k != "variables"}
    shown |= {name: value for name, value in variables.items() if value is not None}
    lines += [f"- {key}: {_cell_text(str(value))}" for key, value in shown.items()]
    lines += ["", "## Again", "", f"    {command}", ""]
    return "\n".join(lines)


def pointers(what: str, path: Path, board: Path) -> list[str]:
    """Where to look next: a path and a command that can be pasted from this folder."""
    beside = Path(sys.executable).parent / "tensorboard"
    command = "tensorboard" if shutil.which("tensorboard") else shlex.quote(str(_near(beside)))
    return [
        f"{what}: {_near(path)}",
        f"look:   {command} --logdir {shlex.quote(str(_near(board)))}",
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


def _cell_text(text: str) -> str:
    """Text that neither breaks a Markdown table nor is read as HTML."""
    flat = " ".join(text.split())
    return flat.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")
