"""What the benchmarks make of their figures. No test takes a time."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from benchmarks import checkpoints, overhead
from benchmarks.common import Pair, bootstrap, seconds_per_step, show, take_turns
from benchmarks.overhead import COMPARED, LOOPS, REFERENCES, SWITCHES, Job
from benchmarks.overhead_page import INSTALL, Comparison, Cost, Loop, page, verdict
from benchmarks.paired import Order, launch
from benchmarks.turns import Paired

ROOT = Path(__file__).parent.parent
HAND = Loop("by hand", "by hand", "train.py")
OURS = Loop("dpexp", "by hand")
LOADER = Loop("loader", "loader", "loader_loop.py")
OTHER = Loop("Other", "loader", "other.py", "other")


def _rows(text: str) -> dict[str, list[str]]:
    """Cells of all tables of a page by the row's first cell."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {first: rest for first, *rest in cells}


def _cost(name: str, on: list[float], off: list[float], limit: float, difference: bool) -> Cost:
    once = Pair(name, "s", [3.0, 3.5] * 3, [2.0, 2.25] * 3, float("inf"), difference=True)
    return Cost(_paired(name, on, off, limit, difference), once)


def _paired(name: str, on: list[float], off: list[float], limit: float, difference: bool) -> Paired:
    """Of figures in microseconds, one turn a launch, both references the same."""
    step_s = [[[a * 1e-6, b * 1e-6, b * 1e-6]] for a, b in zip(on, off, strict=True)]
    return Paired(name, step_s, limit, difference)


# ---------------------------------------------------------------- the maths


def test_a_pair_compares_medians_not_means() -> None:
    ours, reference = [10.0, 11.0, 90.0], [10.0, 10.0, 10.0]
    assert Pair("", "", ours, reference, 1).outcome == pytest.approx(1.1)
    assert Pair("", "", ours, reference, 1, difference=True).outcome == pytest.approx(1.0)


def test_two_rounds_can_be_drawn_in_three_ways_so_the_interval_spans_them() -> None:
    # Round 1 twice, one of each, or round 2 twice: medians 11, 12, 13 against 10.
    assert bootstrap([11.0, 13.0], [10.0, 10.0], difference=False) == pytest.approx((1.1, 1.3))
    assert bootstrap([11.0, 13.0], [10.0, 10.0], difference=True) == pytest.approx((1.0, 3.0))


def test_what_both_sides_of_a_round_share_does_not_widen_the_interval() -> None:
    off = [10.0, 80.0, 20.0, 40.0]  # another load in each round
    on = [value + 2 for value in off]
    assert bootstrap(on, off, difference=True) == pytest.approx((2.0, 2.0))


def test_an_interval_is_the_same_each_time_and_narrower_with_more_rounds() -> None:
    few, many = [9.0, 10.0, 11.0] * 3, [9.0, 10.0, 11.0] * 60
    ones, more_ones = [1.0] * 9, [1.0] * 180
    low, high = bootstrap(few, ones, difference=True)
    assert bootstrap(few, ones, difference=True) == (low, high)
    inner_low, inner_high = bootstrap(many, more_ones, difference=True)
    assert low <= inner_low <= 9.0 <= inner_high <= high
    assert inner_high - inner_low < high - low


def test_a_reference_that_is_no_measurement_does_not_vary() -> None:
    assert bootstrap([0.4, 0.8], [0.8], difference=False) == pytest.approx((0.5, 1.0))


def test_sides_with_other_numbers_of_rounds_are_refused() -> None:
    with pytest.raises(ValueError):
        bootstrap([1.0, 2.0, 3.0], [1.0, 2.0], difference=True)


def test_each_round_measures_all_sides_and_begins_with_the_next_one() -> None:
    order: list[str] = []

    def side(name: str) -> Callable[[], int]:
        return lambda: order.append(name) or len(order)  # type: ignore[func-returns-value]

    found = take_turns(3, {name: side(name) for name in "abc"})
    assert "".join(order) == "abc" + "bca" + "cab"
    assert found == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}


def test_a_step_costs_the_slowest_rank_its_steps_and_its_records() -> None:
    ranks = [{"wall_s": 2.0, "recording_s": 0.5}, {"wall_s": 2.25, "recording_s": 0.125}]
    assert seconds_per_step({"ranks": ranks, "steps": {"measured": 10}}) == 0.25


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ([10.0, 10.1] * 3, "met"),
        ([10.3, 10.4] * 3, "missed"),
        ([10.0, 10.4] * 3, "undecided: the interval holds the limit"),
    ],
)
def test_a_limit_is_met_or_missed_only_where_the_interval_says_so(
    ours: list[float], said: str
) -> None:
    assert verdict(_paired("", ours, [10.0] * len(ours), 1.02, False)) == said


