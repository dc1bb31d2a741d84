"""Where the efficiency of a cell went, on runs with times set by hand."""

from __future__ import annotations

from typing import Any

import pytest

from dpexp.records import PHASES
from dpexp.report.waterfall import PARTS, waterfall

# Seconds of PHASES in a step of one device: together 0.1 s.
ALONE = (0.010, 0.002, 0.030, 0.050, 0.006, 0.002)
# Of a rank of two that waits for the other one: together 0.070 s.
SPREAD = (0.006, 0.001, 0.016, 0.040, 0.006, 0.001)


def rank_of(rank: int, phases_s: tuple[float, ...]) -> dict[str, Any]:
    return {"rank": rank, "phase_mean_s": dict(zip(PHASES, phases_s, strict=True))}


def comm_of(
    rank: int,
    exposed: float,
    waiting: float | None,
    exposed_backward: float | None = None,
    waiting_backward: float | None = None,
    alone: float | None = None,
) -> dict[str, Any]:
    """What a rank says of its communication; it lies in backward unless told otherwise."""
    return {
        "rank": rank,
        "comm_exposed_mean_s": exposed,
        "straggler_wait_mean_s": waiting,
        "exposed_backward_mean_s": exposed if exposed_backward is None else exposed_backward,
        "waiting_backward_mean_s": waiting if waiting_backward is None else waiting_backward,
        "backward_without_exchange_s": alone,
    }


