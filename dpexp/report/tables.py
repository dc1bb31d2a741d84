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

from dpexp.records import DP_PARTS, PHASES
from dpexp.report.parity import parity_line
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

# More than perfect scaling by so much is no scaling: the baseline was disturbed.
SUSPECT = 1.2


def cell_row(cell: Cell) -> tuple[str, ...]:
    """The texts of one row of the scaling table."""
    return (
        cell.folder.split("_")[0],
        cell.parallel + (" emulated" if cell.emulated else ""),
        _number(cell.num_devices, "d"),
        _number(cell.batch_global, "d"),
        _number(cell.batch_per_device, "d"),
        _number(cell.samples_per_s, ",.0f"),
        "–" if cell.step_p50_s is None else f"{cell.step_p50_s * 1e3:.3f}",
        _number(cell.speedup, ".2f", "×"),
        _number(cell.efficiency, ".0%"),
        cell.status,
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
    for line in (*settings(cells), *reasons(cells)):
        console.print(escape(line), soft_wrap=True, highlight=False)


def settings(cells: Sequence[Cell]) -> list[str]:
    """Which rows have which values of the keys that vary besides strategy and devices."""
    rows: dict[str, list[str]] = {}
    for cell in cells:
        if cell.setting:
            rows.setdefault(cell.setting, []).append(f"#{cell_row(cell)[0]}")
    return [f"{setting}: {', '.join(numbers)}" for setting, numbers in rows.items()]


def reasons(cells: Sequence[Cell]) -> list[str]:
    """One line per cell that gave no figure, or none that can be compared."""
    lines = []
    for cell in cells:
        if cell.status != "ok":
            lines.append(f"{cell.folder}: {cell.status}: {first_line(cell.reason)}")
        elif cell.reason is not None:
            lines.append(f"{cell.folder}: no speed-up: {first_line(cell.reason)}")
    failed = sum(cell.status == "failed" for cell in cells)
    if failed:
        lines.append(f"{failed} of {len(cells)} cells failed")
    if any(cell.status == "interrupted" for cell in cells):
        lines.append("the sweep was interrupted: cells after the last one have not run")
    if any(cell.efficiency is not None and cell.efficiency > SUSPECT for cell in cells):
        lines.append(
            f"an efficiency above {SUSPECT:.0%} says that the baseline was slowed down by "
            "something else; measure again on an idle machine, or with OMP_NUM_THREADS=1"
        )
    return lines


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


def print_run(run: dict[str, Any], folder: Path, console: Console) -> None:
    """A single run's summary: where the time of a step went."""
    timing = run.get("timing") or {}
    console.print(escape(_run_title(run)), soft_wrap=True, highlight=False)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("phase")
    for head in ("mean ms", "p50 ms", "p95 ms", "max ms"):
        table.add_column(head, justify="right")
    for phase in ("step", *PHASES):
        _phase_row(table, phase, timing.get(phase))
        if phase == "forward":
            for part in DP_PARTS:
                if part in timing:
                    _phase_row(table, f"  {part}", timing[part])
    console.print(table)
    console.print(escape(_run_summary(run)), soft_wrap=True, highlight=False)
    parity = parity_line(run)
    if parity is not None:
        console.print(escape(parity), soft_wrap=True, highlight=False)
    for line in pointers("folder", folder, folder):
        console.print(escape(line), soft_wrap=True, highlight=False)


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


def _phase_row(table: Table, name: str, summary: dict[str, Any] | None) -> None:
    if summary is None:
        return
    keys = ("mean_s", "p50_s", "p95_s", "max_s")
    cells = ("–" if summary[key] is None else f"{summary[key] * 1e3:.4f}" for key in keys)
    table.add_row(name, *cells)


def _run_title(run: dict[str, Any]) -> str:
    emulated = ", emulated" if run["emulated"] else ""
    steps = run["steps"]
    return (
        f"{run['label']} on {run['device']}{emulated}: {steps['measured']} measured steps "
        f"after {steps['warmup']} of warm-up"
    )


def _run_summary(run: dict[str, Any]) -> str:
    batch, throughput = run["batch"], run["throughput"]
    parts = [
        f"batch {batch['global']} rows, {batch['per_device']} per device",
        f"{_number(throughput['samples_per_s'], ',.0f')} samples/s over all devices",
        f"{run['samples_seen']} samples seen",
        f"peak memory {max(run['memory']['peak_bytes']) / 2**20:.0f} MiB per process",
    ]
    if run["loss"] is not None and run["loss"]["first"] is not None:
        parts.append(f"loss {run['loss']['first']:.4g} to {_number(run['loss']['last'], '.4g')}")
    if run["metric"] is not None:
        metric = run["metric"]
        figure = _number(metric["value"], ".6g")
        parts.append(f"{metric['name']} {figure} over {metric['samples']} samples")
    return "; ".join(parts)


def _number_of(folder: str) -> tuple[int, str]:
    """A cell's place in its sweep, which its folder's name begins with."""
    number = folder.partition("_")[0]
    return (int(number) if number.isdigit() else 0, folder)


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "–" if value is None else f"{value:{form}}{unit}"


def _cell_text(text: str) -> str:
    """Text that neither breaks a Markdown table nor is read as HTML."""
    flat = " ".join(text.split())
    return flat.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")
