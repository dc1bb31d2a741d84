"""The bars: parts that add up, in the same colours everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from drawn import make_breakdown, make_waterfall
from matplotlib.patches import Rectangle

from dpexp.report.bars import breakdown_figure, present_parts, waterfall_figure
from dpexp.report.colors import PARTS
from dpexp.report.waterfall import WAITING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def filled(axes: Axes) -> list[Rectangle]:
    return [patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.get_fill()]


def color(patch: Rectangle) -> Any:
    from matplotlib.colors import to_hex

    return to_hex(patch.get_facecolor())


BREAKDOWNS = [
    make_breakdown("0_none_n1", data=1, forward=3, backward=5, other=1),
    make_breakdown("1_dp_n2", emulated=True, forward=4, exposed_communication=2, other=-0.5),
]


def test_each_bar_adds_up_to_the_mean_step_and_what_is_negative_lies_left_of_zero() -> None:
    (axes,) = breakdown_figure(BREAKDOWNS).axes
    for row, step_ms in ((0, 10.0), (1, 5.5)):
        bars = [bar for bar in filled(axes) if round(bar.get_y() + bar.get_height() / 2) == row]
        assert sum(bar.get_width() for bar in bars) == pytest.approx(step_ms)
        right = max(bar.get_x() + bar.get_width() for bar in bars)
        left = min(bar.get_x() + min(0, bar.get_width()) for bar in bars)
        assert (left, right) == pytest.approx((0, 10) if row == 0 else (-0.5, 6))
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "0_none_n1",
        "1_dp_n2 (emul.)",
    ]


def test_parts_that_no_cell_has_are_left_out_and_each_has_its_colour() -> None:
    assert present_parts(BREAKDOWNS) == [
        "data",
        "forward",
        "backward",
        "exposed_communication",
        "other",
    ]
    (axes,) = breakdown_figure(BREAKDOWNS).axes
    found = {str(bars.get_label()): color(bars.patches[0]) for bars in axes.containers[:5]}
    assert found == {
        part.replace("_", " "): PARTS[part].light for part in present_parts(BREAKDOWNS)
    }


def test_an_emulated_cell_has_a_dashed_outline_and_a_real_one_has_not() -> None:
    (axes,) = breakdown_figure(BREAKDOWNS).axes
    (outline,) = [patch for patch in axes.patches if not patch.get_fill()]
    assert isinstance(outline, Rectangle)
    assert outline.get_linestyle() == "--"
    assert (outline.get_x(), outline.get_width()) == pytest.approx((-0.5, 6.5))
    assert round(outline.get_y() + outline.get_height() / 2) == 1


def test_a_waterfall_leads_from_the_ideal_step_to_the_own_one() -> None:
    parts = {"exposed_communication": 3.0, WAITING: 1.0, "residual": -0.5}
    (axes,) = waterfall_figure(make_waterfall(10.0, **parts)).axes
    spans = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in filled(axes)]
    assert spans == [
        pytest.approx(span) for span in ((0, 10), (10, 13), (13, 14), (14, 13.5), (0, 13.5))
    ]
    assert color(filled(axes)[1]) == PARTS["exposed_communication"].light
    assert color(filled(axes)[2]) == PARTS["waiting"].light
    assert [text.get_text() for text in axes.texts] == ["10", "+3", "+1", "-0.5", "13.5"]
    assert axes.get_xlim()[1] > 14  # room for the figures beside the bars


def test_a_part_that_is_0_in_the_decimals_of_the_step_has_no_bar() -> None:
    parts = {"data": 0.00014, "backward": 0.859, "residual": 7e-15}
    (axes,) = waterfall_figure(make_waterfall(47.9, **parts)).axes
    assert [text.get_text() for text in axes.texts] == ["47.9", "+0.859", "48.8"]
    (axes,) = waterfall_figure(make_waterfall(1234.4, data=1000)).axes
    assert [text.get_text() for text in axes.texts] == ["1,234", "+1,000", "2,234"]
