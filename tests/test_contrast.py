"""What is said of two cells, and the exit status that follows."""

from __future__ import annotations

import math
from typing import Any

import pytest
from builders import make_run_data

from dpexp.comparing import FASTER, NO_DIFFERENCE, NOT_COMPARABLE, SLOWER, Interval
from dpexp.contrast import Comparison, Gate, contrast, environment_differences, gate
from dpexp.pairing import Pair, cells_of, pair

T1 = 12.7062  # Student's t at 97.5 % with 1 degree of freedom, from its table
ERROR = {"kind": "crash", "type": "SIGKILL", "message": "rank 1 was killed\nby a signal"}
Run = dict[str, Any]


def two(rate: float, spread: float = 0.001, **fields: Any) -> list[Run]:
    """Two repeats whose logarithms have an error of `spread`."""
    return [
        make_run_data("ddp", 2, rate=rate * math.exp(sign * spread), **fields) for sign in (-1, 1)
    ]


def paired(a: list[Run], b: list[Run]) -> Pair:
    (found,) = pair(cells_of(a), cells_of(b)).matched
    return found


def compared(a: list[Run], b: list[Run]) -> Comparison:
    found = contrast(paired(a, b))
    assert found is not None
    return found


def timing(**means_s: float) -> dict[str, Any]:
    return {phase: {"mean_s": mean_s} for phase, mean_s in means_s.items()}


@pytest.mark.parametrize(
    ("rate", "verdict"), [(200.0, FASTER), (101.0, NO_DIFFERENCE), (50.0, SLOWER)]
)
def test_repeats_on_both_sides_give_a_verdict_with_an_interval(rate: float, verdict: str) -> None:
    found = compared(two(100.0), two(rate))
    half = T1 * 0.001 * math.sqrt(2)  # 0.018, so 1 % is lost in it
    assert (found.verdict, found.reason, found.fails) == (verdict, None, False)
    assert found.ratio is not None
    assert found.ratio.value == pytest.approx(rate / 100)
    assert found.ratio.low == pytest.approx(rate / 100 * math.exp(-half), rel=1e-5)
    assert found.ratio.high == pytest.approx(rate / 100 * math.exp(half), rel=1e-5)


@pytest.mark.parametrize(
    ("a", "b", "where"), [(1, 1, "on each side"), (1, 2, "in A"), (2, 1, "in B")]
)
def test_of_a_single_run_only_the_figures_are_told(a: int, b: int, where: str) -> None:
    found = compared(two(100.0, 0.0)[:a], two(50.0, 0.0)[:b])
    assert found.verdict == NOT_COMPARABLE
    assert found.reason == f"one run {where}: a verdict needs repeats (repeats=5)"
    assert found.ratio == Interval(0.5)
    assert (found.a and found.a.value, found.b and found.b.value) == (100.0, 50.0)


def test_keys_that_differ_are_named_with_both_values_those_that_differ_in_kind_first() -> None:
    b = two(100.0, keys={"task": "train", "batch_size": 60, "drop_last": True})
    found = compared(two(100.0), b)
    assert found.verdict == NOT_COMPARABLE
    assert found.reason == "task forward → train, batch_size 30 → 60, drop_last false → true"
    assert found.ratio is None


def test_a_long_list_of_keys_is_cut() -> None:
    keys = dict.fromkeys(("seed", "steps", "epochs", "accumulate", "warmup_steps"), 7)
    b = two(100.0, keys={**keys, "batch_size": 60, "shuffle": False, "drop_last": True})
    reason = compared(two(100.0), b).reason
    assert reason is not None
    assert reason.startswith("accumulate 1 → 7, batch_size 30 → 60, ")
    assert reason.endswith(" and 2 keys more")


@pytest.mark.parametrize("status", ["failed", "interrupted"])
def test_a_side_without_a_run_that_ended_well_is_not_compared(status: str) -> None:
    bad = two(100.0, status=status, error=ERROR, throughput=None)
    in_b, in_a = compared(two(100.0), bad), compared(bad, two(100.0))
    assert (in_b.verdict, in_b.reason) == (NOT_COMPARABLE, f"{status} in B: rank 1 was killed")
    assert in_a.reason == f"{status} in A: rank 1 was killed"
    # Who stops a run says nothing of the code.
    assert (in_b.fails, in_a.fails) == (status == "failed", False)


def test_some_failing_repeats_are_a_failure_too_and_the_others_are_compared() -> None:
    b = [*two(100.0), make_run_data("ddp", 2, status="failed", error=ERROR, throughput=None)]
    found = compared(two(100.0), b)
    assert (found.verdict, found.fails) == (NO_DIFFERENCE, True)
    assert "2 of 3 runs in B ended well" in found.remarks
    assert not compared(b, b).fails  # it did so before


def test_a_failed_parity_check_is_not_compared() -> None:
    bad = two(100.0, parity={"verdict": "fail", "reason": "weights differ"})
    found = compared(two(100.0), bad)
    assert found.reason == "parity failed: weights differ (in B)"
    assert (found.verdict, found.fails) == (NOT_COMPARABLE, True)
    assert not compared(bad, two(100.0)).fails


