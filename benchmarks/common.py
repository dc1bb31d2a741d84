"""Taking turns, medians, and the table."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy
from rich import box
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
DRAWS = 2000
# Even from the smallest to the largest of n figures, the true median lies inside with probability
# 1 - 2 / 2**n only: 94 % for 5, 97 % for 6.
ROUNDS_FOR_AN_INTERVAL = 6
Figure = TypeVar("Figure")


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

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of `outcome`, None of too few rounds: see :func:`bootstrap`."""
        if len(self.ours) < ROUNDS_FOR_AN_INTERVAL:
            return None
        return bootstrap(self.ours, self.reference, difference=self.difference)


def bootstrap(
    ours: list[float], reference: list[float], *, difference: bool
) -> tuple[float, float]:
    """95 % interval of the ratio, or the difference, of two medians.

    A percentile bootstrap: whole rounds are drawn with replacement, so what both sides of a round
    share (other work on the machine) stays together. The seed is fixed. With fewer rounds than
    :data:`ROUNDS_FOR_AN_INTERVAL` it is no 95 % interval, whatever is drawn.

    Args:
        ours: one value a round.
        reference: one value a round, or a single one that is no measurement and does not vary.
    """
    mine = numpy.asarray(ours)
    other = numpy.broadcast_to(reference, mine.shape)
    drawn = numpy.random.default_rng(0).integers(len(mine), size=(DRAWS, len(mine)))
    left, right = numpy.median(mine[drawn], axis=1), numpy.median(other[drawn], axis=1)
    outcomes = left - right if difference else left / right
    low, high = numpy.percentile(outcomes, [2.5, 97.5])
    return float(low), float(high)


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


def take_turns(count: int, sides: Mapping[str, Callable[[], Figure]]) -> dict[str, list[Figure]]:
    """Measure all sides once a round, each round beginning with the next one.

    Returns:
        The figures of each side, one a round: entry i of every side is of round i.
    """
    names = list(sides)
    results: dict[str, list[Figure]] = {name: [] for name in names}
    for turn in range(count):
        first = turn % len(names)
        for name in [*names[first:], *names[:first]]:
            results[name].append(sides[name]())
    return results


def run_dpexp(*overrides: str) -> dict[str, Any]:
    """``run.json`` of one `python -m dpexp` in a scratch folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        run_checked(
            [sys.executable, "-m", "dpexp", *overrides, f"hydra.run.dir={folder}"], Path(name)
        )
        return dict(json.loads((folder / "run.json").read_text()))


def run_script(script: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> float:
    """The number that a reference script prints in its last line."""
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, *launcher, str(script), *arguments]
        return float(run_checked(command, Path(name)).strip().splitlines()[-1])


def seconds_per_step(result: dict[str, Any]) -> float:
    """Seconds per measured step of the slowest rank, with the writing of records."""
    slowest = max(result["ranks"], key=lambda rank: rank["wall_s"] + rank["recording_s"])
    spent = slowest["wall_s"] + slowest["recording_s"]
    return float(spent / result["steps"]["measured"])


def show(pairs: list[Pair]) -> None:
    """Print the table: medians, spread, ratio with its 95 % interval, limit."""
    table = Table(box=box.SIMPLE_HEAD)
    heads = (
        "what", "unit", "dpexp", "(min–max)", "reference", "(min–max)", "result (95 %)",
        "limit", "",
    )  # fmt: skip
    for head in heads:
        table.add_column(head, no_wrap=True)
    for pair in pairs:
        met = "met" if pair.outcome <= pair.limit else "MISSED"
        form = "{:+.3f}" if pair.difference else "{:.3f}×"
        ends = " to ".join(form.format(end) for end in pair.interval or ())
        table.add_row(
            pair.name, pair.unit, *_spread(pair.ours), *_spread(pair.reference),
            form.format(pair.outcome) + (f" ({ends})" if ends else ""),
            form.format(pair.limit), met,
        )  # fmt: skip
    Console(width=170).print(table)


def _spread(values: list[float]) -> tuple[str, str]:
    return f"{statistics.median(values):.3f}", f"({min(values):.3f}–{max(values):.3f})"


def child_environment() -> dict[str, str]:
    """This process's, with the checkout importable from any folder."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}


def run_checked(command: list[str], folder: Path) -> str:
    """What a command prints, run in `folder`.

    Raises:
        RuntimeError: it failed.
    """
    done = subprocess.run(
        command,
        cwd=folder,
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{command} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout
