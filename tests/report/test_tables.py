"""Tables for the console."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import make_content, make_run_result, make_summary
from rich.console import Console

from dpexp.report.findings import Failure
from dpexp.report.scaling import Cell
from dpexp.report.single import print_run
from dpexp.report.tables import (
    HEADER,
    cell_row,
    number_in,
    print_report,
    reasons,
    scaling_title,
)

CELL = Cell(
    folder="1_dp_n2",
    label="dp-n2",
    parallel="dp",
    num_devices=2,
    setting="",
    status="ok",
    reason=None,
    emulated=True,
    scaling="strong",
    batch_global=128,
    batch_per_device=64,
    step_p50_s=0.0123456,
    samples_per_s=10368.4,
    speedup=0.789,
    efficiency=0.3945,
    baseline="0_none_n1",
    peak_bytes=100,
    notes=("uneven chunks",),
)
FAILED = replace(
    CELL,
    folder="2_ddp_n2",
    label="ddp-n2",
    parallel="ddp",
    status="failed",
    reason="ValueError: a|b <script>\nmore lines",
    emulated=False,
    step_p50_s=None,
    samples_per_s=None,
    speedup=None,
    efficiency=None,
    baseline=None,
    notes=(),
)
SKIPPED = replace(FAILED, folder="3_none_n2", label="none-n2", status="skipped", reason="one")


END = Failure(
    "2_ddp_n2", "ddp-n2", "failed", "user_error", 1, "forward", 7, "a|b <script>\nmore", "Trace"
)
SKIP = replace(END, folder="3_none_n2", status="skipped", kind="config", message="one")
SKIP = replace(SKIP, rank=None, phase=None, step=None)


def printed(width: int, show: Any, *args: Any) -> str:
    file = io.StringIO()
    show(*args, Console(file=file, width=width))
    return file.getvalue()


def test_a_row_shows_figures_with_their_units() -> None:
    row = dict(zip(HEADER, cell_row(CELL), strict=True))
    assert row == {
        "#": "1",
        "parallel": "dp emulated",
        "dev.": "2",
        "batch": "128",
        "each": "64",
        "samples/s": "10,400",
        "ms/step": "12.3",
        "speedup": "0.79×",
        "eff.": "39%",
        "status": "ok",
    }


def test_what_is_not_known_is_a_dash_and_never_a_zero() -> None:
    row = dict(zip(HEADER, cell_row(FAILED), strict=True))
    figures = ("samples/s", "ms/step", "speedup", "eff.")
    assert [row[name] for name in figures] == ["–"] * 4
    assert row["status"] == "failed"


@pytest.mark.parametrize(
    ("cells", "title"),
    [
        ([CELL], "strong scaling; speed-up against 0_none_n1"),
        ([CELL, replace(CELL, scaling="weak", baseline="4_none_n1")], "strong and weak scaling; "),
        (
            [replace(CELL, baseline="10_none_n1"), replace(CELL, baseline="2_none_n1")],
            "strong scaling; speed-up against 2_none_n1, 10_none_n1",
        ),
        ([replace(CELL, baseline=None)], "strong scaling; speed-up against no cell that ran"),
        ([], "no scaling; speed-up against no cell that ran"),
    ],
)
def test_the_title_names_the_mode_and_the_baselines(cells: list[Cell], title: str) -> None:
    assert scaling_title(cells).startswith(title)


def test_each_run_that_ended_badly_is_told_with_what_is_known_of_its_end() -> None:
    bare = replace(SKIP, status="failed", kind=None, message="")
    assert reasons([END, SKIP, bare]) == [
        "2_ddp_n2: failed (user_error, rank 1, step 7, in forward): a|b <script>",
        "3_none_n2: skipped: one",
        "3_none_n2: failed: no reason recorded",
    ]


@pytest.mark.parametrize(
    ("folder", "number"), [("3_ddp_n2", "3"), ("a_b/3_ddp_n2", "a_b/3"), ("07-51", "07-51")]
)
def test_a_cells_number_is_that_in_its_sweep(folder: str, number: str) -> None:
    assert number_in(folder) == number


def test_a_large_sweep_is_cut_and_says_what_is_left_out() -> None:
    cells = [replace(CELL, folder=f"{place}_dp_n2", setting=f"seed={place}") for place in range(60)]
    lines = printed(120, print_report, make_content(cells)).splitlines()
    assert sum("emulated  " in line for line in lines) == 40
    assert "and 20 more cells in summary.csv" in lines
    assert "and 28 more lines of this kind in report.md" in lines
    assert len(lines) < 80


REPEATED = replace(
    CELL,
    repeats=4,
    folders=("1_dp_n2", "3_dp_n2", "5_dp_n2", "7_dp_n2"),
    speedup_low=0.7512,
    speedup_high=0.8287,
    speedup_scope="4 repeats",
    verdict="slower",
)


def test_a_row_of_repeats_shows_the_interval_and_how_many_ended_well() -> None:
    row = dict(zip(HEADER, cell_row(REPEATED), strict=True))
    assert (row["speedup"], row["status"]) == ("0.79× (0.75–0.83)", "4 ok")
    some = replace(REPEATED, repeats=3, status="failed", failures=("3_dp_n2: failed: why\nmore",))
    assert cell_row(some)[-1] == "3 of 4 ok"
    assert cell_row(replace(some, repeats=0))[-1] == "failed"


def test_a_table_with_intervals_fits_120_columns_and_what_they_say_stands_below() -> None:
    same = replace(REPEATED, folder="2_dp_n2", verdict="no measurable difference")
    shown = printed(120, print_report, make_content([REPEATED, same]))
    rows = [line for line in shown.splitlines() if "emulated" in line]
    assert len(rows) == 2
    assert all("0.79× (0.75–0.83)" in row and "…" not in row for row in rows)
    assert "2_dp_n2: no measurable difference from 0_none_n1" in shown


def test_the_scaling_table_fits_eighty_columns() -> None:
    shown = printed(80, print_report, make_content([CELL, FAILED], failures=[END]))
    table = [line for line in shown.splitlines() if "128" in line or "samples/s" in line]
    assert len(table) == 3
    assert all(len(line) <= 80 and "…" not in line for line in table)
    assert "2_ddp_n2: failed (user_error, rank 1, step 7, in forward): a|b <script>" in shown


def test_square_brackets_in_a_message_are_shown_and_not_read_as_markup() -> None:
    end = replace(END, message="input [1, 3] of [bold]layer[/bold]")
    shown = printed(120, print_report, make_content([FAILED], failures=[end]))
    assert "input [1, 3] of [bold]layer[/bold]" in shown


def shown_run(**changes: Any) -> str:
    result = make_run_result("dp", 2, **changes)
    return printed(120, print_run, result.to_dict(), Path("outputs/x"))


def test_a_run_shows_its_phases_in_order_and_dps_parts_below_forward() -> None:
    names = ("step", "data", "forward", "scatter", "gather", "backward", "other")
    shown = shown_run(timing={name: make_summary(0.0125) for name in names})
    lines = [line.split() for line in shown.splitlines()]
    rows = [line for line in lines if line and line[0] in names]
    assert [row[0] for row in rows] == list(names)
    assert rows[0][1:] == ["12.5000"] * 4


def test_a_run_says_what_it_measured_and_where_it_is() -> None:
    shown = shown_run(
        samples_seen=100,
        throughput={"samples_per_s": 1234.5},
        loss={"first": 2.0, "last": 0.5},
    )
    assert "dp-n2 on cpu, emulated: 3 measured steps after 1 of warm-up" in shown
    assert "batch 30 rows, 15 per device; 1,234 samples/s over all devices" in shown
    assert "100 samples seen; peak memory 200 MiB per process; loss 2 to 0.5" in shown
    assert " -m dpexp.board outputs/x" in shown


def test_a_run_without_measured_steps_shows_dashes() -> None:
    summary = make_summary(0.1)
    empty = replace(summary, mean_s=None, p50_s=None, p95_s=None, min_s=None, max_s=None, count=0)
    shown = shown_run(timing={"step": empty}, throughput={"samples_per_s": None})
    (row,) = [line.split() for line in shown.splitlines() if line.split()[:1] == ["step"]]
    assert row == ["step", "–", "–", "–", "–"]
    assert "– samples/s over all devices" in shown


def test_a_cell_without_speed_up_says_why() -> None:
    cell = replace(CELL, speedup=None, efficiency=None, reason="parity failed: losses differ")
    shown = printed(120, print_report, make_content([cell]))
    assert "1_dp_n2: no speed-up: parity failed: losses differ" in shown


def test_a_checked_run_shows_its_certificate() -> None:
    broken = {"verdict": "fail", "reason": "losses differ", "steps": 3}
    assert "parity: fail (3 steps): losses differ" in shown_run(parity=broken)
    assert "parity" not in shown_run()
