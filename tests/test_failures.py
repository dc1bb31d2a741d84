"""From an exception in a rank to an error record."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_context, make_plan_for
from torch import nn
from usercode import Failing, FailingRows

from dpexp.batches import Inputs
from dpexp.build import UserCodeError, build
from dpexp.errors import ConfigError, NonFiniteLossError
from dpexp.failures import LATE_PEER, LOST_PEER, describe, user_frames
from dpexp.lifeline import Interrupted
from dpexp.loop import Progress
from dpexp.parallel.dp import DataParallel
from dpexp.parallel.replicas import ReplicaError
from dpexp.records import ErrorRecord
from dpexp.schema import Precision
from dpexp.stats import percentile

ONE = make_plan_for("none", 1)
TWO = make_plan_for("ddp", 2, parallel={"timeout_s": 6.0})


def caught_from(code: Callable[[], Any]) -> BaseException:
    try:
        code()
    except BaseException as error:  # noqa: BLE001  # SystemExit and Interrupted are among them
        return error
    raise AssertionError("nothing was raised")


def raising(error: BaseException) -> Callable[[], Any]:
    def code() -> None:
        raise error

    return code


def at(step: int, phase: str, during: str = "") -> Progress:
    progress = Progress()
    progress.step, progress.phase, progress.during = step, phase, during
    return progress


def record_of(
    code: Callable[[], Any], plan: Any = ONE, rank: int = 0, step: int = 2, phase: str = "forward"
) -> ErrorRecord:
    return describe(caught_from(code), plan, rank, at(step, phase))


def under_dp(model: nn.Module, rows: int, num_devices: int, features: int) -> Callable[[], Any]:
    """A forward over virtual devices."""

    def code() -> None:
        strategy = DataParallel(make_context("dp", num_devices))
        strategy.wrap(model)
        try:
            strategy.forward(Inputs((torch.zeros(rows, features),), {}, None), rows)
        finally:
            strategy.close()

    return code


def test_an_error_of_the_user_says_what_where_and_in_which_step() -> None:
    record = record_of(raising(ValueError("boom")), TWO, rank=1, step=2, phase="data")
    assert (record.kind, record.type) == ("user_error", "ValueError")
    assert record.message == "ValueError: boom [rank 1, step 3, data]"  # 2 is over
    assert (record.rank, record.step, record.phase, record.during) == (1, 3, "data", None)
    assert record.traceback is not None
    assert record.traceback.startswith("Traceback (most recent call last):")


def test_a_step_that_is_not_the_runs_own_says_of_what_it_is() -> None:
    error = caught_from(raising(ValueError("boom")))
    record = describe(error, ONE, 0, at(2, "backward", during="the parity check"))
    assert record.message == "ValueError: boom [rank 0, step 2, backward of the parity check]"
    assert (record.phase, record.during) == ("backward", "the parity check")


def test_in_set_up_no_step_is_named() -> None:
    record = record_of(raising(ValueError("boom")), step=-1, phase="set-up")
    assert (record.message, record.step) == ("ValueError: boom", None)


@pytest.mark.parametrize(("step", "phase"), [(-1, "data"), (0, "forward")])
def test_the_first_step_is_named_by_its_number(step: int, phase: str) -> None:
    record = record_of(raising(ValueError("boom")), step=step, phase=phase)
    assert (record.message, record.step) == (f"ValueError: boom [rank 0, step 0, {phase}]", 0)


def test_an_error_of_a_loader_process_is_told_without_its_traceback() -> None:
    caught = (
        "Caught OSError in DataLoader worker process 1.\n"
        "Original Traceback (most recent call last):\n"
        '  File "rows.py", line 7, in __getitem__\n    raise OSError("row 3")\n'
        "OSError: row 3 cannot be read\nlook at its file\n"
    )
    record = record_of(raising(OSError(caught)), step=2, phase="data")
    words = "OSError: row 3 cannot be read\nlook at its file (in a loader process)"
    assert record.message == f"{words} [rank 0, step 3, data]"
    assert record.traceback is not None
    assert "line 7, in __getitem__" in record.traceback


@pytest.mark.parametrize(
    ("error", "message"), [(KeyError("a"), "KeyError: 'a'"), (RuntimeError(), "RuntimeError")]
)
def test_an_error_with_little_text_is_named_by_its_type(error: Exception, message: str) -> None:
    assert record_of(raising(error), step=-1, phase="set-up").message == message


def test_an_error_in_a_model_names_the_layer_and_the_shape_it_got() -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(4, 2))
    record = record_of(lambda: model(torch.zeros(6, 5)))
    layer = "(in layer 2: Linear(in_features=4, out_features=2, bias=True), which got [6, 3])"
    assert layer in record.message
    assert record.message.endswith("[rank 0, step 2, forward]")


def test_a_layer_deep_inside_is_named_by_its_dotted_path() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(5, 5), nn.Linear(4, 2)))
    message = record_of(lambda: model(torch.zeros(6, 5))).message
    assert "in layer 1.1: Linear(in_features=4" in message
    assert "which got [6, 5])" in message


def test_an_error_in_the_models_own_forward_names_the_model() -> None:
    model = Failing("raise", rank=0, call=0)
    message = record_of(lambda: model(torch.zeros(3, 5))).message
    assert message == (
        "ValueError: boom (in layer model: Failing, which got [3, 5]) [rank 0, step 2, forward]"
    )


def test_all_shapes_that_a_layer_got_are_named() -> None:
    bilinear = nn.Bilinear(2, 3, 1)
    message = record_of(lambda: bilinear(torch.zeros(4, 2), torch.zeros(4, 7))).message
    assert "which got [4, 2], [4, 7])" in message


def test_an_error_outside_of_a_model_names_no_layer() -> None:
    assert "in layer" not in record_of(lambda: FailingRows(3)[3], phase="data").message


class TwoArguments(nn.Module):
    def forward(self, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return rows * mask


@pytest.mark.parametrize(
    "call",
    [
        lambda model, rows: model(rows),
        lambda model, rows: model(rows, rows, rows),
        lambda model, rows: model(rows, rows, labels=rows),
    ],
    ids=["missing", "too many", "unknown keyword"],
)
def test_arguments_that_do_not_fit_the_forward_hint_at_the_inputs(call: Callable[..., Any]) -> None:
    code = partial(call, TwoArguments(), torch.zeros(3, 5))
    message = record_of(code, step=0).message
    assert "TypeError: TwoArguments.forward() " in message
    assert "chosen by batch.inputs" in message
    assert message.endswith("[rank 0, step 0, forward]")
    assert "batch.inputs" not in record_of(code, step=2).message


def test_an_error_in_a_loss_of_torch_names_the_loss() -> None:
    loss = nn.CrossEntropyLoss()
    code = partial(loss, torch.zeros(3, 2), torch.zeros(4, dtype=torch.int64))
    message = record_of(code, step=0).message
    assert "(in the loss: CrossEntropyLoss(), which got [3, 2], [4])" in message
    assert "Try: another loss=" in message
    assert "in layer" not in message


@pytest.mark.parametrize(
    ("precision", "tried"),
    [(Precision.fp32, "other arguments (model.<name>=…"), (Precision.bf16, "precision=fp32")],
)
def test_an_error_in_the_first_forward_says_what_to_try(precision: Precision, tried: str) -> None:
    plan = make_plan_for("none", 1, precision=precision)
    message = record_of(lambda: nn.Linear(4, 2)(torch.zeros(3, 5)), plan, step=0).message
    assert tried in message
    assert ("precision=" in message) is (precision is Precision.bf16)


def test_an_error_in_a_replica_names_replica_layer_and_shapes() -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(4, 2))
    record = record_of(under_dp(model, rows=6, num_devices=2, features=5))
    assert (record.kind, record.type) == ("user_error", "RuntimeError")
    assert "in replica 0 with input [3, 5]: RuntimeError: " in record.message
    assert "in layer 1: Linear(in_features=4" in record.message
    assert "which got [3, 3])" in record.message


def test_a_replicas_single_row_that_batch_norm_refuses_is_named() -> None:
    record = record_of(under_dp(nn.BatchNorm1d(3), rows=5, num_devices=4, features=3))
    assert "in replica 2 with input [1, 3]: ValueError: Expected more" in record.message


@pytest.mark.parametrize(
    "wrap",
    [
        lambda error: error,
        lambda error: chained(ReplicaError(0, (3, 5), error), error),
        lambda error: chained(UserCodeError("model raised"), error),
    ],
    ids=["bare", "in a replica", "in a constructor"],
)
def test_a_refusal_stays_one_paragraph_without_frames(wrap: Callable[..., BaseException]) -> None:
    record = record_of(raising(wrap(ConfigError("loss", "mse", "needs a target"))))
    assert (record.kind, record.type) == ("config", "ConfigError")
    assert record.message == "loss='mse': needs a target."
    assert record.user_frames is None


def chained(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def test_a_non_finite_loss_names_the_step_of_the_loss() -> None:
    record = record_of(raising(NonFiniteLossError(3)), step=9)
    assert (record.kind, record.message) == ("nonfinite", "non-finite loss at step 3")


def test_a_signal_is_an_interruption() -> None:
    record = record_of(raising(Interrupted(signal.SIGTERM)))
    assert (record.kind, record.message) == ("interrupted", "stopped by SIGTERM")


@pytest.mark.parametrize("code", [0, 3, None, "bye"])
def test_leaving_by_sys_exit_is_a_crash_with_its_code(code: Any) -> None:
    record = record_of(raising(SystemExit(code)), rank=1)
    assert (record.kind, record.type) == ("crash", "SystemExit")
    assert f"called sys.exit({code!r})" in record.message
    assert "[rank 1, step 2, forward]" in record.message


@pytest.mark.parametrize(
    "code",
    [
        raising(MemoryError("not enough")),
        raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")),
        lambda: torch.empty(10**15),
        lambda: Failing("memory", rank=0, call=0)(torch.zeros(3, 5)),
        under_dp(Failing("memory", rank=0, call=0), rows=4, num_devices=2, features=5),
    ],
    ids=["host", "device", "allocator", "model", "replica"],
)
def test_running_out_of_memory_is_told_as_such(code: Callable[[], Any]) -> None:
    record = record_of(code)
    assert record.kind == "oom"
    assert "allocate" in record.message or "not enough" in record.message
    assert "\n" not in record.message


@pytest.mark.parametrize(
    "text",
    [
        "Timed out waiting 6000ms for recv operation to complete",
        # What gloo tells the second of two operations that wait at the same time.
        "Application timeout caused pair closure",
        "wait timeout after 6000ms, keys: /default_pg/0//there",
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE)",
    ],
)
def test_waiting_too_long_for_another_rank_names_the_seconds_and_the_setting(text: str) -> None:
    record = record_of(raising(RuntimeError(text)), TWO, rank=1)
    assert (record.kind, record.type) == ("hang", LATE_PEER)
    assert "rank 1 waited 6 s for another rank (parallel.timeout_s=6)" in record.message


# Rank 0 has two sums under way when rank 1 no longer comes; the second is told something else.
LATE = """
import datetime, os, sys, time
import torch, torch.distributed as dist

