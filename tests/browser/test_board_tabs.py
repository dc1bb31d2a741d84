"""What a person sees of a real sweep in TensorBoard, started by ``python -m dpexp.board``."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

import dpexp
from dpexp import server

GRID = ("parallel=none,dp,ddp", "num_devices=1,2,3", "+experiment=digits", "steps=30")
# The third rank of ddp on three devices fails in its tenth step.
MODEL = ("model=custom", "model._target_=usercode.FailingCnn", "+model.how=raise")
FAILS = (*MODEL, "+model.rank=2", "+model.call=9", "check.parity=false", "measure.flops=false")
SKIPPED = {"1_none_n2", "2_none_n3"}
OK = {"0_none_n1", "3_dp_n1", "4_dp_n2", "5_dp_n3", "6_ddp_n1", "7_ddp_n2"}
FAILED = {"8_ddp_n3"}
WAIT_MS = 20_000

Picture = Callable[[str, Page | Locator], None]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory, browser: Any) -> Path:
    """A sweep with a cell that fails and two that are skipped. Without a browser nobody sees it."""
    server.start(several_ranks=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        done = dpexp.sweep([*GRID, *FAILS], folder=tmp_path_factory.mktemp("board") / "sweep")
    assert {cell.folder: cell.status for cell in done.cells} == {
        **dict.fromkeys(OK, "ok"),
        **dict.fromkeys(SKIPPED, "skipped"),
        **dict.fromkeys(FAILED, "failed"),
    }
    return done.folder


@pytest.fixture(scope="module")
def link(sweep: Path) -> Iterator[str]:
    """What the command prints; TensorBoard keeps the tab in the address behind the "#"."""
    command = [sys.executable, "-m", "dpexp.board", sweep.name, "--port", "0"]
    with subprocess.Popen(command, cwd=sweep.parent, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        yield found[0]
        process.terminate()
        assert process.wait(timeout=20) == 0


def at(link: str, tab: str) -> str:
    return f"{link.partition('#')[0]}#{tab}"


def rows_of(table: Locator) -> list[list[str]]:
    """The texts of a table that is drawn by places, line by line, from left to right."""
    cells = table.locator("vaadin-grid-cell-content").evaluate_all(
        "all => all.map(e => [e.getBoundingClientRect(), e.innerText.trim()])"
        ".filter(([box, text]) => box.width > 0 && text)"
        ".map(([box, text]) => [Math.round(box.top), box.left, text])"
    )
    lines: dict[int, list[tuple[float, str]]] = {}
    for top, left, text in cells:
        lines.setdefault(top, []).append((left, text))
    return [[text for _, text in sorted(line)] for _, line in sorted(lines.items())]


def test_time_series_shows_a_curve_per_run_under_the_name_of_its_cell(
    page: Page, link: str
) -> None:
    page.goto(at(link, "timeseries"))
    page.get_by_role("combobox", name="Filter tags (regex)").fill("^time/step_ms")
    card = page.locator("scalar-card").filter(has_text="step_ms")
    expect(card).to_have_count(1)
    for name in OK | FAILED:
        expect(card.get_by_text(name, exact=True)).to_be_visible()
    runs = page.locator("runs-data-table")
    for name in {*OK, *FAILED, *SKIPPED, "scaling"}:
        expect(runs.get_by_text(name, exact=True)).to_be_visible()


def test_custom_scalars_shows_times_and_the_curves_over_devices(
    page: Page, link: str, picture: Picture
) -> None:
    page.set_viewport_size({"width": 1520, "height": 1200})
    page.goto(link)
    charts = page.locator("tf-custom-scalar-multi-line-chart-card")
    lines = {
        "step (ms)": 7,  # a curve for each run that has steps
        "its phases (ms)": 7 * 6,
        "exposed communication (ms)": 4,  # dp and ddp on two and three devices
        "waiting for the slowest rank (ms)": 2,
        "dp: the parts of forward (ms)": 2 * 4,
        "speed-up against the baseline": 3,  # a curve for each strategy
        "efficiency (1 = perfect scaling)": 3,
    }
    for title, count in lines.items():
        chart = charts.filter(has_text=title)
        chart.scroll_into_view_if_needed()
        expect(chart).to_contain_text(f"Matches ({count})", timeout=WAIT_MS)
    expect(charts.filter(has_text="samples/s over all devices")).to_have_count(2)
    expect(page.get_by_text("Scaling, over the number of devices")).to_be_visible()
    page.get_by_text("Ignore outliers in chart scaling").click()
    page.get_by_text("Time and throughput, over the steps").scroll_into_view_if_needed()
    expect(page.locator("tf-custom-scalar-dashboard tf-smoothing-input input")).to_have_value("0")
    picture("tensorboard-custom-scalars", page)


def test_hparams_has_a_row_per_cell_with_the_same_columns(
    page: Page, link: str, picture: Picture
) -> None:
    page.set_viewport_size({"width": 1440, "height": 720})
    page.goto(at(link, "hparams"))
    table = page.locator("tf-hparams-table-view")
    expect(table.get_by_text("8_ddp_n3", exact=True)).to_be_visible(timeout=WAIT_MS)
    rows = {row[0]: row for row in rows_of(table)}
    columns = ["batch_size_global", "num_devices", "overrides", "parallel", "status"]
    assert [text for text in rows["Trial ID"] if text in columns] == columns
    assert "samples/s" in rows["Trial ID"]
    shown = {name: row for name, row in rows.items() if re.fullmatch(r"\d+_\w+_n\d+", name)}
    assert set(shown) == OK | FAILED | SKIPPED
    for name, row in shown.items():
        state = "ok" if name in OK else "failed" if name in FAILED else "skipped"
        assert state in row
        assert name.split("_")[1] in row
        # The figure stands behind the status, where there is one.
        assert (len(row) > row.index(state) + 1) == (name in OK)
    picture("tensorboard-hparams", page)


def test_images_shows_the_curves_over_devices(page: Page, link: str) -> None:
    page.goto(at(link, "images"))
    pictures = page.locator("tf-image-loader img")
    expect(pictures).to_have_count(3, timeout=WAIT_MS)
    for index in range(3):
        expect(pictures.nth(index)).to_be_visible()
        assert pictures.nth(index).evaluate("e => e.decode().then(() => e.naturalWidth)") > 300


@pytest.mark.parametrize(
    ("tag", "run", "element", "shown"),
    [
        ("config", "4_dp_n2", "pre", ["strategy: dp", "steps: 30", "how: raise"]),
        ("environment", "4_dp_n2", "pre", ["torch:", "cores:"]),
        ("shapes", "4_dp_n2", "table", ["module", "[64, 1, 8, 8]", "[64, 10]"]),
        ("error", "8_ddp_n3", "pre", ["failed: ValueError: boom", "Traceback"]),
        ("config", "1_none_n2", "pre", ["strategy: none"]),
    ],
)
def test_text_has_config_environment_shapes_and_errors_as_blocks_and_tables(
    page: Page, link: str, tag: str, run: str, element: str, shown: list[str]
) -> None:
    page.goto(at(link, "text"))
    page.locator("tf-text-dashboard input").nth(1).fill(f"^{tag}/")  # the first one filters runs
    # The tags that were found come first, then the categories as before.
    block = page.locator("tf-text-loader").filter(has_text=run).first.locator(element)
    expect(block).to_have_count(1, timeout=WAIT_MS)
    for text in shown:
        expect(block).to_contain_text(text)
