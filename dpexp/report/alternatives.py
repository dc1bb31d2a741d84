"""What the report's figures show, in words with the numbers: for who does not see them."""

from __future__ import annotations

from collections.abc import Sequence

from dpexp.report.bars import present_parts
from dpexp.report.capacity import frontier, scope_of, unit_of
from dpexp.report.figures import EFFICIENCY, Metric, interval, known
from dpexp.report.findings import Breakdown, MemoryPoint
from dpexp.report.numbers import milliseconds, ranged, significant
from dpexp.report.scaling import Cell
from dpexp.report.waterfall import PARTS, Waterfall, shown

MOST_POINTS = 12  # of a curve that are read out; the table has them all


def curves_text(cells: Sequence[Cell], metric: Metric) -> str:
    """The points of each strategy's curve, with their intervals."""
    curves: dict[str, list[Cell]] = {}
    for cell in sorted(known(cells, metric), key=lambda cell: cell.num_devices or 0):
        curves.setdefault(cell.parallel, []).append(cell)
    told = [
        f"{strategy}: {_some([_point(cell, metric) for cell in members])}."
        for strategy, members in curves.items()
    ]
    return " ".join([f"{metric.title} over devices, {metric.unit}.", *told])


def breakdown_text(breakdowns: Sequence[Breakdown]) -> str:
    """The parts of each cell's mean step."""
    parts = present_parts(breakdowns)
    told = [
        f"{each.folder}{', emulated' * each.emulated}: "
        + ", ".join(f"{shown(part)} {_ms(each.parts_s[part])}" for part in parts)
        + "."
        for each in breakdowns
    ]
    return " ".join(["Milliseconds of a mean step by what they are spent on.", *told])


def waterfall_text(name: str, fall: Waterfall) -> str:
    """From the ideal step to the cell's own."""
    parts = ", ".join(
        f"{shown(part)} {milliseconds(fall.parts_s[part], signed=True)}"
        for part in PARTS
        if fall.parts_s[part]
    )
    return (
        f"Milliseconds of a step of {name}: ideal {_ms(fall.ideal_s)}; {parts}; "
        f"mean {_ms(fall.step_s)}."
    )


def memory_text(points: Sequence[MemoryPoint]) -> str:
    """The peak at each number of devices, or that memory did not suffice."""
    name, unit = unit_of([point for point in points if not point.out_of_memory])
    told = []
    for strategy in dict.fromkeys(point.parallel for point in points):
        own = [point for point in points if point.parallel == strategy]
        texts = [
            f"{_peak(point, unit)} on {point.num_devices}"
            for point in sorted(own, key=lambda point: point.num_devices)
        ]
        told.append(f"{strategy}: {_some(texts)}.")
    return " ".join([f"Peak memory in {name} per {scope_of(points)} over devices.", *told])


def frontier_text(points: Sequence[MemoryPoint]) -> str:
    """The most rows per device that fit, and the fewest that did not."""
    told = []
    for strategy in dict.fromkeys(point.parallel for point in points):
        own = [point for point in points if point.parallel == strategy]
        counts = sorted({point.num_devices for point in own})
        texts = [_edge(n, [point for point in own if point.num_devices == n]) for n in counts]
        told.append(f"{strategy}: {_some(texts)}.")
    return " ".join(["Rows per device that fit into memory.", *told])


def _point(cell: Cell, metric: Metric) -> str:
    ends, factor = interval(cell, metric), 100.0 if metric is EFFICIENCY else 1.0
    value = getattr(cell, metric.field) * factor
    where = f" on {cell.num_devices}{', emulated' * cell.emulated}"
    if ends is None:
        return significant(value) + where
    return ranged(value, ends[0] * factor, ends[1] * factor) + where


def _edge(count: int, points: Sequence[MemoryPoint]) -> str:
    fits, full = frontier(points)
    first = "none fits" if fits is None else f"{fits} fit"
    return f"on {count} {first}" + ("" if full is None else f", {full} do not")


def _peak(point: MemoryPoint, unit: int) -> str:
    if point.out_of_memory:
        return "out of memory"
    return "unknown" if point.peak_bytes is None else significant(point.peak_bytes / unit)


def _some(texts: Sequence[str]) -> str:
    left = len(texts) - MOST_POINTS
    return "; ".join(texts[:MOST_POINTS]) + (f"; and {left} more" if left > 0 else "")


def _ms(seconds: float) -> str:
    return significant(seconds * 1e3)
