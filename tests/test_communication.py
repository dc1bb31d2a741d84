"""What real runs say of their communication: times that fit, bytes that were computed before."""

from __future__ import annotations

import csv
import json
import time
from typing import Any

import psutil
import pytest
from realruns import Runs, column, difference, model, weights

import dpexp
from dpexp.anatomy import dissect
from dpexp.anatomy.data import Anatomy
from dpexp.compose import composed
from dpexp.config import load
from dpexp.device import gather_facts
from dpexp.plan import make_plan

# 130 numbers, 520 bytes; four batches of 30.
TRAIN = (
    "task=train", "model=mlp", "model.widths=[5,16,2]", "dataset.rows=120", "batch_size=30",
    "warmup_steps=1", "save_weights=true",
)  # fmt: skip
SPREAD = {
    "dp": ("parallel=dp", "num_devices=2"),
    "ddp": ("parallel=ddp", "num_devices=2", "parallel.bucket_cap_mb=0.0001"),
    "fsdp": ("parallel=fsdp", "num_devices=2", "parallel.wrap=[Linear]"),
}
RANKS = {"dp": 1, "ddp": 2, "fsdp": 2}
COLUMNS = (
    "comm_exposed_s", "comm_overlapped_s", "straggler_wait_s", "comm_arrival_s", "comm_bytes",
    "bus_bytes_per_s",
)  # fmt: skip
# Times are written with nine digits.
ROUNDING_S = 1e-7


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory)


