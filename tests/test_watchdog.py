"""Runs that hang: they are ended, the rank and the place are named, the stacks of all are kept."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dpexp
from dpexp import server
from dpexp.beacon import TICKS, WAITED, WIDTH, own_cells
from dpexp.loop import Progress
from dpexp.rank import STACKS
from dpexp.stacks import NO_ANSWER, collect, threads
from dpexp.watchdog import Watchdog

Cli = Callable[..., "subprocess.CompletedProcess[str]"]

TESTS = Path(__file__).parent
DDP2 = ("parallel=ddp", "num_devices=2")


def failing(how: str, **arguments: object) -> list[str]:
    chosen = ["model=custom", "model._target_=usercode.Failing", f"+model.how={how}"]
    return chosen + [f"+model.{key}={value}" for key, value in arguments.items()]


def error_of(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert record["status"] == "failed"
    return record["error"]


def test_a_hanging_rank_is_ended_named_and_shown_with_all_stacks(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ended = cli(*DDP2, *failing("sleep"), "watchdog_s=2", f"hydra.run.dir={folder}")
    assert ended.returncode == 1
    error = error_of(folder)
    assert (error["kind"], error["rank"], error["step"]) == ("hang", 1, 2)
    assert (error["phase"], error["during"]) == ("forward", None)
    assert set(error["stacks"]) == {"0", "1"}
    assert "in fail" in error["stacks"]["1"] and "usercode.py" in error["stacks"]["1"]
    assert "comm.py" in error["stacks"]["0"] and "in highest" in error["stacks"]["0"]
    assert error["traceback"] == error["stacks"]["1"]

    lines = ended.stderr.splitlines()
    assert lines[0].startswith("ddp-n2 failed: rank 1 hangs in forward of step 2, at ")
    assert "watchdog_s=2" in lines[0] and "rank 0 is in other of step 2" in lines[0]
    assert "time.sleep(60)" in ended.stderr  # the user's line
    assert lines[-1] == f"stacks of all ranks: {folder / 'dpexp.log'}"
    log = (folder / "dpexp.log").read_text(encoding="utf-8")
    assert "Stacks of rank 0" in log and "Stacks of rank 1" in log


def test_a_rank_that_is_stuck_in_c_code_and_holds_the_interpreter_is_seen_and_ended(
    tmp_path: Path,
) -> None:
    server.start(several_ranks=True)
    run = dpexp.run([*failing("stuck", rank=0), "watchdog_s=1"], folder=tmp_path / "run")
    error = run.result.error
    assert error is not None and error.stacks is not None
    assert (error.kind, error.rank, error.phase, error.step) == ("hang", 0, "forward", 2)
    assert "in fail" in error.stacks["0"]


def test_when_the_time_out_of_a_collective_is_over_the_late_rank_is_named(tmp_path: Path) -> None:
    server.start(several_ranks=True)
    run = dpexp.run([*DDP2, *failing("sleep"), "parallel.timeout_s=2"], folder=tmp_path / "run")
    error = run.result.error
    assert error is not None and error.stacks is not None
    assert (error.kind, error.rank, error.phase, error.step) == ("hang", 1, "forward", 2)
    assert set(error.stacks) == {"0", "1"}
    assert "in fail" in error.stacks["1"]
    assert "rank 0 waited 2 s for another rank (parallel.timeout_s=2)" in error.message
    assert error.user_frames is not None and "time.sleep(60)" in error.user_frames
    assert run.result.steps == {"measured": 2, "warmup": 1}  # rank 0's: it waits after step 2


# Who is to blame


@pytest.fixture
def beacon() -> Any:
    return multiprocessing.get_context(server.method()).RawArray("q", 3 * WIDTH)


def test_a_run_hangs_only_when_no_rank_comes_to_another_phase(beacon: Any, tmp_path: Path) -> None:
    watchdog = Watchdog(beacon, 3, tmp_path, 0.2)
    never = Watchdog(beacon, 3, tmp_path, None)
    for _ in range(4):
        own_cells(beacon, 1)[TICKS] += 1
        assert not watchdog.hung()
        time.sleep(0.1)
    time.sleep(0.2)
    assert watchdog.hung()
    assert not never.hung()


def test_time_in_which_the_launcher_was_stopped_itself_does_not_count(
    beacon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("dpexp.watchdog.now_s", lambda: now[0])
    watchdog = Watchdog(beacon, 3, tmp_path, 10)
    watchdog.hung()
    now[0] += 3600  # Ctrl-Z, and an hour later `fg`
    assert not watchdog.hung()
    for _ in range(9):
        now[0] += 1
        found = watchdog.hung()
    assert found


def test_the_rank_that_is_furthest_behind_is_to_blame(beacon: Any, tmp_path: Path) -> None:
    watchdog = Watchdog(beacon, 3, tmp_path, 1)
    for rank, ticks in enumerate((7, 5, 6)):
        own_cells(beacon, rank)[TICKS] = ticks
    assert watchdog.culprit().rank == 1
    own_cells(beacon, 1)[WAITED] = 1  # its time was up: it waited for another one
    assert watchdog.culprit().rank == 2
    assert watchdog.late()


WAITS = """Current thread 0x1 (most recent call first):
  File "/env/torch/distributed/distributed_c10d.py", line 1 in all_reduce
  File "/home/me/train.py", line 2 in step
"""
WORKS = """Thread 0x2 (most recent call first):
  File "/env/threading.py", line 1 in wait

Thread 0x1 (most recent call first):
  File "/home/me/train.py", line 3 in forward
"""


def test_of_ranks_equally_far_one_outside_of_a_collective_is_to_blame(
    beacon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(3):
        own_cells(beacon, rank)[TICKS] = 5
    texts = {0: WAITS, 1: WAITS, 2: WORKS}
    monkeypatch.setattr("dpexp.watchdog.collect", lambda _pids, _paths: texts)
    watchdog = Watchdog(beacon, 3, tmp_path, 1)
    watchdog.look({0: 1, 1: 2, 2: 3})
    assert watchdog.culprit().rank == 2
    error = watchdog.hang()
    assert error.message.startswith("rank 2 hangs in launch, at /home/me/train.py:3 in forward ")
    assert error.stacks == {"0": WAITS, "1": WAITS, "2": WORKS}


def test_the_main_thread_comes_first_whichever_answered() -> None:
    assert [frames[0].function for frames in threads(WORKS)] == ["forward", "wait"]
    assert threads("nothing that looks like a stack") == []


def test_a_stopped_process_gives_no_stack_and_does_not_hold_up_the_end(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from dpexp.stacks import offer\n"
        "offer(Path(sys.argv[1]), 3); print('there', flush=True); sys.stdin.read()"
    )
    path = tmp_path / STACKS
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"there\n"
        os.kill(process.pid, signal.SIGSTOP)
        assert collect({3: process.pid}, path) == {3: NO_ANSWER}
        os.kill(process.pid, signal.SIGCONT)
        assert "<module>" in collect({3: process.pid}, path)[3]
        process.kill()


def test_progress_without_a_launcher_does_not_wait_to_be_seen() -> None:
    began = time.monotonic()
    Progress().wait_to_be_seen()
    assert time.monotonic() - began < 1
