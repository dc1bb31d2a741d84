"""The report's curves over the number of devices, drawn by Matplotlib without pyplot."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dpexp.comparing import WITHIN
from dpexp.report.colors import BACKGROUND, INK, LINE, MUTED, strategy_color
from dpexp.report.markup import inline_svg, shortened
from dpexp.report.scaling import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = {"none": "o", "dp": "s", "ddp": "^", "fsdp": "D"}
LOGARITHMIC_FROM = 16  # devices: below, every count has room on a linear axis
MOST_POINTS = 60  # of a curve; more could not be told apart
WIDEST_BAND = 1.6  # how far a linear axis goes above its highest point for the sake of bands
WIDTH, HEIGHT = 4.6, 3.1  # of one panel, in inches of 72 units
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "dpexp",  # the same drawing, the same bytes
    "text.parse_math": False,  # a name may hold dollar signs
    "font.family": "sans-serif",
    "font.size": 10,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.edgecolor": MUTED.light,
    "axes.labelcolor": INK.light,
    "axes.titlecolor": INK.light,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE.light,
    "grid.linewidth": 0.6,
    "text.color": INK.light,
    "xtick.color": MUTED.light,
    "ytick.color": MUTED.light,
    "xtick.labelcolor": INK.light,
    "ytick.labelcolor": INK.light,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "hatch.color": BACKGROUND.light,
    "hatch.linewidth": 1.2,
}


@dataclass(frozen=True)
class Metric:
    """A figure of a cell that is drawn over devices."""

    field: str  # of Cell; its interval is in <field>_low and <field>_high
    scope: str  # the field that says what the interval comes from
    title: str
    unit: str
    percent: bool = False


THROUGHPUT = Metric("samples_per_s", "interval_scope", "Throughput", "samples/s")
SPEEDUP = Metric("speedup", "speedup_scope", "Speed-up", "× baseline")
EFFICIENCY = Metric("efficiency", "speedup_scope", "Efficiency", "% of ideal", percent=True)
METRICS = (THROUGHPUT, SPEEDUP, EFFICIENCY)


def curves_figure(cells: Sequence[Cell], metric: Metric, top: float | None = None) -> Figure:
    """One metric over devices.

    Args:
        cells: of one setting.
        top: the upper end of the axis at least, for figures that are compared.
    """
    with style():
        figure = new_figure(WIDTH, HEIGHT)
        axes = figure.add_axes((0.15, 0.15, 0.82, 0.67))
        _draw_curves(axes, cells, metric)
        if top is not None and axes.get_yscale() == "linear":
            axes.set_ylim(top=max(top * 1.05 * _factor(metric), axes.get_ylim()[1]))
        return figure


def known(cells: Sequence[Cell], metric: Metric) -> list[Cell]:
    """The cells that have a point in the metric's figure: not those that did not run in one go."""
    rated = [cell for cell in cells if cell.num_devices and cell.steady]
    return [cell for cell in rated if getattr(cell, metric.field) is not None]


def interval(cell: Cell, metric: Metric) -> tuple[float, float] | None:
    """The ends of the cell's 95 % interval, where repeats tell them.

    That of the steps within one run is not drawn: it does not know how runs differ.
    """
    low, high = getattr(cell, f"{metric.field}_low"), getattr(cell, f"{metric.field}_high")
    if low is None or high is None or getattr(cell, metric.scope) == WITHIN:
        return None
    return low, high


def svg(figure: Figure, prefix: str) -> str:
    """The figure as an element for HTML, in the colours of the page around it.

    Args:
        prefix: for its identifiers; another one for each figure of a page.
    """
    return inline_svg(_saved(figure, "svg", metadata={"Date": None}), prefix)


def png(figure: Figure) -> bytes:
    """The figure as a PNG file on white, for TensorBoard's Images tab."""
    return _saved(figure, "png", facecolor=BACKGROUND.light, dpi=100)


@contextmanager
def style() -> Iterator[None]:
    """Matplotlib's defaults and ours, whatever the user's matplotlibrc says; undone afterwards."""
    import matplotlib.style

    with matplotlib.style.context(["default", STYLE]):
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure that no window and no global state knows of."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


def _saved(figure: Figure, form: str, **options: Any) -> bytes:
    held = io.BytesIO()
    with style(), warnings.catch_warnings():
        # Names may be in any script: the font that measures them need not have it.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(held, format=form, **options)
    return held.getvalue()


def _factor(metric: Metric) -> float:
    return 100.0 if metric.percent else 1.0


