"""Where the efficiency of a sweep's cells went, in words and as a table."""

from __future__ import annotations

from collections.abc import Sequence

from dpexp.report.scaling import Cell
from dpexp.report.waterfall import PARTS, WAITING, Waterfall, shown

LOSS_HEADER = ("cell", "step", "ideal", "loss", *map(shown, PARTS))
SMALLEST = 0.01  # of a step; smaller parts are in the table only


def loss_lines(cells: Sequence[Cell]) -> list[str]:
    """One line per cell that is compared with another: its largest losses first."""
    return [
        f"{cell.folder}: {_loss(cell.waterfall, cell.straggler)}"
        for cell in cells
        if cell.waterfall is not None and cell.folder != cell.baseline
    ]


def _loss(fall: Waterfall, straggler: str | None) -> str:
    shares = {part: fall.share(part) for part in PARTS}
    told = sorted(
        (part for part in PARTS[:-1] if abs(shares[part]) >= SMALLEST), key=lambda p: -shares[p]
    )
    named = {WAITING: f" ({straggler})"} if straggler is not None else {}
    parts = ", ".join(
        f"{shown(part)} {_percent(shares[part])}{named.get(part, '')}" for part in told
    )
    parts = parts or "no part above 1%"
    whole, rest = fall.loss_s / fall.step_s, _percent(shares["residual"])
    lost = f"{_percent(whole)} of a step is lost" if whole >= 0 else "a step is better than ideal"
    return f"{lost}: {parts}; unexplained {rest}"


def _percent(share: float) -> str:
    text = f"{share:.0%}"
    return "0%" if text == "-0%" else text


def loss_rows(cells: Sequence[Cell]) -> list[tuple[str, ...]]:
    """Milliseconds per step, columns LOSS_HEADER; the parts of a row add up to its loss."""
    rows = []
    for cell in cells:
        fall = cell.waterfall
        if fall is None or cell.folder == cell.baseline:
            continue
        figures = (fall.step_s, fall.ideal_s, fall.loss_s, *(fall.parts_s[p] for p in PARTS))
        rows.append((cell.folder, *(f"{figure * 1e3:.3f}" for figure in figures)))
    return rows
