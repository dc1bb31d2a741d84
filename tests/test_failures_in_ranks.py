"""A rank that fails: the cause is told, the others end soon, what was recorded stays."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import dpexp
from dpexp import server
from dpexp.records import ErrorRecord

Cli = Callable[..., "subprocess.CompletedProcess[str]"]

SOON_S = 50  # below the 60 s for which those that hang would sleep
DDP2 = ("parallel=ddp", "num_devices=2")
SPREAD = {"none": ("parallel=none",), "dp": ("parallel=dp", "num_devices=2"), "ddp": DDP2}
RANK_OF = {"none": 0, "dp": 0, "ddp": 1}

# How a rank ends at step 2; the kind, the type and the words of the error that is told.
WAYS = {
    "raise": ("user_error", "ValueError", ("boom", "step 2", "forward")),
    "kill": ("crash", "SIGKILL", ("killed by SIGKILL",)),
    "_exit": ("crash", "exit 0", ("exit status 0",)),
    "exit": ("crash", "SystemExit", ("sys.exit(0)", "step 2")),
    "interrupt": ("user_error", "KeyboardInterrupt", ("KeyboardInterrupt", "step 2")),
    "memory": ("oom", "RuntimeError", ("memory", "step 2")),
}


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Have one fork server for all."""
    server.start(several_ranks=True)


def model(name: str, **arguments: object) -> list[str]:
    chosen = ["model=custom", f"model._target_=usercode.{name}"]
    return chosen + [f"+model.{key}={value}" for key, value in arguments.items()]


def fail(folder: Path, *overrides: str) -> ErrorRecord:
    """Run it: it must fail soon. The error as run.json has it, too."""
    began = time.monotonic()
    run = dpexp.run(list(overrides), folder=folder)
    assert time.monotonic() - began < SOON_S
    assert run.result.status == "failed"
    assert run.result.error is not None
    written = record(folder)
    assert written["status"] == "failed"
    assert written["error"]["message"] == run.result.error.message
    assert written["error"]["rank"] == run.result.error.rank
    return run.result.error


def refuse_constant(name: str) -> NoReturn:
    raise AssertionError(f"{name} is not JSON")


def record(folder: Path) -> dict[str, Any]:
    text = (folder / "run.json").read_text(encoding="utf-8")
    parsed: dict[str, Any] = json.loads(text, parse_constant=refuse_constant)
    return parsed


