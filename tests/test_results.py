"""From what the ranks report to the result of a run."""

from __future__ import annotations

from typing import Any

import pytest
from builders import make_facts, make_plan_for, make_rank_result, make_summary

from dpexp.records import ErrorRecord
from dpexp.results import _one_bucket, assemble, ended_early
from dpexp.schema import Task

ENVIRONMENT = {"cores": 4}


def test_throughput_is_all_ranks_rows_by_the_time_of_the_slowest() -> None:
    fast = make_rank_result(0, rows_seen=32, measured_global_rows=64, wall_s=0.5)
    slow = make_rank_result(1, rows_seen=32, measured_global_rows=64, wall_s=0.8)
    result = assemble(make_plan_for("ddp", 2), ENVIRONMENT, [fast, slow])
    assert result.samples_seen == 64  # not 128
    assert result.throughput == {
        "samples_per_s": pytest.approx(80.0),
        "samples_per_s_per_device": pytest.approx(40.0),
        "samples_measured": 64,
        "wall_s": 0.8,
    }


def test_the_timing_is_the_slowest_ranks() -> None:
    ranks = [
        make_rank_result(0, wall_s=0.5, timing={"step": make_summary(0.1)}),
        make_rank_result(1, wall_s=0.8, timing={"step": make_summary(0.2)}),
    ]
    result = assemble(make_plan_for("ddp", 2), ENVIRONMENT, ranks)
    assert result.timing == {"step": make_summary(0.2)}
    assert result.timing_rank == 1
    assert [rank["step_p50_s"] for rank in result.ranks] == [0.1, 0.2]


def test_warm_up_steps_are_counted_apart() -> None:
    rank = make_rank_result(steps=10, measured_steps=9)
    assert assemble(make_plan_for(), ENVIRONMENT, [rank]).steps == {"measured": 9, "warmup": 1}


def test_without_a_measured_step_there_is_no_throughput() -> None:
    nothing = make_rank_result(
        steps=2, measured_steps=0, measured_global_rows=0, wall_s=0.0, rows_seen=60
    )
    result = assemble(make_plan_for(), ENVIRONMENT, [nothing])
    assert result.throughput is not None
    assert result.throughput["samples_per_s"] is None
    assert result.throughput["samples_per_s_per_device"] is None
    assert result.samples_seen == 60


def test_memory_is_told_per_rank_and_per_device() -> None:
    ranks = [
        make_rank_result(0, peak_bytes=100, peak_device_bytes={"cuda:0": 7}),
        make_rank_result(1, peak_bytes=300, peak_device_bytes={"cuda:1": 9}),
    ]
    memory = assemble(make_plan_for("ddp", 2), ENVIRONMENT, ranks).memory
    assert memory is not None
    assert memory["peak_bytes"] == [100, 300]
    assert memory["peak_device_bytes"] == {"cuda:0": 7, "cuda:1": 9}
    assert memory["peak_bytes_scope"].endswith("each rank's process, since it started")


def test_the_peak_of_a_checked_run_begins_after_the_check() -> None:
    plan = make_plan_for(task=Task.train, check={"parity": True})
    result = assemble(plan, ENVIRONMENT, [make_rank_result(parity={"verdict": "pass"})])
    assert result.memory is not None
    assert result.memory["peak_bytes_scope"].endswith("since the parity check")
    assert result.parity == {"verdict": "pass"}


def test_on_a_cpu_there_is_no_device_memory() -> None:
    memory = assemble(make_plan_for(), ENVIRONMENT, [make_rank_result()]).memory
    assert memory is not None
    assert memory["peak_device_bytes"] is None


def test_the_loss_is_null_without_training_and_first_and_last_with_it() -> None:
    forward, trained = make_rank_result(), make_rank_result(losses=(2.0, 0.5))
    assert assemble(make_plan_for(), ENVIRONMENT, [forward]).loss is None
    assert assemble(make_plan_for(), ENVIRONMENT, [trained]).loss == {"first": 2.0, "last": 0.5}


def test_the_metric_is_rank_zeros_and_null_without_an_evaluation() -> None:
    metric = {"name": "accuracy", "value": 0.8, "samples": 5}
    ranks = [make_rank_result(0, metric=metric), make_rank_result(1)]
    assert assemble(make_plan_for("ddp", 2), ENVIRONMENT, ranks).metric == metric
    assert assemble(make_plan_for(), ENVIRONMENT, [make_rank_result()]).metric is None


