"""Ctrl-C, kill and the loss of the parent during a run of the command line."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from signalled import SOON_S, Start, family, wait_for_no_process, wait_until
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

STEP_S = 0.2
SPREAD = {"none": ("parallel=none",), "ddp": ("parallel=ddp", "num_devices=2")}
DPEXP = ("-m", "dpexp")


def rows(folder: Path, rank: int = 0) -> list[int]:
    """The steps in a rank's table; [] before there is one."""
    path = folder / f"steps.rank{rank}.csv"
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


def run_folder(folder: Path) -> Path:
    return next(iter(folder.glob("outputs/runs/*/*")), folder)


def slow_steps(folder: Path) -> tuple[str, ...]:
    """A hundred steps of a fifth of a second, counted by a file per rank."""
    model = ("model=custom", "model._target_=usercode.Ticking", f"+model.path={folder / 'ticks'}")
    return (*model, f"+model.seconds={STEP_S}", "dataset.rows=200", "batch_size=2")


def check_what_is_left(tmp_path: Path, ranks: int, lost_s: float) -> None:
    """All steps but those of the last `lost_s` seconds are readable."""
    folder = run_folder(tmp_path)
    for rank in range(ranks):
        done = len((tmp_path / f"ticks.{rank}").read_text())
        kept = rows(folder, rank)
        assert kept == list(range(len(kept)))
        assert done - lost_s / STEP_S - 1 <= len(kept) <= done + 1
    board = EventAccumulator(str(folder))
    board.Reload()
    steps = [event.step for event in board.Scalars("time/step_ms")]
    assert steps == rows(folder, 0)


# Ctrl-C in a terminal reaches all processes of the command, `kill` the first one alone.
SIGNALS = {
    "kill none": ("none", 0, signal.SIGTERM, os.kill, 143),
    "kill ddp": ("ddp", 0, signal.SIGTERM, os.kill, 143),
    "kill ddp with loader processes": ("ddp", 1, signal.SIGTERM, os.kill, 143),
    "Ctrl-C none": ("none", 0, signal.SIGINT, os.killpg, 130),
    "Ctrl-C ddp": ("ddp", 0, signal.SIGINT, os.killpg, 130),
    "SIGINT to the first process of ddp": ("ddp", 0, signal.SIGINT, os.kill, 130),
}


@pytest.mark.parametrize(
    ("strategy", "workers", "signum", "send", "status"), SIGNALS.values(), ids=SIGNALS
)
def test_a_signal_ends_the_run_as_interrupted_and_keeps_its_steps(
    start: Start,
    tmp_path: Path,
    strategy: str,
    workers: int,
    signum: signal.Signals,
    send: Callable[[int, int], None],
    status: int,
) -> None:
    process = start(*DPEXP, *SPREAD[strategy], *slow_steps(tmp_path), f"loader.workers={workers}")
    wait_until(lambda: len(rows(run_folder(tmp_path))) >= 3, process)
    send(process.pid, signum)
    _, errors = process.communicate(timeout=SOON_S)
    assert process.returncode == status
    wait_for_no_process(process)
    record = json.loads((run_folder(tmp_path) / "run.json").read_text(encoding="utf-8"))
    assert record["status"] == "interrupted"
    assert record["error"]["kind"] == "interrupted"
    assert signum.name in record["error"]["message"]
    assert record["throughput"] is None
    check_what_is_left(tmp_path, 2 if strategy == "ddp" else 1, lost_s=1)
    assert "Traceback" not in errors
    assert len(errors.splitlines()) == 1, errors
    assert str(run_folder(tmp_path)) in errors


@pytest.mark.parametrize("strategy", SPREAD)
def test_a_signal_in_the_middle_of_a_write_leaves_the_same_steps_in_every_file(
    start: Start, tmp_path: Path, strategy: str
) -> None:
    user = ("model._target_=usercode.StoppedInAWrite", "+model.after_steps=2")
    arguments = [a for a in slow_steps(tmp_path) if not a.startswith("model._target_")]
    process = start(*DPEXP, *SPREAD[strategy], *arguments, *user)
    process.communicate(timeout=SOON_S)
    assert process.returncode == 1
    record = json.loads((run_folder(tmp_path) / "run.json").read_text(encoding="utf-8"))
    assert "SIGTERM" in record["error"]["message"]
    assert len(rows(run_folder(tmp_path))) >= 3
    check_what_is_left(tmp_path, 2 if strategy == "ddp" else 1, lost_s=1)


