"""The report's bars: where a mean step goes, and where a cell lost time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import floor, log10
from typing import TYPE_CHECKING

from dpexp.report.colors import BACKGROUND, INK, MUTED, PARTS
from dpexp.report.figures import WIDTH, compact, new_figure, style
from dpexp.report.findings import BREAKDOWN_PARTS, Breakdown
from dpexp.report.markup import shortened
from dpexp.report.numbers import milliseconds
from dpexp.report.waterfall import PARTS as LOSSES
from dpexp.report.waterfall import WAITING, Waterfall, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW = 0.3  # inches that a bar takes
NAMES = 1.45  # inches for the names of the bars
# Communication is what one looks for: it can be told without its colour.
HATCHES = {"exposed_communication": "////", "waiting": "\\\\\\\\"}
# Parts of the loss as the breakdown names them; the residual is none of its parts.
_SAME = {WAITING: "waiting"}
_COLORS = PARTS | {WAITING: PARTS["waiting"], "overhead": PARTS["other"]}


def breakdown_figure(breakdowns: Sequence[Breakdown]) -> Figure:
    """A bar per cell, in milliseconds, whose parts add up to the cell's mean step.

    A part below zero lies left of zero. Emulated cells have a dashed outline.
    """
    with style():
        figure, axes = _bars([_cell_name(each) for each in breakdowns], head=0.75)
        rows = range(len(breakdowns))
        ends = {True: [0.0] * len(breakdowns), False: [0.0] * len(breakdowns)}
        for part in present_parts(breakdowns):
            widths = [each.parts_s[part] * 1e3 for each in breakdowns]
            starts = [ends[width >= 0][row] for row, width in zip(rows, widths, strict=True)]
            axes.barh(
                rows,
                widths,
                left=starts,
                height=0.68,
                color=PARTS[part].light,
                hatch=HATCHES.get(part),
                edgecolor=BACKGROUND.light,
                linewidth=0.6,
                label=shown(part),
            )
            for row, width in zip(rows, widths, strict=True):
                ends[width >= 0][row] += width
        for row, each in enumerate(breakdowns):
            if each.emulated:
                low, high = ends[False][row], ends[True][row]
                axes.barh(
                    row,
                    high - low,
                    left=low,
                    height=0.68,
                    fill=False,
                    edgecolor=INK.light,
                    linestyle="--",
                    linewidth=1.1,
                )
        axes.set_xlabel("ms of a mean step")
        figure.legend(loc="upper left", ncols=3, borderpad=0.2, fontsize=8.5)
        return figure


def present_parts(breakdowns: Sequence[Breakdown]) -> list[str]:
    """The parts on which any of the cells spends something."""
    return [part for part in BREAKDOWN_PARTS if any(each.parts_s[part] for each in breakdowns)]


def waterfall_figure(fall: Waterfall) -> Figure:
    """From the ideal step to the cell's own, part by part, in milliseconds.

    Parts that are 0 in the decimals that give the step three digits have no bar.
    """
    decimals = 2 - floor(log10(fall.step_s * 1e3))
    with style():
        parts = [part for part in LOSSES if round(fall.parts_s[part] * 1e3, decimals)]
        names = ["ideal step", *(shown(_SAME.get(part, part)) for part in parts), "mean step"]
        figure, axes = _bars(names, head=0.1)
        _bar(axes, 0, 0.0, fall.ideal_s, INK.light, signed=False)
        reached = fall.ideal_s
        for row, part in enumerate(parts, start=1):
            shade = _COLORS.get(part, MUTED)
            _bar(axes, row, reached, fall.parts_s[part], shade.light, signed=True)
            axes.vlines(reached, row - 1, row, color=MUTED.light, linewidth=0.8)
            reached += fall.parts_s[part]
        _bar(axes, len(parts) + 1, 0.0, fall.step_s, INK.light, signed=False)
        axes.vlines(fall.step_s, len(parts), len(parts) + 1, color=MUTED.light, linewidth=0.8)
        low, high = _range(fall)
        axes.set_xlim(low * 1e3, (high + 0.16 * (high - low)) * 1e3)  # room for the figures
        axes.set_xlabel("ms per step")
        return figure


def _range(fall: Waterfall) -> tuple[float, float]:
    """The least and the largest sum of the first parts, in seconds, and zero."""
    sums = list(accumulate((fall.ideal_s, *(fall.parts_s[part] for part in LOSSES))))
    return min(0.0, *sums), max(fall.step_s, *sums)


def _bar(axes: Axes, row: int, start_s: float, width_s: float, color: str, *, signed: bool) -> None:
    """A bar with its milliseconds right of it."""
    axes.barh(row, width_s * 1e3, left=start_s * 1e3, height=0.68, color=color)
    end = max(start_s, start_s + width_s) * 1e3
    text = milliseconds(width_s, signed=signed)
    axes.annotate(text, (end, row), (4, 0), textcoords="offset points", va="center", fontsize=8.5)


def _bars(names: Sequence[str], head: float) -> tuple[Figure, Axes]:
    """Axes for a bar per name, the first on top.

    Args:
        head: inches above the panel.
    """
    foot = 0.5
    body = ROW * len(names) + 0.1
    height = head + body + foot
    figure = new_figure(WIDTH, height)
    left = NAMES / WIDTH
    axes = figure.add_axes((left, foot / height, 0.97 - left, body / height))
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(compact)
    axes.locator_params(axis="x", nbins=6)
    return figure, axes


def _cell_name(each: Breakdown) -> str:
    return shortened(each.folder, 14 if each.emulated else 22) + (" (emul.)" * each.emulated)
