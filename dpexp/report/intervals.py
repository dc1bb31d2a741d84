"""The intervals of a sweep's figures, from the runs of each cell, and how they are told. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dpexp.comparing import (
    NO_DIFFERENCE,
    WITHIN,
    Interval,
    Timed,
    noise_floor,
    rate,
    ratio,
    verdict,
)
from dpexp.report.numbers import WIDEST, ranged, significant, times
from dpexp.uncertainty import LEVEL

if TYPE_CHECKING:
    from dpexp.report.scaling import Cell

Run = dict[str, Any]  # ``run.json`` data


def samples_of(run: Run) -> Timed | None:
    """The samples of the measured steps and their seconds; None where there is no throughput."""
    throughput = run.get("throughput") or {}
    if run["status"] != "ok" or not throughput.get("samples_per_s"):
        return None
    samples, wall_s = throughput.get("samples_measured"), throughput.get("wall_s")
    if samples and wall_s:
        return Timed(float(samples), float(wall_s), _error(run))
    return Timed(float(throughput["samples_per_s"]), 1.0, _error(run))


def steps_of(run: Run) -> Timed | None:
    """The measured steps and their seconds."""
    steps = (run.get("steps") or {}).get("measured")
    wall_s = (run.get("throughput") or {}).get("wall_s")
    return Timed(float(steps), float(wall_s), _error(run)) if steps and wall_s else None


def own_figures(runs: Sequence[Run]) -> dict[str, Any]:
    """The fields of a cell's rate and mean step.

    Args:
        runs: those of the cell that ended well; may be empty.
    """
    samples = [timed for run in runs if (timed := samples_of(run)) is not None]
    steps = [timed for run in runs if (timed := steps_of(run)) is not None]
    if not samples:
        return {}
    known = _fields("samples_per_s", "", rate(samples))
    if len(steps) == len(samples):
        known |= _fields("step_mean", "_s", rate(steps).inverse())
    return {
        **known,
        "interval_scope": rate(samples).scope,
        "noise_floor": noise_floor(samples),
    }


def figures_against(runs: Sequence[Run], base: Sequence[Run], devices: float) -> dict[str, Any]:
    """The fields of a cell's speed-up and efficiency.

    Args:
        runs: those of the cell that ended well.
        base: those of the baseline, another cell.
        devices: how many times as many devices the cell has.
    """
    own = [timed for run in runs if (timed := samples_of(run)) is not None]
    other = [timed for run in base if (timed := samples_of(run)) is not None]
    speedup = ratio(own, other)
    return {
        **_fields("speedup", "", speedup),
        **_fields("efficiency", "", speedup.scaled(1 / devices)),
        "speedup_scope": speedup.scope,
        "verdict": verdict(own, other),
    }


def with_interval(cell: Cell) -> str:
    """The speed-up as the table shows it: ``1.62× (1.58–1.66)``; the interval only of repeats.

    That of the steps within one run is not shown beside the figure: it does not know how runs
    differ, and would be taken for the whole truth.
    """
    if cell.speedup is None:
        return "–"
    if cell.speedup_low is None or cell.speedup_high is None or cell.speedup_scope == WITHIN:
        return f"{times(cell.speedup)}×"
    return ranged(cell.speedup, cell.speedup_low, cell.speedup_high, "×")


def interval_lines(cells: Sequence[Cell]) -> list[str]:
    """What the repeats say: which differences are none, and the noise floor of each baseline."""
    lines = []
    for cell in cells:
        if cell.verdict == NO_DIFFERENCE:
            assert cell.speedup and cell.speedup_low and cell.speedup_high
            figure = ranged(cell.speedup, cell.speedup_low, cell.speedup_high, "×")
            lines.append(f"{cell.folder}: {NO_DIFFERENCE} from {cell.baseline}: {figure}")
    for cell in cells:
        if cell.folder == cell.baseline and cell.noise_floor is not None:
            lines.append(
                f"noise floor: two runs of {cell.folder} differ by up to "
                f"{_amount(cell.noise_floor)} ({LEVEL:.0%}, {cell.repeats} repeats)"
            )
    if any(cell.speedup is not None and cell.folder != cell.baseline for cell in cells) and all(
        cell.repeats < 2 for cell in cells
    ):
        lines.append("one run per cell: repeats=5 would tell whether a difference is real")
    return lines


def _amount(share: float) -> str:
    if share <= 1:
        return f"{significant(share * 100, 2)} %"
    factor = share + 1
    return (
        f"a factor of {significant(factor, 2)}"
        if factor <= WIDEST
        else f"a factor above {WIDEST:g}"
    )


def _error(run: Run) -> float | None:
    found = (run.get("uncertainty") or {}).get("relative_standard_error")
    return None if found is None else float(found)


def _fields(name: str, unit: str, interval: Interval) -> dict[str, float | None]:
    return {
        f"{name}{unit}": interval.value,
        f"{name}_low{unit}": interval.low,
        f"{name}_high{unit}": interval.high,
    }
