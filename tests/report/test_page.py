"""report.html: one file that stands alone, says all in words too, and runs nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from builders import make_content
from drawn import interval_of, make_breakdown, make_cell, make_failure, make_point, make_waterfall
from htmltree import Element, Tree, in_section

from dpexp.report import pictures
from dpexp.report.answers import best_of
from dpexp.report.cells import Run
from dpexp.report.content import Content
from dpexp.report.findings import ShapeRow
from dpexp.report.page import html_page

HOSTILE = "<script>alert(1)</script>\"' onload=x $a^{b$ &amp; \x00\u202e\nhttps://example.org/x"


def parsed(content: Content) -> Element:
    return Tree(html_page(content)).root


FULL = make_content(
    [
        make_cell(),
        make_cell("dp", 2, 0.5),
        make_cell("ddp", 2, 1.7, waterfall=make_waterfall(5, data=2), **interval_of(1.7, 2)),
        make_cell("ddp", 4, None, folder="3_ddp_n4", status="failed"),
    ],
    answers=("ddp on 2: 1.7× (1.5–1.9), 85 % efficient; loses most to data", "a caveat"),
    breakdowns=(make_breakdown("0_none_n1", data=1, forward=3), make_breakdown("0_dp_n2", data=1)),
    memory=(
        make_point("none", 1, 16),
        make_point("ddp", 2, 8, 0.5),
        make_point("ddp", 2, 16, None),
    ),
    shapes=(
        ShapeRow("0_dp_n2", "dp-n2", "", 0, "[8, 5]", "[8, 2]", 4),
        ShapeRow("0_dp_n2", "dp-n2", "", 1, "[8, 5]", "[8, 2]", 4),
    ),
    failures=(
        make_failure(),
        make_failure("4_none_n2", status="skipped", kind=None, message="one device only"),
    ),
    parity=(("0_dp_n2", "pass", "0 of 1e-06", "0 of 1", "0 of 1", ""),),
    warnings=("more devices than cores: 0_dp_n2",),
    environment=(("torch", "2.13.0"),),
    notes=(("0_dp_n2", "a note"),),
)


@pytest.fixture(scope="module")
def page() -> Element:
    return parsed(FULL)


def test_the_answer_comes_first_and_every_section_follows_in_order(page: Element) -> None:
    (title,) = page.all("h1")
    assert title.text() == "Sweep x"
    first, second, jump, *_ = page.all("p")
    assert first.text() == FULL.answers[0]
    assert second.text() == "a caveat"
    assert jump.text() == "1 run that did not end well and 1 warning"
    sections = [each.attributes["id"] for each in page.all("section")]
    assert sections == [
        "scaling",
        "time",
        "memory",
        "shapes",
        "parity",
        "failures",
        "warnings",
        "environment",
        "again",
    ]
    targets = [a.attributes["href"] for a in page.all("nav")[0].all("a")]
    assert targets == [f"#{name}" for name in sections]
    assert "python -m dpexp -m a=1,2" in in_section(page, "again").text()


def test_a_figure_stays_on_one_line_and_the_rest_of_the_answer_is_escaped() -> None:
    told = "a <b> on 2: 1.7× (1.5–1.9), 85 % (see a–b)"
    answer, *_ = parsed(replace(FULL, answers=(told,))).all("p")
    assert answer.text() == told
    assert [each.text() for each in answer.all("span")] == ["(1.5–1.9)", "85 %"]


def test_the_waterfall_is_of_a_cell_with_more_devices_than_its_baseline() -> None:
    fall = make_waterfall(5, data=2)
    one, two = make_cell("ddp", 1, 1.1, waterfall=fall), make_cell("ddp", 2, 1.0, waterfall=fall)
    runs = {cell.folder: Run() for cell in (one, two, make_cell())}
    assert best_of([make_cell(), one, two], runs) == two
    assert best_of([make_cell(), one], runs) == one


def test_headings_are_ordered_and_each_section_says_what_it_shows(page: Element) -> None:
    levels = [int(each.tag[1]) for each in page.all("*") if re.fullmatch("h[1-6]", each.tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    for section in page.all("section"):
        assert len(section.all("h2")) == 1
        assert section.all("p")[0].text().endswith(".")


def test_each_figure_has_a_caption_and_its_numbers_in_words(page: Element) -> None:
    figures = {each.all("h3")[0].text(): each for each in page.all("figure")}
    assert list(figures) == [
        "Throughput",
        "Speed-up",
        "Efficiency",
        "Mean step by part",
        "From the ideal step to that of 0_ddp_n2",
        "Peak memory",
        "Out-of-memory frontier",
    ]
    told = {}
    for name, figure in figures.items():
        (image,) = [each for each in figure.all("div") if each.attributes.get("role") == "img"]
        assert len(image.all("svg")) == 1
        assert figure.all("figcaption")[0].text().strip()
        told[name] = image.attributes["aria-label"]
    assert told["Speed-up"] == (
        "Speed-up over devices, × baseline. none: 1.00 on 1. dp: 0.500 on 2, emulated. "
        "ddp: 1.7 (1.5–1.9) on 2."
    )
    assert told["Mean step by part"] == (
        "Milliseconds of a mean step by what they are spent on. "
        "0_none_n1: data 1.00, forward 3.00. 0_dp_n2: data 1.00, forward 0."
    )
    assert told["Peak memory"] == (
        "Peak memory in GiB per process over devices. none: 1.00 on 1. "
        "ddp: 0.500 on 2; out of memory on 2."
    )
    assert told["Out-of-memory frontier"] == (
        "Rows per device that fit into memory. none: on 1 16 fit. ddp: on 2 8 fit, 16 do not."
    )
    assert told["From the ideal step to that of 0_ddp_n2"] == (
        "Milliseconds of a step of 0_ddp_n2: ideal 5.00; data +2; mean 7.00."
    )


def test_tables_have_heads_with_a_scope_and_a_row_per_cell(page: Element) -> None:
    for table in page.all("table"):
        heads = table.all("thead")[0].all("th")
        assert {head.attributes["scope"] for head in heads} == {"col"}
        for row in table.all("tbody")[0].all("tr"):
            assert [each.attributes["scope"] for each in row.all("th")] == ["row"]
            assert len(row.children) == len(heads)
    rows = in_section(page, "scaling").all("tbody")[0].all("tr")
    assert [row.children[0].text() for row in rows] == [cell.folder for cell in FULL.cells]
    assert [row.children[-1].text() for row in rows] == ["✓ ok", "✓ ok", "✓ ok", "✗ failed"]
    assert in_section(page, "shapes").all("td")[1].text() == "0, 1"


def test_why_a_cell_has_no_speedup_is_told_below_the_table() -> None:
    first, *others = FULL.cells
    again = replace(first, status="ok", reason="started again 1 time")
    told = in_section(parsed(replace(FULL, cells=(again, *others))), "scaling").text()
    assert f"{first.folder}: no speed-up: started again 1 time" in told


def test_a_failure_is_told_with_its_cause_and_place(page: Element) -> None:
    section = in_section(page, "failures")
    (failed,) = section.all("ul")[0].all("li")
    assert failed.all("h3")[0].text() == "✗ failed: 3_ddp_n4"
    assert "oom, rank 1, in forward, step 3" in failed.text()
    assert failed.all("pre")[0].text() == "Traceback\n  in f\n"
    assert "4_none_n2: one device only" in section.all("ul")[1].text()


def test_the_page_loads_nothing_leads_nowhere_and_runs_nothing(page: Element) -> None:
    assert page.all("html")[0].attributes["lang"] == "en"
    policy = [each for each in page.all("meta") if "http-equiv" in each.attributes]
    assert [each.attributes["content"] for each in policy] == [
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    ]
    assert page.all("script") == page.all("link") == page.all("img") == page.all("iframe") == []
    for each in page.all("*"):
        for name, value in each.attributes.items():
            assert not name.startswith("on")
            assert name not in ("src", "xlink:href")
            assert name != "href" or (value or "").startswith("#")
    text = html_page(FULL)
    assert re.findall(r"https?:|//|url\((?!#)|@import", text) == []


def test_every_link_has_a_target_and_every_identifier_is_one(page: Element) -> None:
    names = [each.attributes["id"] for each in page.all("*") if "id" in each.attributes]
    assert len(set(names)) == len(names)
    targets = {(each.attributes.get("href") or "#main")[1:] for each in page.all("*")}
    assert targets <= set(names)


def test_hostile_texts_are_shown_as_texts() -> None:
    cells = [make_cell(), make_cell(HOSTILE, 2, 2.0, folder=HOSTILE, setting="", status="failed")]
    content = make_content(
        cells,
        title=HOSTILE,
        answers=(HOSTILE,),
        command=HOSTILE,
        breakdowns=(make_breakdown(HOSTILE, data=1),),
        memory=(replace(make_point("none", 1, 4), parallel=HOSTILE),),
        shapes=(ShapeRow(HOSTILE, HOSTILE, HOSTILE, 0, HOSTILE, HOSTILE, 1),),
        failures=(make_failure(HOSTILE, message=HOSTILE, traceback=HOSTILE, kind=HOSTILE),),
        parity=((HOSTILE,) * 6,),
        warnings=(HOSTILE,),
        environment=((HOSTILE, HOSTILE),),
        notes=((HOSTILE, HOSTILE),),
    )
    text = html_page(content)
    root = Tree(text).root
    assert root.all("script") == []
    assert not [name for each in root.all("*") for name in each.attributes if name.startswith("on")]
    assert "\x00" not in text
    assert "\u202e" not in text
    assert re.findall(r"https?:", text) == []
    assert root.all("figure")[0].all("svg")  # the figures could be drawn
    assert root.all("h1")[0].text() == HOSTILE.replace("\x00", "\\u0000").replace(
        "\u202e", "\\u202e"
    )


def test_a_figure_that_fails_leaves_a_place_that_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no <room>")

    monkeypatch.setattr(pictures, "breakdown_figure", broken)
    root = parsed(FULL)
    section = in_section(root, "time")
    assert "could not be drawn: ValueError: no <room>" in section.all("figure")[0].text()
    assert len(section.all("svg")) == 1  # the other one
    assert "figure breakdown of the report could not be drawn" in caplog.text


def test_an_empty_report_says_that_there_is_nothing() -> None:
    root = parsed(make_content([make_cell(speedup=None, status="failed")], command=""))
    for name, text in (
        ("time", "No cell has timings."),
        ("memory", "No cell has a figure of memory."),
        ("shapes", "No shapes were recorded."),
        ("parity", "Parity was not checked."),
        ("failures", "No run failed."),
        ("warnings", "No warning."),
        ("again", "The command is not known."),
    ):
        assert text in in_section(root, name).text()
    assert root.all("figure") == []
