"""The charts of TensorBoard's Custom Scalars tab.

TensorBoard joins the layouts of all runs: categories of the same title become one, with each chart
once. So every run of a folder may bring the same charts.
"""

from __future__ import annotations

from collections.abc import Sequence

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.custom_scalar.layout_pb2 import (
    Category,
    Chart,
    Layout,
    MarginChartContent,
    MultilineChartContent,
)
from tensorboard.plugins.custom_scalar.metadata import CONFIG_SUMMARY_TAG, create_summary_metadata

from dpexp.events.file import string_value
from dpexp.records import DP_PARTS, PHASES


def run_layout() -> Summary:
    """Where a run's steps go, and its throughput. The same for every run."""
    waits = [
        _lines("exposed communication (ms)", "time/comm_exposed_ms$"),
        _lines("waiting for the slowest rank (ms)", "time/straggler_wait_ms$"),
    ]
    return _summary(
        Category(
            title="Time and throughput, over the steps",
            chart=[
                _lines("step (ms)", "time/step_ms$"),
                _lines("its phases (ms)", f"time/({'|'.join(PHASES)})_ms$"),
                *waits,
                _lines("dp: the parts of forward (ms)", f"time/({'|'.join(DP_PARTS)})_ms$"),
                _lines("samples/s over all devices", "throughput/samples_per_s$"),
            ],
        ),
        # With several runs a chart of all phases has many lines. Loaded when it is opened.
        Category(
            title="Phase by phase, over the steps",
            chart=[_lines(f"{phase} (ms)", f"time/{phase}_ms$") for phase in PHASES],
            closed=True,
        ),
    )


def scaling_layout(banded: Sequence[str]) -> Summary:
    """The curves of a sweep over the number of devices.

    Args:
        banded: the strategies whose speed-ups all have an interval.
    """
    charts = [
        _lines("samples/s over all devices", "scaling/[^/]+/samples_per_s$"),
        _lines("speed-up against the baseline", "scaling/[^/]+/speedup$"),
        _lines("efficiency (1 = perfect scaling)", "scaling/[^/]+/efficiency$"),
    ]
    if banded:
        series = [
            MarginChartContent.Series(
                value=f"scaling/{name}/speedup",
                lower=f"scaling/{name}/speedup_low",
                upper=f"scaling/{name}/speedup_high",
            )
            for name in banded
        ]
        content = MarginChartContent(series=series)
        charts.append(Chart(title="speed-up with its 95 % interval", margin=content))
    return _summary(Category(title="Scaling, over the number of devices", chart=charts))


def _lines(title: str, pattern: str) -> Chart:
    """A chart of all tags that match a regular expression from their beginning."""
    return Chart(title=title, multiline=MultilineChartContent(tag=[pattern]))


def _summary(*categories: Category) -> Summary:
    content = Layout(category=categories).SerializeToString()
    return Summary(value=[string_value(CONFIG_SUMMARY_TAG, content, create_summary_metadata())])