def rows(folder: Path, rank: int = 0) -> list[dict[str, str]]:
    with (folder / f"steps.rank{rank}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def logged(folder: Path) -> str:
    return (folder / "dpexp.log").read_text(encoding="utf-8")


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("strategy", ["none", "ddp"])
def test_the_rank_that_ended_first_is_named_with_its_reason(
    tmp_path: Path, strategy: str, how: str
) -> None:
    kind, name, words = WAYS[how]
    rank = RANK_OF[strategy]
    error = fail(tmp_path, *SPREAD[strategy], *model("Failing", how=how, rank=rank))
    assert (error.kind, error.type, error.rank) == (kind, name, rank)
    assert all(word in error.message for word in words), error.message
    assert f"rank {rank}" in error.message
    assert (error.step, error.phase) == (2, "forward")
    if how not in ("kill", "_exit"):  # those leave no time to say more
        assert "in forward" in error.traceback


def test_above_its_limit_of_memory_a_rank_is_ended_with_the_place(tmp_path: Path) -> None:
    hungry = model("Hungry", mib_per_row=40)
    rows = ("dataset.rows=64", "batch_size=32")
    error = fail(tmp_path, *DDP2, *hungry, *rows, "process_memory_mib=500")
    assert (error.kind, error.type, error.step, error.phase) == ("oom", "MemoryLimit", 0, "forward")
    assert error.rank in (0, 1)
    assert "process_memory_mib=500" in error.message
    assert "usercode.py" in error.traceback


def test_a_run_that_fails_after_its_parity_check_keeps_the_certificate(tmp_path: Path) -> None:
    late = model("Failing", how="raise", rank=0, call=5)
    fail(tmp_path, *late, "task=train", "epochs=3", "check.parity=true")
    certificate = record(tmp_path)["parity"]
    assert (certificate["verdict"], certificate["steps"]) == ("pass", 3)


def test_rank_0_may_be_the_one_that_fails(tmp_path: Path) -> None:
    error = fail(tmp_path, *DDP2, *model("Failing", how="raise", rank=0))
    assert error.rank == 0
    assert "boom" in error.message


@pytest.mark.parametrize("how", ["raise", "exit", "memory"])
def test_a_failing_replica_of_dp_is_named(tmp_path: Path, how: str) -> None:
    # A replica's call count is thrown away with it, so the failure has to come at call 0.
    failing = model("Failing", how=how, rank=0, call=0)
    error = fail(tmp_path, "parallel=dp", "num_devices=3", *failing)
    assert error.kind == WAYS[how][0]
    if how == "raise":
        assert "replica 0" in error.message and "[10, 5]" in error.message
        assert "ValueError: boom" in error.message


@pytest.mark.parametrize("how", ["raise", "kill", "_exit"])
def test_the_steps_before_the_end_are_kept(tmp_path: Path, how: str) -> None:
    fail(tmp_path, *DDP2, *model("Failing", how=how))
    assert [int(row["step"]) for row in rows(tmp_path, 0)][:2] == [0, 1]
    board = EventAccumulator(str(tmp_path))
    board.Reload()
    assert [event.step for event in board.Scalars("time/step_ms")][:2] == [0, 1]
    if how == "raise":
        assert [int(row["step"]) for row in rows(tmp_path, 1)] == [0, 1]


def test_users_frames_are_kept_apart_from_everybody_elses(tmp_path: Path) -> None:
    error = fail(tmp_path, *DDP2, *model("Failing", how="raise"))
    assert "usercode.py" in error.user_frames
    assert 'raise ValueError("boom")' in error.user_frames
    assert "self.fail()" in error.user_frames
    assert "site-packages" not in error.user_frames
    assert "worker.py" not in error.user_frames


def test_the_traceback_is_in_the_log_and_in_run_json(tmp_path: Path) -> None:
    fail(tmp_path, *DDP2, *model("Failing", how="raise"))
    for text in (logged(tmp_path), record(tmp_path)["error"]["traceback"]):
        assert "Traceback (most recent call last)" in text
        assert 'raise ValueError("boom")' in text
        assert "worker.py" in text
    assert "[rank=1][dpexp.rank][ERROR]" in logged(tmp_path)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_command_line_shows_the_users_frames_the_rank_and_where_the_rest_is(
    cli: Cli, tmp_path: Path, workers: int
) -> None:
    failing = model("Failing", how="raise")
    ended = cli(*DDP2, *failing, f"loader.workers={workers}", timeout=SOON_S)
    assert ended.returncode == 1
    lines = ended.stderr.splitlines()
    assert lines[0].startswith("ddp-n2 failed: ValueError: boom")
    assert "rank 1, step 2, forward" in lines[0]
    assert ended.stderr.count("boom") == 2  # the message, and the line of the user's file
    assert "usercode.py" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "site-packages" not in ended.stderr
    assert str(next(tmp_path.glob("outputs/runs/*/*/dpexp.log"))) in lines[-1]


def test_a_rank_killed_by_the_system_is_told_on_the_command_line(cli: Cli) -> None:
    ended = cli(*DDP2, *model("Failing", how="kill"), timeout=SOON_S)
    assert ended.returncode == 1
    assert "rank 1 was killed by SIGKILL" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr


@pytest.mark.parametrize("where", ["model", "dataset"])
def test_a_rank_that_hangs_ends_the_run_after_the_timeout(tmp_path: Path, where: str) -> None:
    slow = {
        "model": model("Failing", how="sleep"),
        "dataset": [
            "dataset=custom",
            "dataset._target_=usercode.SleepingRows",
            "+dataset.seconds=60",
            "+dataset.rank=1",
        ],
    }
    train = ("task=train", "parallel.timeout_s=3")
    error = fail(tmp_path, *DDP2, *train, *slow[where])
    assert error.kind == "hang"
    assert "3 s" in error.message
    assert "parallel.timeout_s" in error.message


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_loader_processes_end_with_their_rank(tmp_path: Path, how: str) -> None:
    signed = tmp_path / "signed"
    signed.mkdir()
    data = ("dataset=custom", "dataset._target_=usercode.SigningRows", f"+dataset.path={signed}")
    failing = model("Failing", how=how)
    error = fail(tmp_path / "run", *DDP2, *data, "loader.workers=1", *failing)
    assert error.rank == 1
    pids = [int(path.name) for path in signed.iterdir()]
    assert len(pids) == 2  # one loader process for each rank
    deadline = time.monotonic() + 15  # torch's loader processes look for their parent every 5 s
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [pid for pid in pids if alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("strategy", ["none", "ddp"])
def test_a_row_that_cannot_be_read_is_named(tmp_path: Path, strategy: str, workers: int) -> None:
    data = ("dataset=custom", "dataset._target_=usercode.FailingRows", "shuffle=false")
    error = fail(tmp_path, *SPREAD[strategy], *data, f"loader.workers={workers}")
    assert error.kind == "user_error"
    assert "row 50 cannot be read" in error.message
    assert error.type == "OSError"


# A loss that is not finite

BAD = ["dataset=custom", "dataset._target_=usercode.column", "+dataset.values=[1,2,3,4]"]
TWENTY = ["task=train", "epochs=null", "steps=20", "batch_size=4", "optimizer.lr=0.001"]


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf"])
@pytest.mark.parametrize("strategy", ["none", "ddp"])
def test_a_loss_that_is_not_finite_fails_the_run_at_that_step(
    tmp_path: Path, strategy: str, value: str
) -> None:
    bad = model("BadAtStep", call=3, value=value.replace(".", ""))
    error = fail(tmp_path, *SPREAD[strategy], *BAD, *TWENTY, *bad)
    assert error.kind == "nonfinite"
    assert error.message == "non-finite loss at step 3"
    losses = [row["loss"] for row in rows(tmp_path)]
    assert len(losses) >= 4
    assert [loss in ("nan", "inf", "-inf") for loss in losses[:4]] == [False] * 3 + [True]
    board = EventAccumulator(str(tmp_path))
    board.Reload()
    events = board.Scalars("loss/train")
    assert [event.step for event in events][:3] == [0, 1, 2]
    assert all(0 < event.value < 1e6 for event in events[:3])


# A model that does not fit its data


@pytest.mark.parametrize(("strategy", "got"), [("none", 30), ("dp", 15), ("ddp", 15)])
def test_a_layer_that_does_not_fit_its_input_is_named_with_both_shapes(
    tmp_path: Path, strategy: str, got: int
) -> None:
    error = fail(tmp_path, *SPREAD[strategy], *model("Tower", layers="[[5,4],[3,2]]"))
    assert error.kind == "user_error"
    assert "layer body.1" in error.message
    assert "in_features=3" in error.message
    assert f"[{got}, 4]" in error.message
    if strategy == "dp":
        assert "replica 0" in error.message


def test_a_model_for_images_that_gets_rows_is_named_with_the_shape(tmp_path: Path) -> None:
    error = fail(tmp_path, "model=cnn")
    assert "Conv2d" in error.message
    assert "[30, 5]" in error.message


def test_labels_out_of_range_fail_with_the_cause(tmp_path: Path) -> None:
    small = ("dataset=digits", "dataset.flatten=true", "model=mlp", "model.widths=[64,8,3]")
    error = fail(tmp_path, *small, "task=train")
    assert error.kind == "user_error"
    assert "out of bounds" in error.message


# What breaks under one strategy only


def test_a_replica_with_one_row_that_batch_norm_refuses_is_named(tmp_path: Path) -> None:
    norm = ["model=custom", "model._target_=torch.nn.BatchNorm1d", "+model.num_features=5"]
    data = ["dataset.rows=5", "batch_size=5"]
    error = fail(tmp_path / "dp", *norm, *data, "parallel=dp", "num_devices=4")
    assert "replica 2" in error.message
    assert "[1, 5]" in error.message
    single = dpexp.run([*norm, *data], folder=tmp_path / "none")
    assert single.result.status == "ok"


def test_taking_the_device_from_a_replicas_parameters_is_explained(tmp_path: Path) -> None:
    own = model("FirstParameterDevice")
    error = fail(tmp_path / "dp", *own, "parallel=dp", "num_devices=2")
    assert "parameters() is empty in a replica" in error.message
    for strategy in ("none", "ddp"):
        run = dpexp.run([*own, *SPREAD[strategy]], folder=tmp_path / strategy)
        assert run.result.status == "ok"


def test_ranks_with_different_numbers_of_parameters_are_told_both(tmp_path: Path) -> None:
    error = fail(tmp_path, *DDP2, *model("Lopsided"))
    assert "2" in error.message and "4" in error.message
    assert "param" in error.message