def test_a_run_that_went_on_from_a_checkpoint_is_not_compared() -> None:
    bad = two(100.0, checkpoint={"gone_on_from": 20})
    found = compared(two(100.0), bad)
    assert found.reason == "went on from a checkpoint after 20 steps (in B)"
    assert (found.verdict, found.fails) == (NOT_COMPARABLE, False)


def test_a_run_without_measured_steps_has_nothing_to_compare() -> None:
    empty = two(100.0, throughput={"samples_per_s": None})
    assert compared(two(100.0), empty).reason == "no step was measured in B"


def test_a_cell_that_both_sides_skipped_is_none() -> None:
    skipped = [make_run_data(status="skipped", error=ERROR, throughput=None)]
    assert contrast(paired(skipped, skipped)) is None


def test_of_a_difference_the_phase_is_told_that_moved_most_in_its_direction() -> None:
    a = two(100.0, timing=timing(data=0.010, forward=0.020, backward=0.030))
    b = two(50.0, timing=timing(data=0.020, forward=0.005, backward=0.034))
    assert compared(a, b).remarks == ("most in data: 10 → 20 ms a step",)
    faster = compared(a, two(200.0, timing=timing(data=0.020, forward=0.005, backward=0.034)))
    assert faster.remarks == ("most in forward: 20 → 5 ms a step",)


def test_threads_injections_and_a_disturbed_machine_are_remarked() -> None:
    b = two(
        100.0,
        threads_per_process=1,
        injected=["rank 1 is slow"],
        machine={"warnings": ["throttled"]},
    )
    assert compared(two(100.0), b).remarks == (
        "2 of 2 runs in B warn of the machine's state",
        "injected in B: rank 1 is slow",
        "threads per process 2 → 1",
    )


def test_the_environment_is_compared_where_both_sides_recorded_it() -> None:
    a = two(100.0, environment={"torch": "2.12.0", "cores": 4, "variables": {"SLURM_JOB_ID": "1"}})
    b = two(100.0, environment={"torch": "2.13.0", "cores": 4, "variables": {"SLURM_JOB_ID": "2"}})
    b[1]["environment"] = {**b[1]["environment"], "torch": "2.14.0", "cuda": "13"}
    assert environment_differences([paired(a, b)]) == ["torch 2.12.0 → 2.13.0, 2.14.0"]


LIMIT = 0.03
EQUAL, SLOW, NOISY = (100.0, 0.0001), (90.0, 0.001), (100.0, 0.02)


@pytest.mark.parametrize(
    ("b", "status", "line"),
    [
        ([EQUAL], Gate.HOLDS, None),
        ([(200.0, 0.001)], Gate.HOLDS, None),
        ([(98.0, 0.0001)], Gate.HOLDS, None),  # measurably slower, but by less
        # -10 %; by hand: e^(±12.7062 sqrt(0.0001² + 0.001²)) is 1 ± 0.0128
        ([SLOW], Gate.BROKEN, "ddp-n2 -10.0 % (-11.1 to -8.8 %)"),
        # cosh(0.02) e^(±12.7062 · 0.02), with an error of 0.0001 that adds nothing to 0.02
        ([NOISY], Gate.CANNOT_TELL, "ddp-n2 +0.0 % (-22.4 to +29.0 %)"),
        ([NOISY, SLOW], Gate.BROKEN, "ddp-n2 -10.0 % (-11.1 to -8.8 %)"),
        ([EQUAL, NOISY], Gate.CANNOT_TELL, "ddp-n2 +0.0 % (-22.4 to +29.0 %)"),
    ],
)
def test_the_worst_cell_decides_the_exit_status(
    b: list[tuple[float, float]], status: Gate, line: str | None
) -> None:
    found = [compared(two(*EQUAL), two(*each)) for each in b]
    assert gate(found, LIMIT, []) == (status, [] if line is None else [line])


def test_a_failure_is_a_regression_and_what_cannot_be_compared_is_unknown() -> None:
    bad = two(100.0, status="failed", error=ERROR, throughput=None)
    fails, before = compared(two(100.0), bad), compared(bad, two(100.0))
    single = compared(two(100.0)[:1], two(100.0))
    equal = compared(two(*EQUAL), two(*EQUAL))
    assert gate([equal, single, fails], LIMIT, []) == (Gate.BROKEN, ["ddp-n2 fails in B"])
    assert gate([equal, single], LIMIT, []) == (Gate.CANNOT_TELL, ["ddp-n2 is not comparable"])
    assert gate([equal], LIMIT, ["none-n1: only in A"])[0] is Gate.CANNOT_TELL
    assert gate([equal, before], LIMIT, []) == (Gate.HOLDS, [])  # it had nothing to lose
    assert gate([before], LIMIT, [])[0] is gate([], LIMIT, [])[0] is Gate.CANNOT_TELL
