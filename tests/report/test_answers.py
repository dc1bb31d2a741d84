"""What a sweep says in sentences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_tables import CELL

from dpexp.report.answers import answers_of
from dpexp.report.findings import Failure
from dpexp.report.scaling import Cell
from dpexp.report.waterfall import PARTS, WAITING, Waterfall

DISTURBED = "more than ideal, so the baseline was disturbed: measure again on an idle machine"
NONE = replace(
    CELL, folder="0_none_n1", parallel="none", num_devices=1, emulated=False, speedup=1.0,
    efficiency=1.0, samples_per_s=9876.5, folders=("0_none_n1",), notes=(),
)  # fmt: skip


def losing(part: str, share: float = 0.14, **parts: float) -> Waterfall:
    """A step of 10 ms that loses so much to one part."""
    lost = {**dict.fromkeys(PARTS, 0.0), **parts, part: share * 0.010}
    return Waterfall(0.020, 0.005, 0.010, sum(lost.values()), lost, 0)


def ddp(devices: int = 4, speedup: float = 3.4, **changes: Any) -> Cell:
    """A cell with repeats, faster than NONE, that loses to communication."""
    folder = f"{devices}_ddp_n{devices}"
    repeats = {"repeats": 5, "speedup_scope": "5 repeats", "verdict": "faster"}
    ends = {"speedup_low": speedup * 0.97, "speedup_high": speedup * 1.03}
    lost = {"efficiency": speedup / devices, "waterfall": losing("exposed_communication")}
    base = replace(
        NONE, folder=folder, folders=(folder,), parallel="ddp", num_devices=devices, speedup=speedup
    )
    return replace(base, **{**repeats, **ends, **lost, **changes})


def answers(*cells: Cell, failures: tuple[Failure, ...] = (), **run: Any) -> tuple[str, ...]:
    known = {"config": {"task": "train"}, **run}
    return answers_of(cells, {name: known for cell in cells for name in cell.folders}, failures)


def test_the_answer_is_the_best_cell_with_its_interval_efficiency_and_largest_loss() -> None:
    assert answers(NONE, ddp(2, 1.9), ddp(), ddp(8, 3.1)) == (
        "ddp on 4: 3.4× (3.3–3.5), 85 % efficient; loses most to exposed communication",
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"speedup_scope": "within one run", "verdict": "one run each: repeats are needed"},
            "3.40× (one run each: no interval), 85 % efficient",
        ),
        ({"speedup_low": None, "speedup_high": None}, "3.40× (one run each: no interval), 85 %"),
        ({"speedup_low": 3.396, "speedup_high": 3.404}, "3.40× (3.40–3.40), 85 % efficient"),
        ({"speedup_low": 2.1, "speedup_high": 5.0}, "3.4× (2.1–5.0), 85 % efficient"),
    ],
)
def test_a_figure_has_no_more_digits_than_its_interval_supports(
    changes: dict[str, Any], text: str
) -> None:
    assert answers(NONE, ddp(**changes))[0].startswith(f"ddp on 4: {text}")


def test_an_interval_that_holds_1_is_no_measurable_difference() -> None:
    same = ddp(2, 1.01, speedup_low=0.9, speedup_high=1.13, verdict="no measurable difference")
    assert answers(NONE, same)[0].startswith(
        "ddp on 2: no measurable difference from none on 1: 1.0× (0.9–1.1), 50 % efficient; "
    )
    lost = replace(same, speedup_low=1e-6, speedup_high=1e6)
    assert answers(NONE, lost)[0] == (
        "ddp on 2: no measurable difference from none on 1: its runs differ too much for a figure"
    )


def test_what_is_slower_is_called_slower() -> None:
    slow = ddp(2, 0.6, verdict="slower")
    assert answers(NONE, slow)[0].startswith("ddp on 2: slower than none on 1: 0.60× (0.58–0.62),")
    slower = ddp(4, 0.5, verdict="slower")
    assert answers(NONE, slow, slower)[0].startswith(
        "nothing beats none on 1; ddp on 2: 0.60× (0.58–0.62), 30 % efficient;"
    )
    # A strategy on a single device says nothing of scaling.
    assert answers(NONE, slow, ddp(1, 1.01))[0].startswith("ddp on 2: slower than none on 1: 0.60×")


def test_a_baseline_that_is_not_one_device_is_named() -> None:
    base = replace(NONE, folder="2_ddp_n2", folders=("2_ddp_n2",), parallel="ddp", num_devices=2,
                   baseline="2_ddp_n2")  # fmt: skip
    cell = ddp(4, 1.7, baseline="2_ddp_n2", efficiency=0.85)
    assert answers(base, cell)[0].startswith("ddp on 4: 1.70× (1.65–1.75) against ddp on 2, 85 %")


def test_emulated_and_disturbed_cells_do_not_win_over_real_ones_and_are_called_so() -> None:
    fast = ddp(8, 7.9, emulated=True, parallel="dp")
    assert answers(NONE, fast, ddp())[0].startswith("ddp on 4: 3.4×")
    assert answers(NONE, fast)[0].startswith("dp on 8 (emulated): 7.9×")
    told = answers(NONE, ddp(), injected=["rank 1 is slow"])[0]
    assert told.startswith("ddp on 4 (with an injected disturbance): 3.4×")


def test_more_than_ideal_is_not_praised() -> None:
    assert answers(NONE, ddp(4, 6.0))[0] == (
        f"ddp on 4: 6.0× (5.8–6.2), 150 % efficient; {DISTURBED}"
    )
    told = answers(NONE, ddp(4, 6.0), ddp(2, 1.5))[0]
    assert told.startswith("ddp on 2: 1.50×")
    assert told.endswith(f"; 4_ddp_n4: {DISTURBED}")


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({"waterfall": losing(WAITING), "straggler": "rank 1, in data"},
         "; loses most to waiting for the slowest rank (rank 1, in data)"),
        ({"waterfall": losing("data", residual=0.005)},
         "; the largest part of the loss is not explained"),
        ({"waterfall": losing("data", 0.001)}, "85 % efficient"),
        ({"waterfall": losing("data", -0.1)}, "85 % efficient"),
        ({"waterfall": None}, "85 % efficient"),
    ],
)  # fmt: skip
def test_the_loss_is_named_where_there_is_one(changes: dict[str, Any], end: str) -> None:
    assert answers(NONE, ddp(**changes))[0].endswith(end)


def test_task_and_scaling_are_said_where_they_are_not_training_under_strong_scaling() -> None:
    config = {"task": "forward"}
    told = answers(NONE, ddp(scaling="weak"), config=config)[0]
    assert told.startswith("ddp on 4 (forward only, weak scaling): 3.4×")


def test_settings_have_a_sentence_each_the_best_first_up_to_a_handful() -> None:
    cells = []
    for size in range(1, 8):
        for each in (NONE, ddp(4, size / 2)):
            folder = f"{size}/{each.folder}"
            cells.append(replace(each, setting=f"batch_size={size}", folder=folder,
                                 folders=(folder,), baseline=f"{size}/0_none_n1"))  # fmt: skip
    told = answers(*cells)
    assert told[0].startswith("batch_size=7: ddp on 4: 3.5×")
    assert [line.partition(":")[0] for line in told[:5]] == [
        f"batch_size={size}" for size in (7, 6, 5, 4, 3)
    ]
    assert told[5:] == ("and 2 more settings in summary.csv",)


def test_a_single_cell_has_a_rate_and_nothing_to_compare_with() -> None:
    assert answers(NONE) == (
        "none on 1: 9,880 samples/s (one run: no interval); there is no other cell to compare it "
        "with",
    )
    repeated = replace(NONE, interval_scope="5 repeats", samples_per_s_low=9800.0,
                       samples_per_s_high=9950.0)  # fmt: skip
    assert answers(repeated)[0].startswith("none on 1: 9,880 samples/s (9,800–9,950);")


def test_cells_without_a_common_baseline_are_not_compared() -> None:
    other = ddp(2, 1.0, samples_per_s=20000.0, baseline="2_ddp_n2")
    assert answers(NONE, other) == (
        "2 cells cannot be compared with one another; the fastest is ddp on 2: 20,000 samples/s "
        "(one run: no interval)",
    )


def test_a_cell_that_was_started_again_is_not_called_the_fastest() -> None:
    own = {"samples_per_s": 20000.0, "baseline": None, "speedup": None, "reason": "started again"}
    again = replace(ddp(2), **own)
    assert answers(NONE, again)[0].startswith(
        "2 cells cannot be compared with one another; the fastest that can be believed is none on 1"
    )
    assert (
        "; the fastest is ddp on 2" in answers(again, replace(again, folder="3", folders=("3",)))[0]
    )


LOST = replace(
    NONE, status="failed", samples_per_s=None, speedup=None, efficiency=None, baseline=None
)
OOM = Failure("0_none_n1", "none-n1", "failed", "oom", 0, "forward", 3, "no room\nmore", None)


def test_where_all_cells_failed_the_first_reason_is_the_answer() -> None:
    assert answers(LOST, failures=(OOM,)) == (
        "no cell gave a figure (1 failed); 0_none_n1: no room",
        "1 of 1 cell failed: oom 1",
    )


def test_what_limits_the_answer_follows_it() -> None:
    stopped = replace(LOST, folder="9", folders=("9",), status="interrupted")
    broken = replace(LOST, folder="8", folders=("8",), status="ok", parity="fail",
                     samples_per_s=5.0)  # fmt: skip
    failed = replace(LOST, folder="7", folders=("7",))
    gone = replace(OOM, folder="6", status="unreadable", kind=None)
    told = answers(NONE, ddp(), failed, stopped, broken, failures=(OOM, gone))
    assert told[1:] == (
        "1 of 5 cells failed: oom 1",
        "the sweep was interrupted",
        "1 result cannot be read",
        "no speed-up where parity failed: 8",
    )


def test_steps_that_were_all_warm_up_give_no_rate() -> None:
    bare = replace(LOST, status="ok")
    assert answers(bare) == ("no throughput is known: no step was measured",)
    assert answers() == ("no cell has run",)


def test_an_evaluation_says_its_metric_and_whether_it_is_the_same_everywhere() -> None:
    metric = {"name": "accuracy", "value": 0.953125, "samples": 640}
    told = answers(NONE, ddp(), config={"task": "evaluate"}, metric=metric)
    assert told[0].startswith("ddp on 4 (evaluation): 3.4×")
    assert told[1] == "accuracy 0.953125 over 640 samples, the same in every cell"
    runs = {
        "0_none_n1": {"config": {}, "metric": metric},
        "4_ddp_n4": {"config": {}, "metric": {**metric, "value": 0.5}},
    }
    assert answers_of([NONE, ddp()], runs, ())[1] == (
        "accuracy differs: 0.953125 over 640 samples in 0_none_n1; 0.5 over 640 samples in 4_ddp_n4"
    )


def test_runs_that_never_began_are_told() -> None:
    known: dict[str, Any] = {"config": {"task": "train"}}
    runs = dict.fromkeys(NONE.folders, known)
    told = answers_of([NONE], runs, (), missing=2)
    assert "the sweep is not done: 2 runs have not begun" in told
