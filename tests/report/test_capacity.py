"""Memory over devices, and the frontier of what fits."""

from __future__ import annotations

import pytest
from drawn import make_point

from dpexp.report.capacity import (
    frontier,
    frontier_figure,
    frontier_groups,
    memory_figure,
    scope_of,
    unit_of,
)


def test_peaks_are_curves_and_what_ran_out_of_memory_is_a_cross() -> None:
    points = [
        make_point("ddp", 2, 8, 2.0),
        make_point("ddp", 1, 16, 3.0),
        make_point("dp", 2, 8, 1.5),
        make_point("none", 1, 16, None),
    ]
    (axes,) = memory_figure(points, {"0_dp_n2"}).axes
    found = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}  # type: ignore[union-attr]
    assert found == {
        "ddp": [[1, 3], [2, 2]],
        "dp (emulated)": [[2, 1.5]],
        "out of memory": [[1, 0.95]],  # of the panel's height
    }
    assert axes.get_ylabel() == "GiB per process"


def test_small_peaks_are_in_mebibytes() -> None:
    points = [make_point("none", 1, 8, 0.25)]
    assert unit_of(points) == ("MiB", 2**20)
    assert scope_of(points) == "process"


@pytest.mark.parametrize(
    ("rows", "full", "expected"),
    [
        ((64, 128), (256, 512), (128, 256)),
        ((64,), (), (64, None)),
        ((), (512, 256), (None, 256)),
        ((64, 256), (128, 512), (256, 512)),  # one that failed although more fitted
    ],
)
def test_the_frontier_lies_between_the_most_that_fit_and_the_fewest_that_did_not(
    rows: tuple[int, ...], full: tuple[int, ...], expected: tuple[int | None, int | None]
) -> None:
    points = [make_point("ddp", 2, n) for n in rows] + [make_point("ddp", 2, n, None) for n in full]
    assert frontier(points) == expected


def test_groups_differ_in_the_batch_alone_and_one_that_fits_has_no_frontier() -> None:
    points = [
        make_point("ddp", 2, 64, setting="batch_size=128,model=a"),
        make_point("ddp", 2, 128, None, setting="batch_size=256,model=a"),
        make_point("ddp", 2, 64, setting="batch_size=128,model=b"),
    ]
    assert frontier_groups(points) == {"model=a": points[:2]}


def test_the_frontier_is_a_shaded_gap_below_the_crosses() -> None:
    points = [make_point("ddp", 2, 64), make_point("ddp", 2, 128), make_point("ddp", 2, 512, None)]
    (axes,) = frontier_figure([*points, make_point("ddp", 4, 64)]).axes
    (gap,) = axes.collections
    assert gap.get_segments()[0][:, 1].tolist() == [128, 512]  # type: ignore[attr-defined]
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}  # type: ignore[union-attr]
    assert lines == {"ddp fits": [[0, 64], [0, 128], [1, 64]], "out of memory": [[0, 512]]}
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2", "4"]
