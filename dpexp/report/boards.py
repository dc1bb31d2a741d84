"""A sweep's TensorBoard runs over the number of devices."""

from __future__ import annotations

from pathlib import Path

from dpexp.comparing import WITHIN
from dpexp.events.file import PATTERN, EventFile
from dpexp.events.layout import scaling_layout
from dpexp.report.figures import METRICS, curves_figure, png
from dpexp.report.scaling import Cell

# Settings whose curves are drawn under Images: each takes a quarter of a second.
MOST_DRAWN = 4


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
    ends = _ends(cells)
    file = EventFile(folder)
    try:
        file.add(scaling_layout(_banded(cells, ends)))
        for cell in sorted(cells, key=lambda cell: (cell.parallel, cell.num_devices or 0)):
            figures = {
                "samples_per_s": cell.samples_per_s,
                "speedup": cell.speedup,
                "efficiency": cell.efficiency,
                **dict(
                    zip(("speedup_low", "speedup_high"), ends.get(cell.folder, ()), strict=False)
                ),
            }
            known = {
                f"scaling/{cell.parallel}/{name}": value
                for name, value in figures.items()
                if value is not None
            }
            file.scalars(known, cell.num_devices or 0)
        for metric in METRICS if draw else ():
            file.image(f"scaling/{metric.field}", png(curves_figure(cells, metric)))
    finally:
        file.close()


def _ends(cells: list[Cell]) -> dict[str, tuple[float, float]]:
    """The ends of the speed-ups' intervals by folder, without those of steps within one run."""
    known = {
        cell.folder: (cell.speedup_low, cell.speedup_high)
        for cell in cells
        if cell.speedup_low is not None
        and cell.speedup_high is not None
        and cell.speedup_scope != WITHIN
    }
    # A baseline's speed-up is 1 by definition. Its strategy's band begins there.
    beside = {cell.parallel for cell in cells if cell.folder in known}
    return known | {
        cell.folder: (cell.speedup, cell.speedup)
        for cell in cells
        if cell.folder == cell.baseline and cell.parallel in beside and cell.speedup is not None
    }


def _banded(cells: list[Cell], ends: dict[str, tuple[float, float]]) -> list[str]:
    """The strategies whose speed-ups all have an interval: TensorBoard draws no other bands."""
    lacking = {c.parallel for c in cells if c.speedup is not None and c.folder not in ends}
    names = dict.fromkeys(cell.parallel for cell in cells if cell.folder in ends)
    return [name for name in names if name not in lacking]