def test_notes_of_plan_and_ranks_are_told_once() -> None:
    plan = make_plan_for("ddp", 2, extra={"foo": 1})
    ranks = [make_rank_result(rank, notes=("all steps are warm-up",)) for rank in range(2)]
    notes = assemble(plan, ENVIRONMENT, ranks).notes
    assert notes == ["foo: not a key of dpexp; recorded, not used", "all steps are warm-up"]


def test_the_facts_of_the_plan_are_in_the_result() -> None:
    result = assemble(make_plan_for("dp", 4), ENVIRONMENT, [make_rank_result()])
    assert (result.status, result.label, result.parallel) == ("ok", "dp-n4", "dp")
    assert (result.device, result.emulated, result.scaling) == ("cpu", True, "strong")
    assert (result.num_devices, result.num_processes, result.threads_per_process) == (4, 1, 4)
    assert result.batch == {"global": 30, "per_device": 8}
    assert result.config["parallel"]["strategy"] == "dp"
    assert result.environment == ENVIRONMENT


def test_the_device_is_the_first_ranks() -> None:
    facts = make_facts(accelerator="cuda", num_accelerators=4, nccl=True)
    plan = make_plan_for("ddp", 2, facts=facts, device="cuda:1")
    ranks = [make_rank_result(rank) for rank in range(2)]
    assert assemble(plan, ENVIRONMENT, ranks).device == "cuda:1"


def test_a_failed_run_keeps_its_facts_and_has_no_figures() -> None:
    error = ErrorRecord("crash", "SIGKILL", "killed", rank=1)
    result = ended_early(make_plan_for("ddp", 2), ENVIRONMENT, "failed", error, [])
    assert (result.status, result.label, result.num_processes) == ("failed", "ddp-n2", 2)
    assert result.error == error
    assert (result.timing, result.throughput, result.samples_seen) == (None, None, None)


def comm_of(exposed_s: float, waiting_s: float | None, **changes: Any) -> dict[str, Any]:
    """What a rank says of its communication."""
    return {
        "bytes_per_step": 48.0,
        "collectives_per_step": 1.0,
        "bus_gb_per_s": 0.5,
        "comm_exposed_mean_s": exposed_s,
        "comm_overlapped_mean_s": 0.25,
        "straggler_wait_mean_s": waiting_s,
        "exposed_backward_mean_s": exposed_s,
        "waiting_backward_mean_s": waiting_s,
        "clock_offset_s": 0.0,
        "clock_error_s": 0.0,
        "stragglers": None,
        "timeline": ["much"],
        **changes,
    }


def calibration(alone_s: float) -> dict[str, Any]:
    return {"pairs": 4, "backward_without_exchange_s": alone_s}


def test_what_collectives_cost_is_told_per_rank_with_the_rate_of_the_link() -> None:
    found = {"rank": 1, "phase": "forward", "steps": 3, "ranks": []}
    first = comm_of(0.1, 0.2, stragglers=found, calibration=calibration(0.7))
    second = comm_of(
        0.3, 0.0, bus_gb_per_s=2.0, clock_offset_s=5.0, clock_error_s=0.001,
        calibration=calibration(0.8),
    )  # fmt: skip
    ranks = [make_rank_result(0, comm=first), make_rank_result(1, comm=second)]
    result = assemble(make_plan_for("ddp", 2), ENVIRONMENT, ranks)
    assert result.comm == {
        "bytes_per_step": 48.0,
        "collectives_per_step": 1.0,
        "calibration": calibration(0.7),
        # A rank that waits in a collective for others sees a slower link than there is.
        "bus_gb_per_s": 2.0,
        "ranks": [
            {
                "rank": 0,
                "comm_exposed_mean_s": 0.1,
                "comm_overlapped_mean_s": 0.25,
                "straggler_wait_mean_s": 0.2,
                "exposed_backward_mean_s": 0.1,
                "waiting_backward_mean_s": 0.2,
                "backward_without_exchange_s": 0.7,
            },
            {
                "rank": 1,
                "comm_exposed_mean_s": 0.3,
                "comm_overlapped_mean_s": 0.25,
                "straggler_wait_mean_s": 0.0,
                "exposed_backward_mean_s": 0.3,
                "waiting_backward_mean_s": 0.0,
                "backward_without_exchange_s": 0.8,
            },
        ],
    }
    assert result.stragglers == {
        **found, "clock_offsets_s": [0.0, 5.0], "clock_error_s": 0.001,
    }  # fmt: skip


