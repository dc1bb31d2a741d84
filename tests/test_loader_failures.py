"""Loader processes that fail are told with their setting; streams give each row once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import TESTS
from realruns import EVERY, SPREAD, Runs, column, data, diary, difference, model, weights

import dpexp
from dpexp.records import ErrorRecord

SOON_S = 60
TRAIN = ("task=train", "save_weights=true", "optimizer.lr=0.0001")
LIN1 = model("usercode.Lin1")
RANK = {"none": 0, "ddp on 2": 1}
LOADER = {"map": "userstreams.FailingLoader", "stream": "userstreams.FailingStream"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def left(signed: Path) -> list[int]:
    """Of the processes that left their ids in a folder those that do not end by themselves."""
    pids = [int(path.name) for path in signed.iterdir()]
    assert pids
    deadline = time.monotonic() + 10  # torch's loader processes look for their parent every 5 s
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    remaining = [pid for pid in pids if alive(pid)]
    for pid in remaining:
        os.kill(pid, signal.SIGKILL)
    return remaining


def fail(run: Runs, spread: str, kind: str, how: str, *overrides: str) -> ErrorRecord:
    """A run whose loader process fails: soon, with an error in run.json, and nothing left."""
    signed, began = run.folder(), time.monotonic()
    chosen = data(LOADER[kind], how=how, path=signed, rank=RANK[spread])
    ended = run.ended(*chosen, *TRAIN, *LIN1, "shuffle=false", *EVERY[spread], *overrides)
    assert time.monotonic() - began < SOON_S
    assert ended.result.status == "failed"
    assert ended.result.error is not None
    written = json.loads((ended.folder / "run.json").read_text(encoding="utf-8"))
    assert written["error"]["message"] == ended.result.error.message
    assert left(signed) == []
    return ended.result.error


# Every way is told under none; of the others those that torch finds in another way.
@pytest.mark.parametrize(
    ("spread", "kind", "how"),
    [
        *(("none", "map", how) for how in ("kill", "terminate", "crash", "exit", "_exit")),
        *(("ddp on 2", "map", how) for how in ("kill", "exit", "_exit")),
        ("none", "stream", "kill"),
        ("ddp on 2", "stream", "kill"),
    ],
)
def test_a_loader_process_that_ends_is_told_with_the_setting(
    run: Runs, spread: str, kind: str, how: str
) -> None:
    # Long before the time-out: who is dead does not have to be waited for.
    began = time.monotonic()
    error = fail(run, spread, kind, how, "loader.workers=1", "loader.timeout_s=12")
    assert time.monotonic() - began < 10
    assert (error.kind, error.rank) == ("crash", RANK[spread])
    assert "a loader process died (loader.workers=1)" in error.message


@pytest.mark.parametrize("spread", RANK)
@pytest.mark.parametrize("kind", LOADER)
def test_batches_that_a_dying_loader_process_leaves_behind_do_not_hide_the_cause(
    run: Runs, kind: str, spread: str
) -> None:
    # The rank opens a batch that waited for it while the process that made it is about to end.
    slow = (*model("userstreams.Slow"), "batch_size=12", "loader.timeout_s=10")
    error = fail(run, spread, kind, "linger", "loader.workers=1", *slow)
    assert (error.kind, error.rank) == ("crash", RANK[spread])
    assert "a loader process died (loader.workers=1)" in error.message


@pytest.mark.parametrize(
    ("kind", "spread"), [("map", "none"), ("map", "ddp on 2"), ("stream", "ddp on 2")]
)
def test_a_loader_process_that_hangs_is_told_with_the_time_out(
    run: Runs, kind: str, spread: str
) -> None:
    error = fail(run, spread, kind, "hang", "loader.workers=2", "loader.timeout_s=3")
    assert error.kind == "hang"
    assert error.rank == RANK[spread]
    assert "loader.timeout_s=3" in error.message
    assert "loader.workers=2" in error.message


def test_a_loader_process_may_die_in_a_later_epoch(run: Runs) -> None:
    again = ("loader.workers=1", "epochs=3", "loader.persistent_workers=false")
    error = fail(run, "none", "map", "kill", *again)
    assert "loader.workers=1" in error.message


@pytest.mark.parametrize("spread", RANK)
def test_without_loader_processes_the_same_dataset_is_read(run: Runs, spread: str) -> None:
    chosen = data(LOADER["map"], how="kill", path=run.folder())
    assert column(run(*chosen, *TRAIN, *LIN1, *EVERY[spread]), "global_rows") == [30, 30]


@pytest.mark.parametrize("spread", RANK)
def test_a_small_dev_shm_is_told_by_its_name(tmp_path: Path, spread: str) -> None:
    small = "mount -t tmpfs -o size=1m tmpfs /dev/shm"
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare, for a /dev/shm of its own")
    if subprocess.run(["unshare", "-m", "sh", "-c", small], check=False).returncode:
        pytest.skip("may not mount a /dev/shm of its own")
    signed = tmp_path / "signed"
    signed.mkdir()
    chosen = [*data("userstreams.Large", path=signed), *model("userstreams.Wide")]
    command = [sys.executable, "-m", "dpexp", *chosen, "batch_size=4", "loader.workers=1"]
    began = time.monotonic()
    ended = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'{small} && exec "$@"', "sh", *command, *EVERY[spread]],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(TESTS), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=SOON_S,
        check=False,
    )
    assert time.monotonic() - began < SOON_S
    assert ended.returncode == 1
    assert "/dev/shm" in ended.stderr
    assert "loader.workers=1" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert left(signed) == []


# persistent_workers


@pytest.mark.parametrize(
    ("spread", "persistent", "processes"),
    [("none", True, 2), ("none", False, 6), ("ddp on 2", True, 4), ("ddp on 2", False, 12)],
)
def test_loader_processes_are_kept_or_started_again_in_each_epoch(
    run: Runs, spread: str, persistent: bool, processes: int
) -> None:
    signed = run.folder()
    loader = ("loader.workers=2", f"loader.persistent_workers={persistent}", "epochs=3")
    chosen = (*data("userstreams.Signing", path=signed), *TRAIN, *LIN1, "batch_size=4")
    got = run(*chosen, *loader, *EVERY[spread])
    assert len(list(signed.iterdir())) == processes
    here = run(*chosen, "epochs=3", *EVERY["none"])
    assert difference(weights(got), weights(here)) <= 1e-6
    assert left(signed) == []


# Iterable datasets: batches of 6 and 5 rows, so that no rank is idle on 3 devices.


@pytest.mark.parametrize(
    ("name", "spread", "workers"),
    [
        *(("Numbers", f"ddp on {ranks}", count) for ranks in (1, 2, 3) for count in (0, 1, 2)),
        ("Numbers", "none", 0),
        ("Numbers", "none", 2),
        ("Numbers", "dp on 2", 2),
        ("Numbers", "fsdp on 2", 2),
        *(("SplitByWorker", spread, 2) for spread in ("none", "ddp on 2", "ddp on 3")),
    ],
)
def test_each_row_of_a_stream_is_seen_once(run: Runs, name: str, spread: str, workers: int) -> None:
    path = run.folder() / "calls"
    chosen = (*data(f"userstreams.{name}"), *model("WeightDiary", path=path), "batch_size=6")
    got = run(*chosen, *TRAIN, f"loader.workers={workers}", *EVERY[spread])
    assert sorted(value for call in diary(path) for value in call["rows"]) == list(range(11))
    assert column(got, "global_rows") == [6, 5]
    single = run(*data("userstreams.Numbers"), *LIN1, "batch_size=6", *TRAIN, *EVERY["none"])
    assert column(got, "loss") == pytest.approx(column(single, "loss"), rel=1e-6)
    assert difference(weights(got), weights(single)) <= 1e-6


@pytest.mark.parametrize("workers", [0, 2])
def test_what_has_only_an_iterator_is_read_as_a_stream(run: Runs, workers: int) -> None:
    path = run.folder() / "calls"
    chosen = (*data("userstreams.PlainIterable"), *model("WeightDiary", path=path))
    run(*chosen, "batch_size=6", f"loader.workers={workers}", *SPREAD["ddp on 2"])
    assert sorted(value for call in diary(path) for value in call["rows"]) == list(range(11))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("spread", ["ddp on 2", "ddp on 3"])
def test_a_stream_that_splits_itself_by_rank_is_refused(
    run: Runs, spread: str, workers: int
) -> None:
    chosen = (*data("userstreams.SplitByRank"), *LIN1, "batch_size=6", f"loader.workers={workers}")
    with pytest.raises(dpexp.ConfigError, match="SplitByRank") as refusal:
        run(*chosen, *TRAIN, *EVERY[spread])
    assert "without looking at the rank" in str(refusal.value)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("spread", RANK)
def test_a_row_of_a_stream_that_cannot_be_read_is_named(
    run: Runs, spread: str, workers: int
) -> None:
    chosen = (*data("userstreams.Numbers", bad=8), *LIN1, "batch_size=6")
    ended = run.ended(*chosen, *TRAIN, f"loader.workers={workers}", *EVERY[spread])
    assert ended.result.status == "failed"
    assert ended.result.error.kind == "user_error"
    assert ended.result.error.type == "OSError"
    assert "row 8 cannot be read" in ended.result.error.message
    assert column(ended, "global_rows") == [6]
