"""The figures of the report's page: which are drawn, with what is said about each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from dpexp.report import alternatives as words
from dpexp.report.bars import breakdown_figure, waterfall_figure
from dpexp.report.capacity import frontier_figure, frontier_groups, memory_figure
from dpexp.report.content import Content
from dpexp.report.figures import METRICS, Metric, curves_figure, interval, known, svg
from dpexp.report.findings import Breakdown
from dpexp.report.markup import shortened
from dpexp.report.scaling import Cell
from dpexp.report.selection import by_setting, foremost

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_SETTINGS = 3  # with figures of their own
MOST_BARS = 24
_CAPTIONS = {
    "samples_per_s": "Distinct samples per second of all devices together; higher is better.",
    "speedup": "How many times the baseline's throughput; the dotted line is ideal scaling.",
    "efficiency": "The speed-up divided by how many times as many devices; 100 % is ideal.",
}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Picture:
    """A figure of the page."""

    title: str
    caption: str
    alternative: str  # what it shows, in words with the numbers
    svg: str  # an element for HTML; "" where it could not be drawn
    problem: str = ""  # why it could not be drawn


def shown_settings(cells: Sequence[Cell]) -> list[str]:
    """The settings that get figures: those that scale best."""
    return list(by_setting(cells))[:MOST_SETTINGS]


def scaling_pictures(content: Content) -> list[Picture]:
    """Throughput, speed-up and efficiency of each setting that is shown."""
    settings = shown_settings(content.cells)
    shown = [cell for cell in content.cells if cell.setting in settings]
    made = []
    for number, setting in enumerate(settings):
        cells = [cell for cell in shown if cell.setting == setting]
        for metric in METRICS:
            if known(cells, metric):
                made.append(_curves(f"{metric.field}-{number}", setting, cells, metric, shown))
    return made


def breakdown_pictures(content: Content) -> list[Picture]:
    """Where a mean step goes, and where the best cell lost time."""
    made = []
    bars = shown_breakdowns(content)
    if bars:
        made.append(
            _picture(
                "breakdown",
                "Mean step by part",
                "The parts of a bar add up to the cell's mean step. Where ranks differ, other may "
                "lie a little left of zero. A dashed outline marks emulated devices.",
                partial(words.breakdown_text, bars),
                partial(breakdown_figure, bars),
            )
        )
    best = next((cell for cell in content.cells if cell.folder == content.best), None)
    if best is not None and (fall := best.waterfall) is not None:
        made.append(
            _picture(
                "waterfall",
                f"From the ideal step to that of {shortened(best.folder, 40)}",
                "Of the cell that scales best: what each part costs more than under ideal scaling "
                f"of {best.baseline}. Parts that round to 0 are left out.",
                partial(words.waterfall_text, best.folder, fall),
                partial(waterfall_figure, fall),
            )
        )
    return made


def shown_breakdowns(content: Content) -> list[Breakdown]:
    """The cells that get a bar: those that scale best, as many as have room."""
    timed = {each.folder for each in content.breakdowns}
    shown = foremost([cell for cell in content.cells if cell.folder in timed], MOST_BARS)
    folders = {cell.folder for cell in shown}
    return [each for each in content.breakdowns if each.folder in folders]


def memory_pictures(content: Content) -> list[Picture]:
    """Peaks over devices of each setting that is shown, and what did not fit."""
    emulated = {cell.folder for cell in content.cells if cell.emulated}
    made = []
    for number, setting in enumerate(shown_settings(content.cells)):
        points = [point for point in content.memory if point.setting == setting]
        if points:
            made.append(
                _picture(
                    f"memory-{number}",
                    _titled("Peak memory", setting),
                    "Of the process or device with the most; a red cross is a cell that ran out "
                    "of memory.",
                    partial(words.memory_text, points),
                    partial(memory_figure, points, emulated),
                )
            )
    groups = list(frontier_groups(content.memory).items())[:MOST_SETTINGS]
    for number, (setting, points) in enumerate(groups):
        made.append(
            _picture(
                f"frontier-{number}",
                _titled("Out-of-memory frontier", setting),
                "Rows per device that fit, and crosses where memory did not suffice; the frontier "
                "lies in the shaded gap.",
                partial(words.frontier_text, points),
                partial(frontier_figure, points),
            )
        )
    return made


def _curves(
    name: str, setting: str, cells: Sequence[Cell], metric: Metric, shown: Sequence[Cell]
) -> Picture:
    """Speed-up and efficiency have the same axis in each setting; throughputs may differ much."""
    top = None
    if metric.field != "samples_per_s":
        top = max(getattr(cell, metric.field) for cell in known(shown, metric))
    caption = _CAPTIONS[metric.field]
    if any(interval(cell, metric) for cell in cells):
        caption += " Bands are 95 % intervals; one that leaves the panel is wider."
    if any(cell.emulated for cell in cells):
        caption += " Hollow points and dashes: emulated devices."
    return _picture(
        name,
        _titled(metric.title, setting),
        caption,
        partial(words.curves_text, cells, metric),
        partial(curves_figure, cells, metric, top),
    )


def _titled(title: str, setting: str) -> str:
    return f"{title}, {shortened(setting, 80)}" if setting else title


def _picture(
    name: str, title: str, caption: str, told: Callable[[], str], draw: Callable[[], Figure]
) -> Picture:
    """One figure. One that fails is logged, and its place in the page says so.

    Args:
        name: for the identifiers in its SVG.
    """
    try:
        return Picture(title, caption, told(), svg(draw(), name))
    except Exception as error:  # noqa: BLE001  # the page is worth more than one of its figures
        _log.warning("figure %s of the report could not be drawn", name, exc_info=True)
        return Picture(title, caption, "", "", f"{type(error).__name__}: {error}")