def test_the_table_shows_the_interval(capsys: pytest.CaptureFixture[str]) -> None:
    show([Pair("a", "s", [11.0, 13.0] * 3, [10.0] * 6, 1.25)])
    assert "1.200× (1.100× to 1.300×)" in capsys.readouterr().out


# ---------------------------------------------------------------- the page


def test_a_ratio_and_a_difference_are_shown_with_interval_and_limit() -> None:
    costs = [
        _cost("big", [1010.0] * 6, [1000.0] * 6, 1.02, False),
        _cost("tiny", [250.0, 260.0] * 3, [200.0] * 6, 40.0, True),
    ]
    rows = _rows(page({}, 6, costs, []))
    once = "+1.12 s (+1.00 to +1.25)"  # 3.25 - 2.125, and the two rounds' own
    assert rows["big"] == [
        "1,010.0", "1,000.0", "1.010× (1.010 to 1.010)", "1.02×", "met", "1.000 to 1.000", once,
    ]  # fmt: skip
    assert rows["tiny"] == [
        "255.0", "200.0", "+55.0 µs (+50.0 to +60.0)", "+40 µs", "missed", "+0.0 to +0.0", once,
    ]  # fmt: skip


def test_a_tool_is_compared_with_the_loop_and_with_the_one_that_is_fed_like_it() -> None:
    figures = {
        "by hand": [200.0] * 6,
        "dpexp": [230.0, 234.0] * 3,
        "loader": [300.0] * 6,
        "Other": [350.0, 352.0] * 3,
    }
    comparison = Comparison("tiny", 1000, (HAND, OURS, LOADER, OTHER), figures)
    text = page({}, 6, [], [comparison])
    rows = _rows(text)
    assert "### tiny, 1,000 batches an epoch" in text
    assert rows["by hand"] == ["200.0", "", ""]
    assert rows["dpexp"] == ["232.0", *["+32.0 µs (+30.0 to +34.0)"] * 2]
    assert rows["loader"] == ["300.0", "+100.0 µs (+100.0 to +100.0)", ""]
    assert rows["Other"] == ["351.0", "+151.0 µs (+150.0 to +152.0)", "+51.0 µs (+50.0 to +52.0)"]


def test_the_row_of_a_missing_package_says_how_to_get_it() -> None:
    figures = {"by hand": [1.0, 1.0], "loader": [2.0, 2.0]}
    rows = _rows(page({}, 2, [], [Comparison("tiny", 1, (HAND, LOADER, OTHER), figures)]))
    assert rows["Other"] == [f"not installed: `{INSTALL}`", "", ""]


def test_five_rounds_have_no_interval_and_the_page_says_so() -> None:
    once = Pair("", "s", [3.0] * 5, [2.0] * 5, float("inf"), difference=True)
    text = page({}, 5, [Cost(_paired("big", [1.0], [1.0], 1.02, False), once)], [])
    assert _rows(text)["big"][-1] == "+1.00 s"
    assert "no intervals" in text
    assert "In brackets" not in text


def test_the_page_says_rounds_and_facts() -> None:
    text = page({"torch": "9.9", "date": "2030-01-02"}, 7, [], [])
    assert "7 rounds" in text
    assert _rows(text)["torch"] == ["9.9"]
    assert "{" not in text, "a place in the template was not filled"


# ---------------------------------------------------------------- what is measured


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """No process is started: what would have been, and 1 ms a step."""
    calls: list[tuple[str, ...]] = []

    def dpexp(*overrides: str) -> dict[str, Any]:
        calls.append(("dpexp", *overrides))
        return {"ranks": [{"wall_s": 0.9, "recording_s": 0.1}], "steps": {"measured": 1000}}

    def script(path: Path, *arguments: str) -> float:
        calls.append((path.name, *arguments))
        return 1e-3

    def launched(order: Order, ranks: int) -> list[list[float]]:
        calls.append(("on", *order.ours))
        calls.append(("off", *order.reference))
        return [[1e-3, 1e-3, 1e-3]]

    monkeypatch.setattr(overhead, "launch", launched)
    monkeypatch.setattr(overhead, "run_dpexp", dpexp)
    monkeypatch.setattr(overhead, "run_script", script)
    return calls


