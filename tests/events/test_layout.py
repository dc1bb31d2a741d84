"""The charts of the Custom Scalars tab: each shows tags that there are."""

from __future__ import annotations

import re
from typing import Any

from builders import make_record
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from dpexp.events.layout import run_layout, scaling_layout
from dpexp.records import COMM_PARTS, DP_PARTS
from dpexp.sinks.tensorboard import step_scalars


def charts(summary: Any) -> list[Any]:
    (value,) = summary.value
    layout = Layout.FromString(value.tensor.string_val[0])
    return [chart for category in layout.category for chart in category.chart]


def matched(chart: Any, tags: set[str]) -> set[str]:
    """As TensorBoard matches them: from the beginning of the tag."""
    return {tag for tag in tags for pattern in chart.multiline.tag if re.match(pattern, tag)}


def test_every_chart_of_a_run_shows_something_and_all_times_are_shown() -> None:
    parts = {f"{part}_s": 0.001 for part in COMM_PARTS}
    tags = set(step_scalars(make_record(0, **parts)))
    tags |= set(step_scalars(make_record(0, **{f"{part}_s": 0.001 for part in DP_PARTS})))
    shown = [matched(chart, tags) for chart in charts(run_layout())]
    assert all(shown)
    times = {tag for tag in tags if tag.startswith(("time/", "throughput/"))}
    assert set().union(*shown) == times - {"time/comm_overlapped_ms"}
    titles = [chart.title for chart in charts(run_layout())]
    assert len(set(titles)) == len(titles)


def test_the_curves_of_all_strategies_are_in_one_chart_each() -> None:
    names = ("samples_per_s", "speedup", "efficiency", "speedup_low", "speedup_high")
    tags = {f"scaling/{strategy}/{name}" for strategy in ("none", "ddp") for name in names}
    shown = [matched(chart, tags) for chart in charts(scaling_layout([]))]
    assert shown == [{f"scaling/{s}/{name}" for s in ("none", "ddp")} for name in names[:3]]


def test_intervals_have_a_chart_where_there_are_some() -> None:
    *_, banded = charts(scaling_layout(["ddp"]))
    (series,) = banded.margin.series
    assert (series.value, series.lower) == ("scaling/ddp/speedup", "scaling/ddp/speedup_low")
    assert series.upper == "scaling/ddp/speedup_high"