def run_of(
    step_s: float,
    ranks: list[dict[str, Any]],
    comm: list[dict[str, Any]] | None = None,
    *,
    devices: int = 1,
    scaling: str = "strong",
    parallel: str = "ddp",
    calibration: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return {
        "num_devices": devices,
        "scaling": scaling,
        "parallel": parallel,
        "timing": {"step": {"mean_s": step_s}},
        "ranks": ranks,
        "comm": None if comm is None else {"ranks": comm, "calibration": calibration},
    }


def measured(*, steps: int, samples: int) -> dict[str, Any]:
    return {"steps": {"measured": steps}, "throughput": {"samples_measured": samples}}


BASE = run_of(0.1, [rank_of(0, ALONE)])
CALIBRATED = {"pairs": 8, "covers": "the all-reduce of gradients, and waiting"}


def cell(step_s: float = 0.071, **changes: Any) -> dict[str, Any]:
    """Two ranks; the second one is slow, and the first one waits for it."""
    ranks = [rank_of(0, SPREAD), rank_of(1, (0.006, 0.001, 0.030, 0.026, 0.006, 0.001))]
    comm = [comm_of(0, 0.008, 0.004, alone=0.026), comm_of(1, 0.008, 0.0, alone=0.018)]
    return run_of(step_s, ranks, comm, **{"devices": 2, "calibration": CALIBRATED, **changes})


def assert_parts(got: Any, expected: dict[str, float]) -> None:
    assert got.parts_s == pytest.approx(dict.fromkeys(PARTS, 0.0) | expected, abs=1e-12)
    assert tuple(got.parts_s) == PARTS
    assert sum(got.parts_s.values()) == pytest.approx(got.loss_s, abs=1e-15)
    assert got.loss_s == pytest.approx(got.step_s - got.ideal_s, abs=1e-15)


def test_under_strong_scaling_the_ideal_cell_divides_the_baselines_step() -> None:
    got = waterfall([cell()], [BASE])
    assert got is not None
    assert (got.baseline_step_s, got.ideal_s, got.step_s) == (0.1, 0.05, 0.071)
    assert got.loss_s == pytest.approx(0.021)
    assert got.rank == 0  # the one that waited
    assert_parts(
        got,
        {
            "data": 0.006 - 0.005,
            "transfer": 0.001 - 0.001,
            "forward": 0.016 - 0.015,
            "backward": 0.026 - 0.025,
            "exposed_communication": 0.008,
            "waiting_for_the_slowest_rank": 0.004,
            "optimizer": 0.006 - 0.003,
            "overhead": 0.001 - 0.001,
            # The slowest rank's step is not the sum of rank 0's phases, and of backward
            # 0.040 - 0.008 - 0.004 - 0.026 are left.
            "residual": 0.001 + 0.002,
        },
    )
    assert got.largest == "exposed_communication"


def test_under_weak_scaling_the_ideal_step_takes_as_long_as_the_baselines() -> None:
    got = waterfall([cell(0.121, scaling="weak")], [{**BASE, "scaling": "weak"}])
    assert got is not None
    assert got.ideal_s == 0.1
    assert_parts(
        got,
        {
            "data": -0.004,
            "transfer": -0.001,
            "forward": -0.014,
            "backward": -0.024,
            "exposed_communication": 0.008,
            "waiting_for_the_slowest_rank": 0.004,
            "overhead": -0.001,
            "residual": 0.053,
        },
    )


def test_shares_add_up_to_what_the_efficiency_lacks() -> None:
    got = waterfall([cell()], [BASE])
    assert got is not None
    efficiency = 0.1 / 0.071 / 2
    assert sum(got.share(part) for part in PARTS) == pytest.approx(1 - efficiency)


def test_a_cell_that_is_better_than_ideal_has_negative_parts() -> None:
    fast = run_of(0.04, [rank_of(0, (0.001, 0.001, 0.010, 0.020, 0.003, 0.005))], devices=2)
    got = waterfall([fast], [BASE])
    assert got is not None
    assert got.loss_s == pytest.approx(-0.01)
    assert_parts(got, {"data": -0.004, "forward": -0.005, "backward": -0.005, "overhead": 0.004})
    assert got.largest == "overhead"


def test_the_residual_is_never_the_largest_part() -> None:
    lost = run_of(0.5, [rank_of(0, ALONE)], devices=2)
    got = waterfall([lost], [BASE])
    assert got is not None
    assert got.parts_s["residual"] == pytest.approx(0.4)
    assert got.largest == "backward"


@pytest.mark.parametrize(
    "calibration",
    [None, {"pairs": 0, "reason": "powersgd"}],
    ids=["none", "not possible"],
)
def test_without_calibration_all_of_backward_that_is_not_waited_is_computing(
    calibration: dict[str, Any] | None,
) -> None:
    run = cell(calibration=calibration)
    for each in run["comm"]["ranks"]:
        each["backward_without_exchange_s"] = None
    got = waterfall([run], [BASE])
    assert got is not None
    assert got.parts_s["backward"] == pytest.approx(0.040 - 0.008 - 0.004 - 0.025)
    assert got.parts_s["overhead"] == pytest.approx(0.0)


def test_under_fsdp_a_step_without_exchange_still_gathers_and_is_no_measure() -> None:
    got = waterfall([cell(parallel="fsdp")], [BASE])
    assert got is not None
    assert got.parts_s["backward"] == pytest.approx(0.028 - 0.025)
    assert got.parts_s["overhead"] == pytest.approx(0.0)


@pytest.mark.parametrize(("rows", "backward"), [(28, 0.026), (10, 0.028)])
def test_a_calibration_on_an_epochs_short_last_batch_is_no_measure(
    rows: int, backward: float
) -> None:
    run = cell(calibration={**CALIBRATED, "rows": rows}) | measured(steps=4, samples=120)
    got = waterfall([run], [BASE | measured(steps=4, samples=120)])
    assert got is not None
    assert got.parts_s["backward"] == pytest.approx(backward - 0.025)


def test_shares_add_up_to_what_the_efficiency_lacks_where_steps_have_other_rows() -> None:
    """Weak scaling over 100 rows, 30 for each device: batches of 30, 30, 10 and one of 40."""
    base = BASE | measured(steps=3, samples=70)
    run = cell(scaling="weak") | measured(steps=1, samples=40)
    got = waterfall([run], [base])
    assert got is not None
    efficiency = (40 / 0.071) / (70 / 0.3) / 2
    assert got.ideal_s == pytest.approx(0.1 * 40 / (70 / 3) / 2)
    assert sum(got.share(part) for part in PARTS) == pytest.approx(1 - efficiency)


def test_a_rank_is_compared_with_its_own_calibration() -> None:
    run = cell()
    first, second = run["comm"]["ranks"]
    # Now the second one waits: its phases count, and its backward alone of 0.018 s.
    first["straggler_wait_mean_s"] = first["waiting_backward_mean_s"] = 0.0
    second["straggler_wait_mean_s"] = second["waiting_backward_mean_s"] = 0.001
    got = waterfall([run], [BASE])
    assert got is not None
    assert got.rank == 1
    assert got.parts_s["backward"] == pytest.approx(0.018 - 0.025)
    # 0.026 - 0.008 - 0.001 of backward are 0.017, less than 0.018 alone; the step took 0.071, and
    # the phases of this rank 0.070.
    assert got.parts_s["overhead"] == pytest.approx(0.001 - 0.001)
    assert got.parts_s["residual"] == pytest.approx(0.017 - 0.018 + 0.001, abs=1e-12)


def test_what_forward_waits_is_no_computing_either() -> None:
    """FSDP gathers parameters in forward; dp copies model and batch there."""
    ranks = [rank_of(0, SPREAD)]
    comm = [comm_of(0, 0.012, 0.005, exposed_backward=0.008, waiting_backward=0.004)]
    got = waterfall([run_of(0.070, ranks, comm, devices=2)], [BASE])
    assert got is not None
    assert got.parts_s["forward"] == pytest.approx(0.016 - 0.004 - 0.001 - 0.015)
    assert got.parts_s["backward"] == pytest.approx(0.040 - 0.008 - 0.004 - 0.025)
    assert got.parts_s["exposed_communication"] == pytest.approx(0.012)
    assert got.parts_s["waiting_for_the_slowest_rank"] == pytest.approx(0.005)


def test_a_single_process_has_copies_and_waits_for_nobody() -> None:
    comm = [comm_of(0, 0.012, None, exposed_backward=0.003)]
    got = waterfall([run_of(0.070, [rank_of(0, SPREAD)], comm, devices=2)], [BASE])
    assert got is not None
    assert_parts(
        got,
        {
            "data": 0.001,
            "forward": 0.016 - 0.009 - 0.015,
            "backward": 0.040 - 0.003 - 0.025,
            "exposed_communication": 0.012,
            "optimizer": 0.003,
        },
    )


def test_emulated_devices_compute_their_backward_in_one_thread_which_is_overhead() -> None:
    comm = [comm_of(0, 0.012, None, exposed_backward=0.003)]
    run = run_of(0.070, [rank_of(0, SPREAD)], comm, devices=2, parallel="dp")
    got = waterfall([run | {"emulated": True}], [BASE])
    assert got is not None
    assert_parts(
        got,
        {
            "data": 0.001,
            "forward": 0.016 - 0.009 - 0.015,
            "exposed_communication": 0.012,
            "optimizer": 0.003,
            "overhead": 0.001 - 0.001 + 0.040 - 0.003 - 0.025,
        },
    )


def test_of_repeats_the_means_are_compared() -> None:
    slower = run_of(0.2, [rank_of(0, tuple(2 * seconds for seconds in ALONE))])
    quick, slow = cell(0.060), cell(0.082)
    got = waterfall([quick, slow], [BASE, slower])
    assert got is not None
    assert (got.baseline_step_s, got.ideal_s) == (pytest.approx(0.15), pytest.approx(0.075))
    assert got.step_s == pytest.approx(0.071)
    assert got.parts_s["data"] == pytest.approx(0.006 - 0.0075)
    assert sum(got.parts_s.values()) == pytest.approx(got.loss_s, abs=1e-15)


def test_a_repeat_without_figures_is_left_out() -> None:
    failed: dict[str, Any] = {"num_devices": 2, "scaling": "strong", "timing": None, "ranks": []}
    got, expected = waterfall([cell(), failed], [BASE]), waterfall([cell()], [BASE])
    assert got == expected


def without_phases() -> dict[str, Any]:
    run = cell()
    for rank in run["ranks"]:
        rank["phase_mean_s"] = dict.fromkeys(PHASES)  # all steps were warm-up
    return run


@pytest.mark.parametrize(
    "run",
    [
        {**cell(), "timing": None},
        {**cell(), "timing": {"step": {"mean_s": None}}},
        {**cell(), "ranks": []},
        without_phases(),
    ],
    ids=["no timing", "only warm-up", "no ranks", "no phases"],
)
def test_without_figures_there_is_no_waterfall(run: dict[str, Any]) -> None:
    assert waterfall([run], [BASE]) is None
    assert waterfall([cell()], [run]) is None
    assert waterfall([], [BASE]) is None


def test_a_baseline_may_have_several_devices() -> None:
    got = waterfall([{**cell(), "num_devices": 4}], [cell()])
    assert got is not None
    assert got.ideal_s == pytest.approx(0.071 / 2)
    # The baseline communicates too: an ideal cell would take half as long for it.
    assert got.parts_s["exposed_communication"] == pytest.approx(0.004)
    assert got.parts_s["waiting_for_the_slowest_rank"] == pytest.approx(0.002)
