"""The page of a sweep with very many cells: no larger than can be read, and it says so."""

from __future__ import annotations

import time
from dataclasses import replace

from builders import make_content
from drawn import interval_of, make_breakdown, make_cell, make_failure, make_point, make_waterfall
from htmltree import Tree, in_section

from dpexp.report.content import Content
from dpexp.report.findings import ShapeRow
from dpexp.report.page import MOST_ROWS, html_page


def large(settings: int, strategies: int = 5) -> Content:
    """A content of `settings` times 20 cells."""
    cells = [
        make_cell(
            f"s{strategy}",
            count,
            1.0 + count / 4,
            folder=f"{setting}_{strategy}_n{count}",
            setting=f"batch_size={8 * (setting + 1)}",
            waterfall=make_waterfall(5, data=2),
            **interval_of(1 + count / 4, count),
        )
        for setting in range(settings)
        for strategy in range(strategies)
        for count in (1, 2, 4, 8)
    ]
    return make_content(
        cells,
        breakdowns=tuple(make_breakdown(cell.folder, data=1, forward=2) for cell in cells),
        memory=tuple(
            replace(
                make_point(c.parallel, c.num_devices or 1, 8, setting=c.setting), folder=c.folder
            )
            for c in cells
        ),
        shapes=tuple(
            ShapeRow(cell.folder, "x", f"m{n}", 0, "[1]", "[1]", 1)
            for cell in cells
            for n in range(9)
        ),
        failures=tuple(make_failure(cell.folder, traceback="x" * 50_000) for cell in cells),
        notes=tuple((cell.folder, "a note " * 20) for cell in cells),
    )


def test_the_page_of_100_cells_is_below_2_mb_and_shows_each() -> None:
    content = large(5)
    text = html_page(content)
    assert len(content.cells) == 100
    assert len(text.encode()) < 2_000_000
    rows = in_section(Tree(text).root, "scaling").all("tbody")[0].all("tr")
    assert len(rows) == 100


def test_the_page_of_1000_cells_is_no_larger_and_counts_what_it_leaves_out() -> None:
    content = large(50)
    start_s = time.process_time()
    text = html_page(content)
    assert time.process_time() - start_s < 5  # about one, of which most for the figures
    assert len(text.encode()) < 2_000_000
    root = Tree(text).root
    scaling = in_section(root, "scaling")
    assert len(scaling.all("tbody")[0].all("tr")) == MOST_ROWS
    assert "800 more rows are not shown; summary.csv has them all." in scaling.text()
    assert "Figures show the 3 of 50 settings that scale best" in scaling.text()
    assert "The figure shows 24 of 1000 cells" in in_section(root, "time").text()
    failures = in_section(root, "failures").text()
    assert "950 more are not shown" in failures
    assert "44,000 characters left out; run.json has them" in failures
