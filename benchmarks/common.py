"""Taking turns, medians, and the table."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Pair:
    """One comparison: dpexp against a reference, and what it has to reach.

    Args:
        limit: of dpexp / reference, or of dpexp - reference when `difference` is set.
    """

    name: str
    unit: str
    ours: list[float]
    reference: list[float]
    limit: float
    difference: bool = False

    @property
    def outcome(self) -> float:
        """Ratio or difference of the medians."""
        ours, reference = statistics.median(self.ours), statistics.median(self.reference)
        return ours - reference if self.difference else ours / reference


def rounds(default: int) -> int:
    """``--rounds`` from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=default, help="turns of each side")
    return int(parser.parse_args().rounds)


def alternate(
    count: int, ours: Callable[[], float], reference: Callable[[], float]
) -> tuple[list[float], list[float]]:
    """Measure both sides in turns, the order swapped each time."""
    mine: list[float] = []
    other: list[float] = []
    for turn in range(count):
        sides = [(ours, mine), (reference, other)]
        for measure, results in sides if turn % 2 == 0 else reversed(sides):
            results.append(measure())
    return mine, other


def run_dpexp(*overrides: str) -> dict[str, Any]:
    """``run.json`` of one `python -m dpexp` in a scratch folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        _check([sys.executable, "-m", "dpexp", *overrides, f"hydra.run.dir={folder}"], Path(name))
        return dict(json.loads((folder / "run.json").read_text()))


def run_script(script: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> float:
    """The number that a reference script prints in its last line."""
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, *launcher, str(script), *arguments]
        return float(_check(command, Path(name)).strip().splitlines()[-1])


def seconds_per_step(result: dict[str, Any]) -> float:
    """Seconds per measured step of the slowest rank, with the writing of records."""
    slowest = max(result["ranks"], key=lambda rank: rank["wall_s"] + rank["recording_s"])
    spent = slowest["wall_s"] + slowest["recording_s"]
    return float(spent / result["steps"]["measured"])


def show(pairs: list[Pair]) -> None:
    """Print the table: medians, spread, ratio, limit."""
    table = Table(box=box.SIMPLE_HEAD)
    heads = ("what", "unit", "dpexp", "(min–max)", "reference", "(min–max)", "result", "limit", "")
    for head in heads:
        table.add_column(head, no_wrap=True)
    for pair in pairs:
        met = "met" if pair.outcome <= pair.limit else "MISSED"
        form = "{:+.3f}" if pair.difference else "{:.3f}×"
        table.add_row(
            pair.name, pair.unit, *_spread(pair.ours), *_spread(pair.reference),
            form.format(pair.outcome), form.format(pair.limit), met,
        )  # fmt: skip
    Console(width=140).print(table)


def _spread(values: list[float]) -> tuple[str, str]:
    return f"{statistics.median(values):.3f}", f"({min(values):.3f}–{max(values):.3f})"


def _check(command: list[str], folder: Path) -> str:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{command} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout
