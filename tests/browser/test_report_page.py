"""report.html of a real sweep, as a person sees it: light, dark, on a phone, printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import make_content
from drawn import make_cell
from playwright.sync_api import Locator, Page

from dpexp.report.colors import BACKGROUND, INK, STRATEGIES
from dpexp.report.findings import Failure
from dpexp.report.page import html_page

# With --pictures the sweep is one to be looked at; without, the smallest that fills each section.
SMALL = ("task=train", "dataset.rows=120", "steps=4", "repeats=2")
LARGE = ("+experiment=scaling", "steps=60", "repeats=3")
GRID = ("parallel=none,dp,ddp", "num_devices=1,2")

OpenPage = Callable[..., Page]
Picture = Callable[[str, Page | Locator], None]

pytestmark = pytest.mark.timeout(600)  # the sweep for the pictures takes a minute or more


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The page of a sweep over strategies and devices."""
    folder = tmp_path_factory.mktemp("swept") / "strategies"
    size = SMALL if request.config.getoption("--pictures") is None else LARGE
    command = [sys.executable, "-m", "dpexp", "-m", *size, *GRID, f"hydra.sweep.dir={folder}"]
    ended = subprocess.run(
        command,
        cwd=folder.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr
    return folder / "report.html"


@pytest.fixture
def seen(report: Path, open_page: OpenPage) -> Iterator[OpenPage]:
    """Opens the page. It must ask for nothing but itself, and have no trouble."""
    address, trouble = report.as_uri(), []

    def opened(**options: Any) -> Page:
        page = open_page(**options)
        page.on("console", lambda message: trouble.append(message.text))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("request", lambda asked: trouble.append(asked.url))
        page.goto(address)
        return page

    yield opened
    assert set(trouble) == {address}


def colors(page: Page, what: str) -> dict[str, str]:
    """The colours of the first element that `what` selects, as the browser computes them."""
    found: dict[str, str] = page.locator(what).first.evaluate(
        "e => { const s = getComputedStyle(e);"
        " return {text: s.color, page: s.backgroundColor, stroke: s.stroke, fill: s.fill} }"
    )
    return found


def rgb(color: str) -> str:
    return f"rgb({', '.join(str(int(color[at : at + 2], 16)) for at in (1, 3, 5))})"


def sticks_out(page: Page) -> bool:
    """Whether the page as a whole can be scrolled sideways."""
    return bool(page.evaluate("document.documentElement.scrollWidth > innerWidth"))


def test_the_answer_the_cells_and_the_figures_are_shown(
    seen: OpenPage, report: Path, picture: Picture
) -> None:
    page = seen()
    answer = page.locator("header .answer")
    told = json.loads((report.parent / "sweep.json").read_text(encoding="utf-8"))
    assert answer.inner_text() == told["answers"][0]
    assert answer.bounding_box()["y"] < 200  # type: ignore[index]  # at once, without scrolling
    rows = page.locator("#scaling tbody tr")
    texts = [row.locator("th, td").all_inner_texts() for row in rows.all()]
    assert [row[0] for row in texts] == [cell["folder"] for cell in told["cells"]]
    assert sum("skipped" in row[-1] for row in texts) == 1  # none on two devices
    names = page.locator("figure h3").all_inner_texts()
    assert names[:4] == ["Throughput", "Speed-up", "Efficiency", "Mean step by part"]
    assert names[-1] == "Peak memory"
    for drawn in page.locator("figure svg").all():
        box = drawn.bounding_box()
        assert box is not None
        assert box["width"] > 250
        assert box["height"] > 150
    labels = page.locator("figure").first.locator("svg text").all_text_contents()
    assert {"none", "ddp", "dp (emulated)", "ideal", "devices"} <= set(labels)
    words = page.get_by_role("img").evaluate_all("all => all.map(e => e.ariaLabel)")
    assert len(words) == len(names)
    assert all(len(each) > 40 for each in words)
    assert "emulated" in page.locator("#warnings").inner_text()
    assert page.locator("#parity tbody tr").count() >= 3
    assert "python -m dpexp -m" in page.locator("#again pre").inner_text()
    page.locator("nav a[href='#memory']").click()
    assert page.locator("#memory").evaluate("e => e.getBoundingClientRect().top") < 300
    page.evaluate("scrollTo(0, 0)")
    picture("report", page)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_page_and_figures_are_in_the_colours_of_the_theme(
    seen: OpenPage, picture: Picture, theme: str
) -> None:
    page = seen(color_scheme=theme)
    found = colors(page, "body")
    assert found["text"] == rgb(getattr(INK, theme))
    assert found["page"] == rgb(getattr(BACKGROUND, theme))
    assert colors(page, "figure svg text")["fill"] == rgb(getattr(INK, theme))
    strokes = (
        page.locator("figure")
        .first.locator("svg path")
        .evaluate_all("all => all.map(e => getComputedStyle(e).stroke)")
    )
    assert rgb(getattr(STRATEGIES["ddp"], theme)) in strokes
    if theme == "dark":
        picture("report-dark", page)


def test_on_a_phone_only_tables_scroll_sideways(seen: OpenPage, picture: Picture) -> None:
    page = seen(viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True)
    assert not sticks_out(page)
    widths = page.locator("figure svg").evaluate_all(
        "all => all.map(e => e.getBoundingClientRect().width)"
    )
    assert all(300 < width <= 360 for width in widths)
    assert page.locator("#scaling .box").evaluate("e => e.scrollWidth > e.clientWidth")
    picture("report-phone", page)


def test_it_prints_on_a4_in_light_colours_with_nothing_cut(seen: OpenPage) -> None:
    width = round((210 - 2 * 14) / 25.4 * 96)  # A4 without its margins, in CSS pixels
    page = seen(color_scheme="dark", viewport={"width": width, "height": 1000})
    page.emulate_media(media="print")
    assert colors(page, "body")["text"] == rgb(INK.light)
    assert not sticks_out(page)
    cut = page.locator(".box, pre").evaluate_all(
        "all => all.filter(e => e.scrollWidth > e.clientWidth + 1).length"
    )
    assert cut == 0
    assert not page.locator("nav").is_visible()
    page.emulate_media()
    printed = page.pdf(prefer_css_page_size=True)
    assert printed.startswith(b"%PDF")
    assert printed.count(b"/Type /Page\n") >= 2


def test_a_traceback_is_folded_on_the_screen_and_whole_on_paper(page: Page) -> None:
    why = Failure("0_none_n1", "none-n1", "failed", "error", 0, None, 1, "no", "Traceback <b>\nx")
    cell = make_cell(speedup=None, status="failed")
    page.set_content(html_page(make_content([cell], failures=(why,))))
    trace = page.locator("details pre")
    assert not trace.is_visible()
    page.emulate_media(media="print")
    box = page.locator("details").bounding_box()
    assert box is not None
    assert box["height"] > 60  # the line to click on and two of the traceback
    page.emulate_media()
    page.get_by_text("Traceback", exact=True).click()
    assert trace.inner_text() == "Traceback <b>\nx"


def test_the_keyboard_reaches_the_content_and_the_tables(seen: OpenPage) -> None:
    page = seen()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "To the content"
    assert page.locator(".skip").bounding_box()["x"] >= 0  # type: ignore[index]
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('role')") == "region"