def test_a_signal_while_a_wait_for_other_ranks_fails_leaves_all_steps_in_the_files(
    start: Start, tmp_path: Path
) -> None:
    user = ("model._target_=usercode.StoppedInAWait", "+model.after_flushes=2")
    arguments = [a for a in slow_steps(tmp_path) if not a.startswith("model._target_")]
    process = start(*DPEXP, *SPREAD["none"], *arguments, *user)
    process.communicate(timeout=SOON_S)
    record = json.loads((run_folder(tmp_path) / "run.json").read_text(encoding="utf-8"))
    assert "SIGTERM" in record["error"]["message"]
    assert len(rows(run_folder(tmp_path))) > 3  # what the failed flush had, too
    check_what_is_left(tmp_path, 1, lost_s=0)


@pytest.mark.parametrize(("strategy", "workers"), [("none", 0), ("ddp", 0), ("ddp", 1)])
def test_without_their_parent_the_ranks_end_and_their_steps_are_kept(
    start: Start, tmp_path: Path, strategy: str, workers: int
) -> None:
    process = start(*DPEXP, *SPREAD[strategy], *slow_steps(tmp_path), f"loader.workers={workers}")
    wait_until(lambda: len(rows(run_folder(tmp_path))) >= 3, process)
    process.kill()
    process.wait(timeout=SOON_S)
    # The ranks notice at once; torch's loader processes look for their parent every 5 s.
    wait_for_no_process(process, limit_s=15 if workers else 5)
    assert not (run_folder(tmp_path) / "run.json").exists()
    check_what_is_left(tmp_path, 2 if strategy == "ddp" else 1, lost_s=1)


def has_loaded(pid: int, library: str) -> bool:
    try:
        return any(library in each.path for each in psutil.Process(pid).memory_maps())
    except psutil.Error:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="needs the memory maps of processes")
@pytest.mark.parametrize("library", ["", "_multiarray", "_asyncio", "_decimal"])
def test_ctrl_c_while_the_fork_server_imports_ends_with_130_and_without_a_traceback(
    start: Start, tmp_path: Path, library: str
) -> None:
    """The library is one that the fork server loads on its way: at the start, … at the end."""
    process = start(*DPEXP, *SPREAD["ddp"], *slow_steps(tmp_path))

    def is_there() -> bool:
        return any(has_loaded(pid, library) for pid in family(process) if pid != process.pid)

    wait_until(is_there, process)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=SOON_S)
    assert "Traceback" not in errors
    assert "KeyboardInterrupt" not in errors
    assert process.returncode == 130
    wait_for_no_process(process)


def test_ctrl_c_in_a_sweep_ends_the_cell_and_writes_the_report(
    start: Start, tmp_path: Path
) -> None:
    model = ("model=custom", "model._target_=usercode.Slow", "+model.seconds=0,0.2,0")
    process = start(*DPEXP, "-m", *model, "batch_size=1", "steps=50")

    def second_cell() -> Path:
        return next(iter(tmp_path.glob("outputs/sweeps/*/*/1_*")), tmp_path)

    wait_until(lambda: len(rows(second_cell())) >= 3, process)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=SOON_S)
    assert process.returncode == 130
    assert "Traceback" not in errors
    wait_for_no_process(process)

    folder = second_cell().parent
    sweep = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
    assert sweep["status"] == "interrupted"
    assert [cell["status"] for cell in sweep["cells"]] == ["ok", "interrupted"]
    assert not list(folder.glob("2_*"))
    assert "interrupted" in (folder / "report.md").read_text(encoding="utf-8")
    assert len((folder / "summary.csv").read_text(encoding="utf-8").splitlines()) == 3
    record = json.loads((second_cell() / "run.json").read_text(encoding="utf-8"))
    assert record["status"] == "interrupted"


WHILE_IT_STOPS = """
import os
from multiprocessing import forkserver
from dpexp import server
server.start(several_ranks=False)
pid = server.server_pid()
with forkserver._forkserver._lock:  # as in the middle of its own end
    server.stop_for_good()
try:
    os.kill(pid, 0)
except ProcessLookupError:
    print("it has ended", flush=True)
os._exit(0)
"""


def test_a_signal_while_the_fork_server_is_being_ended_does_not_wait_for_itself() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WHILE_IT_STOPS], capture_output=True, text=True, timeout=60,
        check=True,
    )  # fmt: skip
    assert ended.stdout == "it has ended\n"
