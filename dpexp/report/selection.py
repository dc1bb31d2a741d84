"""Which cells come first where there is no room for all."""

from __future__ import annotations

from collections.abc import Sequence

from dpexp.report.scaling import Cell

# More than perfect scaling by so much is no scaling: the baseline was disturbed.
SUSPECT = 1.2
# Settings with a TensorBoard run of their own: with more it is slow, and nobody finds one.
MOST_BOARDS = 100


def by_setting(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """The cells of each setting; first the settings with the largest speed-up."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.setting, []).append(cell)
    return dict(sorted(groups.items(), key=lambda entry: -_largest(entry[1])))


def foremost(cells: Sequence[Cell], most: int) -> list[Cell]:
    """At most so many cells, those of the settings that scale best, in their own order."""
    if len(cells) <= most:
        return list(cells)
    ranked = [cell.folder for members in by_setting(cells).values() for cell in members]
    chosen = set(ranked[:most])
    return [cell for cell in cells if cell.folder in chosen]


def boarded(cells: Sequence[Cell]) -> list[Cell]:
    """The cells of the settings that have a TensorBoard run: those that scale best."""
    groups = list(by_setting(cells).values())
    return [cell for members in groups[:MOST_BOARDS] for cell in members]


def named(folders: Sequence[str], most: int = 5) -> str:
    """``1_ddp_n2, 2_ddp_n4 and 940 more``."""
    names = list(dict.fromkeys(folders))
    text = ", ".join(names[:most])
    return text if len(names) <= most else f"{text} and {len(names) - most:,} more"


def _largest(cells: Sequence[Cell]) -> float:
    return max((cell.speedup for cell in cells if cell.speedup is not None), default=0.0)