def table(done: dpexp.Run, rank: int = 0) -> list[dict[str, str]]:
    with (done.folder / f"steps.rank{rank}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def anatomy(*overrides: str) -> Anatomy:
    """What ``python -m dpexp.inspect`` computes."""
    return dissect(make_plan(load(composed(overrides)), gather_facts()))


def exchanged(found: Anatomy) -> list[int]:
    return [each.step_bytes for each in found.exchanges]


@pytest.mark.parametrize("strategy", SPREAD)
def test_what_a_step_waited_lies_within_its_phases(run: Runs, strategy: str) -> None:
    done = run(*TRAIN, *SPREAD[strategy])
    for rank in range(RANKS[strategy]):
        rows = table(done, rank)
        assert len(rows) == 4
        for row in rows:
            assert (row["straggler_wait_s"] == "") == (strategy == "dp")
            exposed, waiting = float(row["comm_exposed_s"]), float(row["straggler_wait_s"] or 0)
            room = float(row["backward_s"])
            if strategy != "ddp":
                room += float(row["forward_s"])
            assert exposed >= 0 and waiting >= 0
            assert 0 < exposed + waiting <= room + ROUNDING_S
            assert float(row["comm_overlapped_s"]) <= float(row["backward_s"]) + ROUNDING_S
            arrival = float(row["comm_arrival_s"])
            assert 0 < arrival < float(row["step_s"])
            assert float(row["bus_bytes_per_s"]) > 0


def test_dps_copies_take_as_long_as_its_parts(run: Runs) -> None:
    """Scatter, replicate and gather are the parts of forward; the reduction lies in backward."""
    for row in table(run(*TRAIN, *SPREAD["dp"])):
        copies = sum(float(row[f"{part}_s"]) for part in ("scatter", "replicate", "gather"))
        reduction = float(row["comm_exposed_s"]) - copies
        assert 0 < reduction < float(row["backward_s"])
        assert float(row["comm_overlapped_s"]) == 0


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_in_each_step_some_rank_was_last_and_waited_for_nobody(run: Runs, strategy: str) -> None:
    done = run(*TRAIN, *SPREAD[strategy])
    waits = [column(done, "straggler_wait_s", rank) for rank in range(2)]
    if strategy == "ddp":  # one meeting that counts; FSDP has several a step
        assert [min(both) for both in zip(*waits, strict=True)] == [0] * 4
    found = done.result.stragglers
    assert found is not None
    assert (found["steps"], found["clock_offsets_s"], found["clock_error_s"]) == (3, [0, 0], 0)
    assert sum(each["share_of_steps"] for each in found["ranks"]) <= 1
    late = [each["late_mean_s"] for each in found["ranks"]]
    assert sum(late) == pytest.approx(0, abs=1e-9)


# Bytes


def test_ddp_sends_the_buckets_that_inspect_computes(run: Runs) -> None:
    overrides = (*TRAIN, *SPREAD["ddp"])
    done, computed = run(*overrides), anatomy(*overrides)
    assert exchanged(computed) == [520]
    assert computed.buckets is not None
    later = [bucket.bytes for bucket in computed.buckets.later]
    assert later == [8 + 128, 64 + 320]  # the last layer's gradients come first
    for rank in range(2):
        assert column(done, "comm_bytes", rank) == [520] * 4
    assert done.result.comm is not None
    assert done.result.comm["bytes_per_step"] == 520
    assert done.result.comm["collectives_per_step"] == len(later)
    assert sent(done, rank=0, step=1) == [("all_reduce", num_bytes) for num_bytes in later]


def sent(done: dpexp.Run, *, rank: int, step: int) -> list[tuple[str, int]]:
    """Of a step in the timeline, where each collective has a track from 2 on."""
    trace = json.loads((done.folder / "timeline.json").read_text(encoding="utf-8"))
    return [
        (event["name"], event["args"]["bytes"])
        for event in trace["traceEvents"]
        if event["ph"] == "X" and event["tid"] >= 2 and event["pid"] == rank
        if event["args"]["step"] == step and event["name"] != "waiting for other ranks"
    ]


def test_fsdp_gathers_and_scatters_what_inspect_computes(run: Runs) -> None:
    overrides = (*TRAIN, *SPREAD["fsdp"])
    done, computed = run(*overrides), anatomy(*overrides)
    gathered, scattered = exchanged(computed)
    found = sent(done, rank=1, step=2)
    by_kind = {kind: sum(n for name, n in found if name == kind) for kind, _ in found}
    assert by_kind == {"all_gather": gathered, "reduce_scatter": scattered}
    for rank in range(2):
        assert column(done, "comm_bytes", rank) == [gathered + scattered] * 4


@pytest.mark.parametrize(("accumulate", "rows"), [(1, 15), (2, 7 + 7)])
def test_dp_copies_what_inspect_computes_and_its_rows(
    run: Runs, accumulate: int, rows: int
) -> None:
    """Of 30 rows, or of 15 in each micro-batch, the second device has `rows`."""
    overrides = (*TRAIN, *SPREAD["dp"], f"accumulate={accumulate}")
    done, computed = run(*overrides), anatomy(*overrides)
    assert exchanged(computed) == [520 * accumulate] * 2
    rows_there_and_back = rows * 5 * 4 + rows * 2 * 4
    expected = sum(exchanged(computed)) + rows_there_and_back
    assert column(done, "comm_bytes") == [expected] * 4


def test_with_micro_batches_ddp_exchanges_once_a_step(run: Runs) -> None:
    done = run(*TRAIN, *SPREAD["ddp"], "accumulate=2")
    assert column(done, "comm_bytes") == [520] * 4
    for row in table(done):
        waited = float(row["comm_exposed_s"]) + float(row["straggler_wait_s"])
        assert 0 < waited <= float(row["backward_s"]) + ROUNDING_S


def test_fp16_halves_the_bytes(run: Runs) -> None:
    done = run(*TRAIN, *SPREAD["ddp"], "parallel.comm_hook=fp16")
    assert column(done, "comm_bytes") == [260] * 4
    assert exchanged(anatomy(*TRAIN, *SPREAD["ddp"], "parallel.comm_hook=fp16")) == [260]


def test_powersgd_sends_factors_once_it_has_begun(run: Runs) -> None:
    options = ("comm_hook=powersgd", "powersgd_rank=1", "powersgd_start=2")
    spread = ("parallel=ddp", "num_devices=2")
    overrides = (*TRAIN, *spread, *(f"parallel.{option}" for option in options))
    # Of 16 x 5 numbers 21; 2 x 16 would be 18, no gain; biases of 16 and 2.
    factors = (21 + 32 + 18) * 4
    assert exchanged(anatomy(*overrides)) == [factors]
    assert column(run(*overrides), "comm_bytes") == [520, 520, factors, factors]


def test_powersgd_with_several_buckets_is_refused_on_gloo(run: Runs) -> None:
    """torch would wait for ever in the first step that compresses."""
    with pytest.raises(dpexp.ConfigError) as caught:
        run(*TRAIN, *SPREAD["ddp"], "parallel.comm_hook=powersgd")
    error = caught.value
    assert "parallel.comm_hook" in str(error)
    assert "one bucket" in str(error) and "parallel.bucket_cap_mb=1" in str(error)


# Measuring changes nothing


@pytest.mark.parametrize("strategy", SPREAD)
def test_without_timed_collectives_the_columns_are_empty_and_the_weights_are_the_same(
    run: Runs, strategy: str
) -> None:
    timed = run(*TRAIN, *SPREAD[strategy])
    plain = run(*TRAIN, *SPREAD[strategy], "measure.comm=false")
    for rank in range(RANKS[strategy]):
        assert all(row[name] == "" for row in table(plain, rank) for name in COLUMNS)
    assert (plain.result.comm, plain.result.stragglers) == (None, None)
    assert not (plain.folder / "timeline.json").exists()
    assert difference(weights(timed), weights(plain)) < 1e-6
    assert column(timed, "loss") == pytest.approx(column(plain, "loss"), rel=1e-6)


def test_weights_are_those_of_one_device(run: Runs) -> None:
    """DDP's hook adds gradients up and dpexp weighs them; uneven chunks show a wrong factor."""
    uneven = ("dataset.rows=62", "batch_size=31", "optimizer.lr=0.1")
    alone = run(*TRAIN, *uneven, "parallel=none")
    for hook in ("none", "fp16"):
        spread = run(*TRAIN, *uneven, *SPREAD["ddp"], f"parallel.comm_hook={hook}")
        limit = 1e-6 if hook == "none" else 1e-3
        assert difference(weights(spread), weights(alone)) < limit


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_calibration_leaves_the_training_as_it_was(
    run: Runs, strategy: str, accumulate: int
) -> None:
    """BatchNorm, dropout and random numbers in forward; bit by bit the same weights."""
    changing = (*model("Changing"), f"accumulate={accumulate}", *SPREAD[strategy])
    config = tuple(each for each in TRAIN if not each.startswith("model")) + changing
    plain = run(*config, "measure.calibration_pairs=0")
    extra = run(*config, "measure.calibration_pairs=4")
    assert difference(weights(extra), weights(plain)) == 0
    assert column(extra, "loss") == column(plain, "loss")
    assert extra.result.model is not None and plain.result.model is not None
    assert extra.result.model["final_sha256"] == plain.result.model["final_sha256"]
    assert len(table(extra)) == len(table(plain)) == 4
    assert shapes(extra) == shapes(plain)
    found = (extra.result.comm or {})["calibration"]
    assert found["pairs"] == 4
    assert found["backward_with_exchange_s"] > 0
    assert (plain.result.comm or {})["calibration"] is None
    assert column(extra, "comm_bytes") == column(plain, "comm_bytes")


def shapes(done: dpexp.Run) -> str:
    return (done.folder / "shapes.csv").read_text(encoding="utf-8")


def test_what_cannot_be_calibrated_is_told_with_the_reason(run: Runs) -> None:
    done = run(*TRAIN, *SPREAD["ddp"], "parallel.static_graph=true", "measure.calibration_pairs=4")
    found = (done.result.comm or {})["calibration"]
    assert found["pairs"] == 0
    assert "static_graph" in found["reason"]


# Other kinds of runs


def test_an_embedding_with_sparse_gradients_is_timed_too(run: Runs) -> None:
    config = tuple(each for each in TRAIN if not each.startswith("model"))
    sparse = (*config, *model("SparseWords"), "dataset=custom", "batch_size=10", "epochs=1")
    rows = ("dataset._target_=usermodels.words", "parallel=ddp", "num_devices=2")
    overrides = tuple(each for each in sparse if not each.startswith("dataset.rows"))
    timed = run(*overrides, *rows)
    plain = run(*overrides, *rows, "measure.comm=false")
    assert difference(weights(timed), weights(plain)) < 1e-6
    # Of 5 rows with 3 words each: an index of 8 bytes and 4 numbers; of the linear layer 5 numbers.
    assert column(timed, "comm_bytes") == [15 * (8 + 4 * 4) + 5 * 4] * 2


@pytest.mark.parametrize("strategy", ["none", "dp", "ddp"])
def test_a_run_that_only_calls_the_model_has_no_communication(run: Runs, strategy: str) -> None:
    done = run(*SPREAD.get(strategy, ("parallel=none",)))
    assert all(row[name] == "" for row in table(done) for name in COLUMNS)
    assert (done.result.comm, done.result.stragglers) == (None, None)


# A rank that ends


def ranks_alive() -> list[Any]:
    """All processes below this one, the fork server's too."""
    return [each for each in psutil.Process().children(recursive=True) if each.is_running()]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_that_dies_is_named(run: Runs, strategy: str) -> None:
    before = len(ranks_alive())
    done = run.ended(*TRAIN, *SPREAD[strategy], "inject.die_rank=1", "inject.at_step=2")
    error = done.result.error
    assert done.result.status == "failed"
    assert error is not None
    assert (error.rank, error.type) == (1, "SIGKILL")
    assert done.result.injected == ["rank 1 kills itself at step 2"]
    assert [row["step"] for row in table(done)][:2] == ["0", "1"]
    assert len(ranks_alive()) <= before


def test_the_other_rank_keeps_its_steps_until_then_with_what_is_known_of_them(run: Runs) -> None:
    """Those after its last flush are written although nobody is left to compare them with."""
    overrides = (*TRAIN, *SPREAD["ddp"], "epochs=null", "steps=200")
    done = run.ended(*overrides, "inject.die_rank=1", "inject.at_step=50")
    assert done.result.status == "failed"
    rows = table(done)
    assert [row["step"] for row in rows] == [str(step) for step in range(len(rows))]
    assert 48 <= len(rows) <= 50
    assert {row["comm_bytes"] for row in rows} == {"520"}
    compared = [row["comm_exposed_s"] != "" for row in rows]
    alone = compared.count(False)
    assert compared == [True] * (len(rows) - alone) + [False] * alone
    for row, known in zip(rows, compared, strict=True):
        costs = ("comm_overlapped_s", "straggler_wait_s", "bus_bytes_per_s", "loss")
        assert all((row[name] != "") == known for name in costs)
        assert 0 < float(row["comm_arrival_s"]) < float(row["step_s"])


def test_steps_that_are_enough_end_the_run_on_all_ranks_after_the_same_one(run: Runs) -> None:
    until = ("epochs=null", "until.ci=0.5", "until.max_s=10")
    done = run(*TRAIN, *SPREAD["ddp"], *until)
    first, second = (column(done, "step", rank) for rank in range(2))
    assert first == second == list(range(len(first)))
    assert done.result.steps == {"measured": len(first) - 1, "warmup": 1}
    elapsed_s = sum(column(done, "step_s")[1:])
    reached = not any("until.ci" in note for note in done.result.notes)
    assert (reached and len(first) - 1 >= 8) or elapsed_s >= 10


def test_a_rank_that_hangs_ends_the_run_after_the_time_out_that_is_named(run: Runs) -> None:
    before, began = len(ranks_alive()), time.monotonic()
    done = run.ended(
        *TRAIN, *SPREAD["ddp"], "parallel.timeout_s=6", "inject.hang_rank=1", "inject.at_step=1"
    )
    error = done.result.error
    assert done.result.status == "failed"
    assert error is not None
    assert "parallel.timeout_s" in error.message and "6" in error.message
    assert error.kind == "hang"
    assert time.monotonic() - began < 30
    assert done.result.injected == [
        "rank 1 hangs at step 1; the others give up after parallel.timeout_s=6"
    ]
    assert len(ranks_alive()) <= before