rank, limit = int(sys.argv[1]), datetime.timedelta(seconds=5)
dist.init_process_group(
    "gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2, timeout=limit
)
dist.all_reduce(torch.zeros(4))
if rank == 1:
    sys.stdin.read()
    os._exit(0)
for work in [dist.all_reduce(torch.zeros(4), async_op=True) for _ in range(2)]:
    try:
        work.wait()
    except RuntimeError as error:
        print(error, flush=True)
os._exit(0)
"""


def test_each_of_several_operations_that_wait_at_once_is_told_as_a_late_rank(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", LATE]
    store = str(tmp_path / "store")
    late = subprocess.Popen([*command, "1", store], stdin=subprocess.PIPE)
    told = subprocess.run(
        [*command, "0", store], capture_output=True, text=True, timeout=120, check=True
    )
    late.communicate(timeout=120)
    first, second = told.stdout.splitlines()
    for text in (first, second):
        record = record_of(raising(RuntimeError(text)), TWO)
        assert (record.kind, record.type) == ("hang", LATE_PEER), text


@pytest.mark.parametrize(
    "text",
    [
        "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711",
        "Connection reset by peer",
        "writev [127.0.0.1]:1: Broken pipe",
        "[/pytorch/gloo/gloo/transport/tcp/pair.cc:547] Read error [10.0.0.2]:1: No route to host",
        "[/pytorch/gloo/gloo/transport/tcp/pair.cc:300] some other failure of the connection",
    ],
)
def test_a_lost_connection_is_told_apart_from_its_cause(text: str) -> None:
    record = record_of(raising(RuntimeError(text)), TWO, rank=1)
    assert (record.kind, record.type) == ("crash", LOST_PEER)
    assert "rank 1 lost the connection to another rank" in record.message


def test_ranks_that_send_unequal_amounts_have_not_lost_each_other() -> None:
    text = (
        "[enforce fail at /pytorch/gloo/gloo/transport/tcp/pair.cc:446] "
        "op.preamble.length <= op.nbytes. 8 vs 4"
    )
    record = record_of(raising(RuntimeError(text)), TWO, rank=1)
    assert record.kind == "user_error"
    assert text in record.message


@pytest.mark.parametrize("text", ["Timed out", "Broken pipe", "Connection refused"])
def test_alone_such_an_error_is_the_users_own(text: str) -> None:
    record = record_of(raising(RuntimeError(text)), ONE)
    assert (record.kind, record.type) == ("user_error", "RuntimeError")
    assert text in record.message


def frames_of(code: Callable[[], Any]) -> str:
    frames = user_frames(caught_from(code))
    assert frames is not None
    return frames


def test_the_users_frames_end_in_her_own_line_and_hold_none_of_torch() -> None:
    model = nn.Sequential(nn.ReLU(), Failing("raise", rank=0, call=0))
    frames = frames_of(lambda: model(torch.zeros(3, 5)))
    assert frames.rstrip().endswith('raise ValueError("boom")')
    assert str(Path("tests") / "usercode.py") in frames
    assert "site-packages" not in frames


def test_an_error_deep_in_torch_shows_the_users_line_that_led_there() -> None:
    def forward() -> None:
        nn.Linear(4, 2)(torch.zeros(3, 5))

    frames = frames_of(forward)
    assert frames.rstrip().endswith("nn.Linear(4, 2)(torch.zeros(3, 5))")


def test_the_frames_of_a_constructor_are_those_of_the_cause() -> None:
    frames = frames_of(lambda: build("model", {"_target_": "usercode.Raising"}))
    assert "raise RuntimeError(text)" in frames
    assert "dpexp/build.py" not in frames


def test_the_frames_of_a_replica_are_those_of_the_cause() -> None:
    model = Failing("raise", rank=0, call=0)
    frames = frames_of(under_dp(model, rows=4, num_devices=2, features=5))
    assert 'raise ValueError("boom")' in frames
    assert "dpexp/parallel" not in frames


def test_without_any_code_of_the_user_there_are_no_frames() -> None:
    with ThreadPoolExecutor(1) as pool:  # so that this test is on no traceback
        error = pool.submit(percentile, [], 50).exception()
    assert error is not None
    assert user_frames(error) is None
