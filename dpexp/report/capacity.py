"""The report's figures of memory: peaks over devices, and what did not fit."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Any

from dpexp.report.colors import BAD, strategy_color
from dpexp.report.figures import (
    HEIGHT,
    MARKERS,
    WIDTH,
    compact,
    devices_axis,
    draw_curve,
    legend,
    new_figure,
    style,
)
from dpexp.report.findings import MemoryPoint
from dpexp.report.markup import shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BATCH = re.compile(r"(?:^|,)batch_size=[^,]*")
UNITS = (("GiB", 2**30), ("MiB", 2**20))


def memory_figure(points: Sequence[MemoryPoint], emulated: Set[str]) -> Figure:
    """Peak memory over devices; what ran out of memory is a cross at the upper edge.

    Args:
        points: of one setting, at least one.
        emulated: folders of cells on virtual devices.
    """
    with style():
        figure = new_figure(WIDTH, HEIGHT)
        axes = figure.add_axes((0.15, 0.15, 0.82, 0.67))
        fitting = [point for point in points if not point.out_of_memory and point.peak_bytes]
        name, unit = unit_of(fitting)
        for strategy in dict.fromkeys(point.parallel for point in fitting):
            own = [point for point in fitting if point.parallel == strategy]
            own.sort(key=lambda point: point.num_devices)
            draw_curve(
                axes,
                strategy,
                [point.num_devices for point in own],
                [(point.peak_bytes or 0) / unit for point in own],
                any(point.folder in emulated for point in own),
            )
        devices_axis(axes, [point.num_devices for point in points])
        axes.set_xlabel("devices")
        axes.set_ylabel(f"{name} per {scope_of(points)}")
        axes.set_ylim(bottom=0, top=axes.get_ylim()[1] * 1.15)
        axes.yaxis.set_major_formatter(compact)
        full = sorted({point.num_devices for point in points if point.out_of_memory})
        if full:
            _crosses(axes, full, [0.95] * len(full), transform=axes.get_xaxis_transform())
        legend(axes)
        return figure


def frontier_figure(points: Sequence[MemoryPoint]) -> Figure:
    """Rows per device over devices: what fits, what does not, and the gap between them.

    Args:
        points: that differ in strategy, devices and batch alone, one of them out of memory.
    """
    with style():
        figure = new_figure(WIDTH, HEIGHT)
        axes = figure.add_axes((0.15, 0.15, 0.82, 0.67))
        counts = sorted({point.num_devices for point in points})
        crosses: list[tuple[float, float]] = []
        strategies = list(dict.fromkeys(point.parallel for point in points))
        for index, strategy in enumerate(strategies):
            # Side by side, since strategies often hold the same batches.
            shift = 0.14 * (index - (len(strategies) - 1) / 2)
            own = [point for point in points if point.parallel == strategy]
            places = {count: counts.index(count) + shift for count in counts}
            crosses += _draw_frontier(axes, strategy, own, places)
        _crosses(axes, *zip(*crosses, strict=True))
        axes.set_xticks(range(len(counts)), [str(count) for count in counts])
        axes.margins(x=0.12)
        rows = [point.batch_per_device or 0 for point in points]
        if max(rows) >= 8 * min(rows) > 0:
            axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(compact)
        axes.set_xlabel("devices")
        axes.set_ylabel("rows per device")
        legend(axes)
        return figure


def frontier_groups(points: Sequence[MemoryPoint]) -> dict[str, list[MemoryPoint]]:
    """The points by their setting without the batch, of groups where memory did not suffice."""
    groups: dict[str, list[MemoryPoint]] = {}
    for point in points:
        if point.batch_per_device:
            setting = _BATCH.sub("", point.setting).lstrip(",")
            groups.setdefault(setting, []).append(point)
    return {
        setting: held
        for setting, held in groups.items()
        if any(point.out_of_memory for point in held)
    }


def frontier(points: Sequence[MemoryPoint]) -> tuple[int | None, int | None]:
    """The most rows per device that fit, and the fewest above them that did not.

    Args:
        points: of one strategy and number of devices.
    """
    fits = max((p.batch_per_device or 0 for p in points if not p.out_of_memory), default=None)
    full = [
        p.batch_per_device
        for p in points
        if p.out_of_memory and p.batch_per_device and p.batch_per_device > (fits or 0)
    ]
    return fits, min(full, default=None)


def unit_of(points: Sequence[MemoryPoint]) -> tuple[str, int]:
    """The unit that suits the largest peak, and its bytes."""
    largest = max((point.peak_bytes or 0 for point in points), default=0)
    return next((pair for pair in UNITS if largest >= pair[1]), UNITS[-1])


def scope_of(points: Sequence[MemoryPoint]) -> str:
    """What a peak is of: ``process``, ``device``, or ``process or device``."""
    known = [point.scope for point in points if point.peak_bytes] or ["process"]
    return " or ".join(sorted(set(known), reverse=True))


def _draw_frontier(
    axes: Axes, strategy: str, points: Sequence[MemoryPoint], places: dict[int, float]
) -> list[tuple[float, float]]:
    """What fits, and the gaps; returns where the crosses of what does not belong."""
    fitting = [point for point in points if not point.out_of_memory]
    full = [point for point in points if point.out_of_memory]
    color = strategy_color(strategy)
    axes.plot(
        [places[point.num_devices] for point in fitting],
        [point.batch_per_device or 0 for point in fitting],
        color=color,
        marker=MARKERS.get(strategy, "v"),
        linestyle="none",
        label=f"{shortened(strategy, 20)} fits",
    )
    gaps = {
        count: pair
        for count in places
        if None not in (pair := frontier([p for p in points if p.num_devices == count]))
    }
    for count, (low, high) in gaps.items():
        axes.vlines(places[count], low or 0, high or 0, color=color, linewidth=5, alpha=0.3)
    return [(places[point.num_devices], point.batch_per_device or 0) for point in full]


def _crosses(axes: Axes, places: Sequence[float], heights: Sequence[float], **options: Any) -> None:
    """Where memory did not suffice."""
    color, label = BAD.light, "out of memory"
    axes.plot(places, heights, "X", color=color, markersize=7, label=label, zorder=4, **options)