def _draw_curves(axes: Axes, cells: Sequence[Cell], metric: Metric) -> None:
    shown = known(cells, metric)
    axes.set_xlabel("devices")
    axes.set_ylabel(metric.unit)
    if not shown:
        axes.text(0.5, 0.5, "no cell has this figure", transform=axes.transAxes, ha="center")
        return
    curves: dict[str, list[Cell]] = {}
    for cell in shown:
        curves.setdefault(cell.parallel, []).append(cell)
    for strategy, members in curves.items():
        _draw_banded(axes, strategy, members, metric)
    _draw_ideal(axes, shown, metric)
    devices_axis(axes, [cell.num_devices or 0 for cell in shown])
    if metric is not EFFICIENCY and axes.get_xscale() == "log":
        axes.set_yscale("log", base=2)
    else:
        # A band of a few runs that differ much would press all points to the ground.
        highest = max(float(np.max(line.get_ydata())) for line in axes.lines)
        axes.set_ylim(0, min(axes.get_ylim()[1], WIDEST_BAND * highest) or 1)
    axes.yaxis.set_major_formatter(compact)
    axes.yaxis.set_minor_formatter("")
    legend(axes)


def _draw_banded(axes: Axes, strategy: str, cells: Sequence[Cell], metric: Metric) -> None:
    """A strategy's curve and the intervals of its points."""
    color, factor = strategy_color(strategy), _factor(metric)
    members = _thinned(sorted(cells, key=lambda cell: cell.num_devices or 0))
    devices = [cell.num_devices or 0 for cell in members]
    values = [getattr(cell, metric.field) * factor for cell in members]
    draw_curve(axes, strategy, devices, values, any(cell.emulated for cell in members))
    ends = [(cell.num_devices or 0, interval(cell, metric)) for cell in members]
    bands = [(at, pair[0] * factor, pair[1] * factor) for at, pair in ends if pair is not None]
    if bands:
        at, low, high = (list(column) for column in zip(*bands, strict=True))
        axes.fill_between(at, low, high, color=color, alpha=0.18, linewidth=0)
        axes.vlines(at, low, high, color=color, linewidth=1.2)


def draw_curve(
    axes: Axes, strategy: str, devices: Sequence[int], values: Sequence[float], emulated: bool
) -> None:
    """A strategy's points; those of emulated devices are hollow and joined by dashes."""
    color = strategy_color(strategy)
    axes.plot(
        devices,
        values,
        color=color,
        marker=MARKERS.get(strategy, "v"),
        markersize=5.5,
        markerfacecolor=BACKGROUND.light if emulated else color,
        linestyle=(0, (4, 2)) if emulated else "-",
        linewidth=1.6,
        label=shortened(strategy, 24) + (" (emulated)" if emulated else ""),
        zorder=3,
    )


def _thinned(cells: list[Cell]) -> list[Cell]:
    """At most MOST_POINTS of the cells, evenly."""
    return cells[:: -(-len(cells) // MOST_POINTS)]


def _draw_ideal(axes: Axes, cells: Sequence[Cell], metric: Metric) -> None:
    """What perfect scaling of each baseline would give."""
    counts = sorted({cell.num_devices or 0 for cell in cells})
    bases = {cell.folder: cell for cell in cells if cell.folder == cell.baseline}
    label = "ideal"
    for base in bases.values():
        start = base.num_devices or 1
        reached = [count for count in counts if count >= start]
        value = getattr(base, metric.field) * _factor(metric)
        grown = [value if metric is EFFICIENCY else value * n / start for n in reached]
        axes.plot(reached, grown, color=MUTED.light, linestyle=":", linewidth=1.3, label=label)
        label = "_"  # one entry of the legend is enough


def devices_axis(axes: Axes, counts: Sequence[int]) -> None:
    """The x axis, with a tick at each number of devices where there is room for it."""
    from matplotlib.ticker import MaxNLocator

    ticks = sorted(set(counts))
    if ticks[-1] >= LOGARITHMIC_FROM:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks[:: -(-len(ticks) // 12)], minor=False)
        axes.set_xticks([], minor=True)
    elif len(ticks) <= 9:
        axes.set_xticks(ticks)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(9, integer=True))
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.margins(x=0.06)


def compact(value: float, _position: float | None = None) -> str:
    """A tick's label: ``0.5``, ``250``, ``12k``, ``3.5M``."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):.4g}{letter}"
    return f"{value:.4g}"


def legend(axes: Axes, columns: int = 3) -> None:
    """Above the panel, where it hides no point."""
    axes.legend(loc="lower left", bbox_to_anchor=(-0.16, 1.0), ncols=columns, borderpad=0.2)
