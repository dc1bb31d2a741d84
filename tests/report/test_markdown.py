"""``report.md``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import make_content
from test_tables import CELL, END, FAILED, SKIP

from dpexp.report.findings import MemoryPoint, ShapeRow
from dpexp.report.markdown import escaped, markdown
from dpexp.report.tables import HEADER
from dpexp.report.waterfall import PARTS, Waterfall


def report(**content: Any) -> list[str]:
    return markdown(make_content(**{"cells": [CELL, FAILED], **content})).splitlines()


def section(lines: list[str], title: str) -> list[str]:
    """The lines below a heading, up to the next one."""
    start = lines.index(f"## {title}") + 1
    ends = [place for place, line in enumerate(lines) if place > start and line.startswith("## ")]
    return [line for line in lines[start : min(ends, default=len(lines))] if line]


def test_the_answer_comes_first_and_the_command_that_repeats_it_last() -> None:
    lines = report(answers=("ddp on 4: 3.4×", "1 of 2 cells failed"))
    assert lines[:5] == ["# Sweep x", "", "**ddp on 4: 3.4×**", "", "- 1 of 2 cells failed"]
    assert lines[-1] == "    python -m dpexp -m a=1,2"


def test_a_table_has_a_rule_and_a_row_per_cell() -> None:
    lines = report()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    table = lines[start : start + 4]
    assert (lines[start - 1], lines[start + 4]) == ("", "")
    assert table[1] == "|" + "---|" * len(HEADER)
    assert [line.count("|") for line in table] == [len(HEADER) + 1] * 4
    assert table[2].startswith("| 1 | dp emulated | 2 | 128 | 64 |")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a|b <script>\n# more", "a\\|b &lt;script&gt; # more"),
        ("`rm`", "\\`rm\\`"),
        ("&lt;", "&amp;lt;"),
        ("a\\|b", "a\\\\\\|b"),
        ("C:\\temp", "C:\\temp"),
        ("[x](javascript:1)", "[x]\\(javascript:1)"),
        ("[15, 5]", "[15, 5]"),
        ("\x1b[31m\u202e", "�[31m�"),
    ],
)
def test_text_of_users_breaks_no_table_and_is_no_markup(text: str, shown: str) -> None:
    assert escaped(text) == shown


def test_every_section_escapes_what_it_is_given() -> None:
    bad = "a|b <img src=x> `c`\nd"
    lines = report(
        title=bad,
        answers=(bad, bad),
        cells=[replace(CELL, setting=bad, folder=bad, notes=(bad,))],
        shapes=[ShapeRow(bad, bad, bad, 0, bad, bad, 1)],
        failures=[replace(END, folder=bad, message=bad, kind=bad, phase=bad)],
        parity=[(bad,) * 6],
        warnings=(bad,),
        environment=((bad, bad),),
        notes=((bad, bad),),
    )
    assert not [line for line in lines if "<img" in line or "a|b" in line or " `c`" in line]
    for title, columns in (("Failed or skipped", 6), ("Parity", 6), ("Shapes", 6)):
        table = section(lines, title)
        bars = [line.replace("\\|", "").count("|") for line in table]
        assert bars == [columns + 1] * 3


def test_what_failed_is_told_with_kind_rank_phase_and_step() -> None:
    table = section(report(failures=[END, SKIP]), "Failed or skipped")
    assert table[2:] == [
        "| 2_ddp_n2 | failed (user_error) | 1 | forward | 7 | a\\|b &lt;script&gt; |",
        "| 3_none_n2 | skipped (config) | – | – | – | one |",
    ]


def test_replicas_that_saw_the_same_share_a_row_of_shapes() -> None:
    rows = [
        ShapeRow("1_dp_n2", "dp-n2", module, replica, shape, "[2]", 3)
        for module, replica, shape in (
            ("", 0, "[15, 5]"),
            ("", 0, "[5, 5]"),
            ("", 1, "[15, 5]"),
            ("fc", 1, "[5, 5]"),
        )
    ]
    lines = section(report(shapes=rows, shapes_left=7), "Shapes")
    assert lines[2:] == [
        "| 1_dp_n2 | the model | 0, 1 | [15, 5] | [2] | 3 |",
        "| 1_dp_n2 | the model | 0 | [5, 5] | [2] | 3 |",
        "| 1_dp_n2 | fc | 1 | [5, 5] | [2] | 3 |",
        "and 7 more cells in their shapes.csv",
    ]


def test_where_the_time_went_is_a_row_of_milliseconds_per_compared_cell() -> None:
    parts = {**dict.fromkeys(PARTS, 0.0), "data": 0.002, "residual": 0.001}
    fall = Waterfall(0.010, 0.005, 0.008, 0.003, parts, 0)
    lines = section(report(cells=[replace(CELL, waterfall=fall)]), "Where the time went")
    row = next(line for line in lines if line.startswith("| 1_dp_n2"))
    assert row.startswith("| 1_dp_n2 | 8.000 | 5.000 | 3.000 | 2.000 | 0.000 |")
    assert row.endswith("| 1.000 |")
    assert lines[-1] == "- 1_dp_n2: 38% of a step is lost: data 25%; unexplained 12%"


def test_long_tables_and_lists_are_cut_and_say_where_the_rest_is() -> None:
    cells = [replace(CELL, folder=f"{n}_dp_n2", setting=f"seed={n}") for n in range(1000)]
    ends = [replace(END, folder=cell.folder) for cell in cells]
    lines = report(cells=cells, failures=ends, notes=[(c.folder, "a note") for c in cells])
    assert "and 900 more cells in summary.csv" in lines
    assert "and 900 more rows in sweep.json" in lines
    assert "and 900 more lines in sweep.json" in lines
    assert len(lines) < 600


def test_a_report_without_cells_says_so() -> None:
    lines = report(cells=[], answers=("no cell has run",), command="")
    assert lines == ["# Sweep x", "", "**no cell has run**", "",
                     "no scaling; speed-up against no cell that ran."]  # fmt: skip


def test_memory_over_devices_and_what_did_not_fit_are_a_table() -> None:
    points = [
        MemoryPoint("0_none_n1", "none", 1, "", 30, 100 * 2**20, "process", False),
        MemoryPoint("1_ddp_n2", "ddp", 2, "", 15, None, "process", True),
    ]
    table = section(report(memory=points), "Memory")
    assert table[-2:] == [
        "| 0_none_n1 | 1 | 100 | the process with the most |",
        "| 1_ddp_n2 | 2 | not known, ran out of memory | the process with the most |",
    ]