def test_a_single_process_has_communication_but_no_stragglers() -> None:
    ranks = [make_rank_result(0, comm=comm_of(0.1, None, bus_gb_per_s=None))]
    result = assemble(make_plan_for("dp", 2), ENVIRONMENT, ranks)
    assert result.comm is not None
    assert (result.comm["bus_gb_per_s"], result.comm["calibration"]) == (None, None)
    assert result.comm["ranks"][0]["straggler_wait_mean_s"] is None
    assert result.stragglers is None


def test_where_collectives_are_not_timed_both_are_null() -> None:
    result = assemble(make_plan_for("ddp", 2), ENVIRONMENT, [make_rank_result(r) for r in (0, 1)])
    assert (result.comm, result.stragglers) == (None, None)


def test_a_run_that_ended_early_keeps_what_its_ranks_knew() -> None:
    """Only rank 1 could still say something."""
    error = ErrorRecord("crash", "SIGKILL", "killed", rank=0)
    left = [make_rank_result(1, comm=comm_of(0.1, None))]
    result = ended_early(make_plan_for("ddp", 2), ENVIRONMENT, "failed", error, left)
    assert result.comm is not None
    assert [each["rank"] for each in result.comm["ranks"]] == [1]
    assert result.stragglers is None


def test_the_mean_of_each_phase_is_told_per_rank() -> None:
    timing = {"step": make_summary(0.125), "data": make_summary(0.025), "gather": make_summary(1)}
    ranks = [make_rank_result(timing={**timing, "comm_exposed": make_summary(2)})]
    (rank,) = assemble(make_plan_for("dp", 2), ENVIRONMENT, ranks).ranks
    assert rank["phase_mean_s"] == {"data": 0.025}  # what adds up to the step, and no parts


@pytest.mark.parametrize(
    ("inject", "told"),
    [
        ({}, []),
        ({"collective_delay_s": 0.05}, ["each collective takes 0.05 s longer"]),
        ({"slow_rank": 1, "slow_factor": 1.5}, ["rank 1 computes about 1.5 times as long"]),
        ({"data_delay_s": 0.1}, ["each batch takes 0.1 s longer to fetch"]),
        (
            {"data_delay_s": 0.1, "data_rank": 0},
            ["each batch takes 0.1 s longer to fetch on rank 0"],
        ),
        ({"noisy_rank": 0, "noise_s": 0.02}, ["rank 0 pauses for 0.02 s a step on average"]),
        (
            {"die_rank": 0, "hang_rank": 1, "at_step": 3},
            [
                "rank 0 kills itself at step 3",
                "rank 1 hangs at step 3; the others give up after parallel.timeout_s=300",
            ],
        ),
    ],
    ids=str,
)
def test_a_disturbed_run_says_by_what(inject: dict[str, Any], told: list[str]) -> None:
    plan = make_plan_for("ddp", 2, inject=inject)
    ranks = [make_rank_result(rank) for rank in range(2)]
    result = assemble(plan, ENVIRONMENT, ranks)
    assert result.injected == told
    assert [note for note in result.notes if note.startswith("injected")] == [
        f"injected: {each}" for each in told
    ]
    error = ErrorRecord("crash", "SIGKILL", "killed", rank=0)
    assert ended_early(plan, ENVIRONMENT, "failed", error, []).injected == told


@pytest.mark.parametrize(
    ("count", "num_bytes", "strategy", "said"),
    [
        (1, 2**20, "ddp", True),
        (2, 2**20, "ddp", False),  # the second one travels while backward goes on
        (1, 2**20 - 1, "ddp", False),  # so few bytes that it hardly matters
        (1, 2**20, "fsdp", False),  # it has no buckets
    ],
)
def test_gradients_in_one_bucket_that_cannot_travel_beside_backward_are_told(
    count: float, num_bytes: float, strategy: str, said: bool
) -> None:
    comm = {"collectives_per_step": count, "bytes_per_step": num_bytes}
    (note,) = _one_bucket(make_plan_for(strategy, 2), make_rank_result(comm=comm)) or [""]
    assert ("parallel.bucket_cap_mb=auto" in note) == said


def test_without_timed_collectives_nothing_is_said_of_buckets() -> None:
    assert _one_bucket(make_plan_for("ddp", 2), make_rank_result()) == []
