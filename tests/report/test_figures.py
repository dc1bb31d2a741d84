"""The curves: what is drawn where, and files that need nothing but themselves."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import matplotlib
import pytest
from drawn import interval_of, make_cell
from PIL import Image

from dpexp.comparing import WITHIN
from dpexp.report.colors import strategy_color
from dpexp.report.figures import (
    EFFICIENCY,
    SPEEDUP,
    THROUGHPUT,
    curves_figure,
    png,
    svg,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CELLS = [
    make_cell(),
    make_cell("dp", 2, 0.5),
    make_cell("dp", 4, 0.25),
    make_cell("ddp", 4, 3.4, **interval_of(3.4, 4)),
    make_cell("ddp", 2, 1.8, **interval_of(1.8, 2)),
    make_cell("none", 2, None, status="skipped"),
]


def curves(axes: Axes) -> dict[str, list[tuple[float, float]]]:
    """The points by the name in the legend."""
    return {
        str(line.get_label()): [(float(x), float(y)) for x, y in zip(*line.get_data(), strict=True)]
        for line in axes.lines
    }


@pytest.mark.parametrize(
    ("metric", "dp", "ddp", "ideal"),
    [
        (THROUGHPUT, [50, 25], [180, 340], [100, 200, 400]),
        (SPEEDUP, [0.5, 0.25], [1.8, 3.4], [1, 2, 4]),
        (EFFICIENCY, [25, 6.25], [90, 85], [100, 100, 100]),
    ],
    ids=lambda value: getattr(value, "title", None),
)
def test_points_lie_at_their_devices_in_order_and_the_ideal_follows_the_baseline(
    metric: Any, dp: list[float], ddp: list[float], ideal: list[float]
) -> None:
    (axes,) = curves_figure(CELLS, metric).axes
    found = curves(axes)
    assert found["dp (emulated)"] == [(2, dp[0]), (4, pytest.approx(dp[1]))]
    assert found["ddp"] == [(2, pytest.approx(ddp[0])), (4, pytest.approx(ddp[1]))]
    assert found["ideal"] == [(n, pytest.approx(y)) for n, y in zip((1, 2, 4), ideal, strict=True)]
    assert len(found["none"]) == 1
    assert [float(tick) for tick in axes.get_xticks()] == [1, 2, 4]
    assert axes.get_ylim()[0] == 0


def test_a_cell_that_did_not_run_in_one_go_has_no_point() -> None:
    cells = [make_cell(), make_cell("ddp", 2, 1.8), make_cell("ddp", 4, 3.4, steady=False)]
    assert curves(curves_figure(cells, THROUGHPUT).axes[0])["ddp"] == [(2, pytest.approx(180))]


def test_emulated_devices_are_hollow_and_dashed_and_others_are_not() -> None:
    lines = {line.get_label(): line for line in curves_figure(CELLS, SPEEDUP).axes[0].lines}
    assert lines["dp (emulated)"].is_dashed()
    assert lines["dp (emulated)"].get_markerfacecolor() == "#ffffff"
    assert not lines["ddp"].is_dashed()
    assert lines["ddp"].get_markerfacecolor() == strategy_color("ddp")
    assert lines["ddp"].get_marker() != lines["dp (emulated)"].get_marker()


def test_bands_are_those_of_repeats_and_not_those_within_one_run() -> None:
    (axes,) = curves_figure(CELLS, SPEEDUP).axes
    band, whiskers = axes.collections
    assert band.get_datalim(axes.transData).extents == pytest.approx([2, 1.62, 4, 3.74])
    ends = [segment[:, 1].tolist() for segment in whiskers.get_segments()]  # type: ignore[attr-defined]
    assert ends == [pytest.approx([1.62, 1.98]), pytest.approx([3.06, 3.74])]
    once = make_cell("ddp", 2, 1.8, **interval_of(1.8, 2, WITHIN))
    assert len(curves_figure([make_cell(), once], SPEEDUP).axes[0].collections) == 0


def test_a_band_that_says_nothing_does_not_press_the_points_to_the_ground() -> None:
    wide = make_cell("ddp", 2, 1.8, **interval_of(1.8, 2) | {"speedup_high": 1000.0})
    (axes,) = curves_figure([make_cell(), wide], SPEEDUP).axes
    assert axes.get_ylim()[1] < 4


def test_many_devices_are_drawn_on_logarithmic_axes() -> None:
    cells = [make_cell(), *(make_cell("ddp", 2**k, 1.8**k) for k in range(1, 7))]
    (axes,) = curves_figure(cells, SPEEDUP).axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert curves_figure(cells, EFFICIENCY).axes[0].get_yscale() == "linear"
    many = [make_cell("ddp", n, 1.0) for n in range(1, 1001)]
    assert len(curves(curves_figure(many, SPEEDUP).axes[0])["ddp"]) <= 60


def test_a_png_is_on_white() -> None:
    image = Image.open(io.BytesIO(png(curves_figure(CELLS, SPEEDUP)))).convert("RGB")
    assert image.getpixel((1, 1)) == (255, 255, 255)
    assert image.width > 400


def test_cells_without_a_figure_leave_a_panel_that_says_so() -> None:
    cells = [make_cell(speedup=None)]
    assert "no cell has this figure" in svg(curves_figure(cells, SPEEDUP), "x")


def test_an_svg_stands_alone_and_is_the_same_each_time() -> None:
    drawn = svg(curves_figure(CELLS, SPEEDUP), "a")
    assert drawn == svg(curves_figure(CELLS, SPEEDUP), "a")
    assert "http" not in drawn
    assert re.findall(r"#[0-9a-f]{6}", drawn) == []  # every colour is the page's
    assert "var(--strategy-ddp)" in drawn
    identifiers = re.findall(r'id="([^"]*)"', drawn)
    assert all(name.startswith("a-") for name in identifiers)
    assert set(re.findall(r'(?:href="|url\()#([^")]*)', drawn)) == set(identifiers)
    assert "dp (emulated)</text>" in drawn
    assert len(drawn) < 20_000


def test_hostile_names_are_text_in_a_figure() -> None:
    name = "<script>alert(1)</script> $x^{2$ & \x00\n\u202e 名"
    drawn = svg(curves_figure([make_cell(), make_cell(name, 2)], SPEEDUP), "a")
    assert "<script" not in drawn
    assert "&lt;script&gt;" in drawn
    assert "\x00" not in drawn
    assert "\u202e" not in drawn


def test_the_users_settings_of_matplotlib_neither_matter_nor_change() -> None:
    expected = svg(curves_figure(CELLS, SPEEDUP), "a")
    with matplotlib.rc_context({"text.usetex": True, "axes.grid": False, "font.size": 30}):
        before = dict(matplotlib.rcParams)
        assert svg(curves_figure(CELLS, SPEEDUP), "a") == expected
        assert dict(matplotlib.rcParams) == before


def test_drawing_needs_no_pyplot_and_loading_the_page_no_matplotlib() -> None:
    code = (
        "import sys; import dpexp.report.page; assert 'matplotlib' not in sys.modules\n"
        "from dpexp.report.figures import *\n"
        "png(curves_figure([], SPEEDUP)); assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