def test_on_and_off_differ_only_in_what_is_measured(called: list[tuple[str, ...]]) -> None:
    cost = overhead.switched(1, 1, SWITCHES[0])
    for on, off in ((called[0][1:], called[1][1:]), (called[2], called[3])):
        assert set(on) - set(off) == set(overhead.ON)
        assert set(off) - set(on) == set(overhead.OFF)
    assert [key.split("=")[0] for key in overhead.ON] == [key.split("=")[0] for key in overhead.OFF]
    assert cost.step.outcome == pytest.approx(1.0)


def test_what_launches_and_turns_share_does_not_widen_the_interval() -> None:
    # The second launch is twice as slow, and so is each second turn; ours takes 10 % more.
    turns = [[1.1 * x, x, x] for x in (1.0, 2.0, 1.0, 2.0)]
    step_s = [turns, [[2 * x for x in turn] for turn in turns]]
    found = Paired("", step_s, 1.02)
    assert (found.outcome, *found.interval) == pytest.approx((1.1, 1.1, 1.1))
    assert found.noise == pytest.approx((1.0, 1.0))
    assert found.median_us("reference") == pytest.approx(2e6)


def test_ours_is_compared_with_the_mean_of_both_references_and_they_with_each_other() -> None:
    found = Paired("", [[[13e-6, 10e-6, 12e-6]]], 40.0, difference=True)
    assert found.outcome == pytest.approx(2.0)
    assert found.noise == pytest.approx((2.0, 2.0))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_cost_that_only_one_side_has_is_found_beside_the_same_steps(ranks: int) -> None:
    job = Job("", (5, 2), 30, 120, 0)
    given = (*job.training(), *overhead.STRATEGY[ranks])
    found = launch(Order((*given, "inject.data_delay_s=0.05"), given, 40, 3), ranks)
    assert len(found) == 3
    added_s = statistics.median(ours - (one + two) / 2 for ours, one, two in found)
    assert 0.035 < added_s < 0.1  # other work on the machine slows both sides


def test_a_loop_whose_package_is_missing_is_left_out(
    called: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(name: str) -> ModuleSpec | None:
        return None if name == "lightning" else ModuleSpec(name, None)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    comparison = overhead.compared(2, COMPARED[1])
    absent = {loop.name for loop in LOOPS} - set(comparison.step_us)
    assert absent == {"Lightning Fabric", "Lightning Trainer"}
    assert {call[0] for call in called} == {
        "train.py", "dpexp", "loader_loop.py", "accelerate_loop.py",
    }  # fmt: skip
    assert comparison.batches_per_epoch == 1000
    assert "not installed" in page({}, 2, [], [comparison])


def test_both_sides_get_the_same_job() -> None:
    job = Job("j", (5, 7, 2), 30, 90, 40)
    assert job.arguments() == ("90", "5,7,2", "30", "40")
    overrides = job.overrides()
    assert "model.widths=[5, 7, 2]" in overrides
    assert {"steps=50", "warmup_steps=10", "batch_size=30", "dataset.rows=90"} <= set(overrides)
    assert {"dataset.features=5", "dataset.targets=2"} <= set(overrides)


def test_what_the_tables_name_exists() -> None:
    names = {loop.name for loop in LOOPS}
    assert LOOPS[0].fed_as == LOOPS[0].name
    assert {loop.fed_as for loop in LOOPS} <= names
    assert all((REFERENCES / loop.script).is_file() for loop in LOOPS if loop.script)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (extra,) = [line for line in project.splitlines() if line.startswith("compare = ")]
    assert all(f'"{loop.package}>=' in extra for loop in LOOPS if loop.package)


def test_no_round_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["overhead", "--rounds", "0"])
    with pytest.raises(SystemExit) as caught:
        overhead.main()
    assert caught.value.code == 2


def test_the_page_is_written_only_if_asked_for(
    called: list[tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = tmp_path / "overhead.md"
    monkeypatch.setattr(overhead, "PAGE", target)
    monkeypatch.setattr("psutil.cpu_percent", lambda interval: 50.0)
    monkeypatch.setattr("sys.argv", ["overhead", "--rounds", "2"])
    overhead.main()
    printed = capsys.readouterr().out
    assert "50% of" in _rows(printed)["busy before the first run"][0]
    assert not target.exists()
    monkeypatch.setattr("sys.argv", ["overhead", "--rounds", "2", "--write"])
    overhead.main()
    assert target.read_text("utf-8").startswith("# What dpexp costs a step\n")
    assert called


def test_what_the_steps_after_a_save_take_more_is_shared_out_over_all() -> None:
    # Warm-up is slow. Five steps of 12 after each of two saves, the second at the very end.
    steps_us = [99.0] * 10 + [10.0] * 30 + [12.0] * 5 + [10.0] * 55
    assert checkpoints.shared_out(steps_us, [40, 100]) == pytest.approx((10.0, 10.1))
