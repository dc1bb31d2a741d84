"""A sweep's TensorBoard runs over the number of devices."""

from __future__ import annotations

from pathlib import Path

from dpexp.comparing import WITHIN
from dpexp.events.file import PATTERN, EventFile
from dpexp.events.layout import scaling_layout
from dpexp.report.figures import METRICS, curves_figure, png
from dpexp.report.scaling import Cell

# Settings whose curves are drawn under Images: each takes a quarter of a second.
MOST_DRAWN = 12


def write_boards(folder: Path, cells: list[Cell]) -> None:
    """Curves over the number of devices, their charts and a figure, in place of older ones.

    One run in `folder`; a sweep that also varies other keys gets one below it for each of their
    settings, since a curve over devices means something only where the rest is equal.
    """
    for old in folder.glob(f"**/{PATTERN}"):
        old.unlink()  # two files in one run would be read as one zigzag
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.samples_per_s is not None:
            groups.setdefault(cell.setting, []).append(cell)
    drawn = 0
    for setting, members in groups.items():
        # A single number of devices makes no curve.
        draw = drawn < MOST_DRAWN and len({cell.num_devices for cell in members}) > 1
        drawn += draw
        _write_board(folder / setting if len(groups) > 1 else folder, members, draw)


def _write_board(folder: Path, cells: list[Cell], draw: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    file = EventFile(folder)
    try:
        file.add(scaling_layout(_banded(cells)))
        for cell in sorted(cells, key=lambda cell: (cell.parallel, cell.num_devices or 0)):
            named = {f"scaling/{cell.parallel}/{k}": v for k, v in _figures(cell).items()}
            file.scalars(named, cell.num_devices or 0)
        for metric in METRICS if draw else ():
            file.image(f"scaling/{metric.field}", png(curves_figure(cells, metric)))
    finally:
        file.close()


def _figures(cell: Cell) -> dict[str, float]:
    figures = {
        "samples_per_s": cell.samples_per_s,
        "speedup": cell.speedup,
        "efficiency": cell.efficiency,
        **dict(zip(("speedup_low", "speedup_high"), _ends(cell), strict=True)),
    }
    return {name: value for name, value in figures.items() if value is not None}


def _ends(cell: Cell) -> tuple[float | None, float | None]:
    """Of the speed-up's interval. That of a single run does not know how runs differ."""
    if cell.speedup_scope == WITHIN:
        return None, None
    return cell.speedup_low, cell.speedup_high


def _banded(cells: list[Cell]) -> list[str]:
    """The strategies whose speed-ups all have an interval: TensorBoard draws no other bands."""
    names = dict.fromkeys(cell.parallel for cell in cells)
    points = {
        name: [_ends(c) for c in cells if c.parallel == name and c.speedup is not None]
        for name in names
    }
    return [name for name, ends in points.items() if ends and all(None not in e for e in ends)]
