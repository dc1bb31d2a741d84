"""Faults made on purpose, those of docs/reliability.md: how a sweep ends under each."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from benchmarks.reliability import command
from benchmarks.reliability.command import Command
from benchmarks.reliability.faults import FINE, SWEEPS, Fault
from benchmarks.reliability.looking import finished, lost
from benchmarks.reliability.page import line, plain, unexpected
from benchmarks.reliability.tries import sweep_try

# Those that no other test has. The whole table: python -m benchmarks.reliability
QUICK = (
    ("exception in a hook of backward", 2),
    ("exception in a loader worker", 1),
    ("stale torchrun variables, all of them", 2),
)


def fault_of(name: str, ranks: int) -> Fault:
    (found,) = (each for each in SWEEPS if each.name.startswith(name) and each.ranks == ranks)
    return found


@pytest.mark.parametrize(("name", "ranks"), QUICK)
def test_a_fault_ends_as_it_has_to_and_nothing_is_lost_or_left(name: str, ranks: int) -> None:
    seen = sweep_try(fault_of(name, ranks), 0, resume=False)
    assert seen.wrong == ()
    assert (seen.lost, seen.orphans) == (0, 0)


# The harness itself


def test_what_does_not_end_as_it_has_to_is_named() -> None:
    fault = fault_of("exception in the model", 1)
    seen = sweep_try(replace(fault, ends=replace(FINE, words="nobody says this")), 0, resume=False)
    assert "exit status 1" in seen.wrong
    assert "cell: failed (user_error)" in seen.wrong
    assert any(text.startswith("told: ") for text in seen.wrong)
    shown = line("name", "none", [seen])
    assert "**0 of 1**" in shown
    assert any("exit status 1: 1 of 1" in text for text in unexpected({("name", "none"): [seen]}))


LEAVES_ONE = """
import subprocess, sys
sleeping = [sys.executable, "-c", "import time; time.sleep(60)"]
subprocess.Popen(sleeping, start_new_session=True)
"""


def test_a_process_that_has_left_the_session_is_found_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "ORPHAN_S", 0.2)
    (tmp_path / "leaves_one.py").write_text(LEAVES_ONE)
    started = Command("leaves_one", [], tmp_path, {})
    assert started.wait() == 0
    (left,) = started.family()
    assert started.orphans() == 1
    deadline = time.monotonic() + 5
    while psutil.pid_exists(left.pid) and time.monotonic() < deadline:
        if left.status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.02)
    assert started.family() == []


def test_a_result_that_was_touched_counts_as_lost(tmp_path: Path) -> None:
    for number in range(3):
        folder = tmp_path / f"{number}_none_n1"
        folder.mkdir()
        (folder / "run.json").write_text('{"status": "ok"}')
        (folder / "steps.rank0.csv").write_text("step\n0\n")
    before = finished(tmp_path)
    assert len(before) == 3
    assert lost(before) == 0
    os.utime(tmp_path / "0_none_n1" / "run.json", ns=(1, 1))
    (tmp_path / "1_none_n1" / "steps.rank0.csv").unlink()
    assert lost(before) == 2


def test_what_the_user_reads_is_shown_without_what_changes_from_try_to_try() -> None:
    told = (
        "none-n1: stopped; its steps are in /tmp/reliability-ab12/disk/sweep/1_none_n1 (pid 4711)"
    )
    assert plain(told) == "`none-n1: stopped; its steps are in …/disk/sweep/1_none_n1 (pid …)`"
