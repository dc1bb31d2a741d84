"""From what the ranks report to the result of a run."""

from __future__ import annotations

import pytest
from builders import make_facts, make_plan_for, make_rank_result, make_summary

from dpexp.records import ErrorRecord
from dpexp.results import assemble, ended_early
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
