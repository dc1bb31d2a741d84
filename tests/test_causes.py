"""Which of several ranks' ends caused the others."""

from __future__ import annotations

import errno
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

import dpexp
from dpexp import server
from dpexp.beacon import Position
from dpexp.causes import root_cause
from dpexp.failures import LATE_PEER, LOST_PEER
from dpexp.records import ErrorRecord

AT = [Position(0, 9, 4, "backward", None, False), Position(1, 8, 4, "forward", None, False)]
LOST = ErrorRecord("crash", LOST_PEER, "rank 0 lost the connection", 0)
LATE = ErrorRecord("hang", LATE_PEER, "rank 0 waited", 0)
OWN = ErrorRecord("user_error", "ValueError", "boom", 1)
TOLD = ErrorRecord("interrupted", "Interrupted", "stopped by SIGTERM", 1)


@pytest.mark.parametrize(
    ("records", "codes", "cause"),
    [
        ({0: LOST, 1: OWN}, {0: 1, 1: 1}, OWN),
        ({0: LATE, 1: TOLD}, {0: 1}, LATE),
        ({0: LOST, 1: TOLD}, {0: 1}, LOST),
    ],
)
def test_a_ranks_own_error_comes_before_its_echoes(
    records: dict[int, ErrorRecord], codes: dict[int, int], cause: ErrorRecord
) -> None:
    assert root_cause(records, codes, AT) is cause


@pytest.mark.parametrize(
    ("code", "name"), [(-9, "SIGKILL"), (0, "exit 0"), (7, "exit 7")], ids=["kill", "0", "7"]
)
def test_of_a_rank_that_ended_without_a_word_the_place_is_known(code: int, name: str) -> None:
    found = root_cause({0: LOST}, {0: 1, 1: code}, AT)
    assert (found.kind, found.type, found.rank) == ("crash", name, 1)
    assert (found.step, found.phase, found.during) == (4, "forward", None)
    assert "[rank 1, step 4, forward]" in found.message


@pytest.mark.parametrize("others", [{}, {0: LOST}, {0: LATE}], ids=["alone", "lost", "late"])
def test_a_signal_to_one_rank_is_the_cause_and_not_its_echoes(
    others: dict[int, ErrorRecord],
) -> None:
    found = root_cause({**others, 1: TOLD}, {**dict.fromkeys(others, 1), 1: 143}, AT)
    assert (found.kind, found.type, found.rank, found.step) == ("crash", "SIGTERM", 1, 4)
    assert found.message == "rank 1 got SIGTERM from outside [rank 1, step 4, forward]"
    both = root_cause({0: TOLD, 1: TOLD}, {0: 255, 1: 255}, AT)  # nobody knows their exit codes
    assert (both.type, both.rank) == ("ForkServer", None)


# What goes wrong before there are ranks


def test_without_room_for_its_scratch_files_a_run_fails_in_its_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: Any, **_more: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/dpexp-x")

    monkeypatch.setattr("dpexp.launch.tempfile.TemporaryDirectory", full)
    sweep = dpexp.sweep(["parallel=none,dp", "num_devices=1"], folder=tmp_path / "sweep")
    errors = [run.result.error for run in sweep.runs]
    assert [error and (error.kind, error.phase) for error in errors] == [("crash", "launch")] * 2
    assert errors[0] is not None and "No space left on device" in errors[0].message
    assert [(cell.status, cell.kind, cell.phase) for cell in sweep.cells] == [
        ("failed", "crash", "launch")
    ] * 2


def test_when_the_second_process_cannot_be_started_the_first_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.start(several_ranks=True)
    connect, calls = forkserver.connect_to_new_process, []

    def once(fds: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return connect(fds)

    monkeypatch.setattr(forkserver, "connect_to_new_process", once)
    run = dpexp.run(["parallel=ddp", "num_devices=2"], folder=tmp_path / "run")
    error = run.result.error
    assert error is not None
    assert (error.kind, error.type, error.phase) == ("crash", "BlockingIOError", "launch")
    assert "could not be started" in error.message  # that none is left: see conftest.py
