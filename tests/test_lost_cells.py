"""Results of cells that could not write their own, or did not know all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders import composed, make_run_result
from omegaconf import OmegaConf

from dpexp.lost_cells import record_ended
from dpexp.records import ErrorRecord, read_run

CANCELLED = ErrorRecord("interrupted", "SlurmCancelled", "cancelled", phase="launch")
FAILED = ErrorRecord("crash", "SlurmEnd", "ended as FAILED", phase="launch")


@pytest.fixture
def config() -> dict[str, Any]:
    """As a cell's job has it."""
    plain: Any = OmegaConf.to_container(composed())
    return dict(plain)


@pytest.mark.parametrize(
    ("ended", "status"), [(CANCELLED, "interrupted"), (FAILED, "failed")], ids=["cancel", "fail"]
)
def test_a_job_that_wrote_nothing_gets_a_result_with_slurms_reason(
    tmp_path: Path, config: dict[str, Any], ended: ErrorRecord, status: str
) -> None:
    record_ended(tmp_path / "cell", ended, config)
    run = read_run(tmp_path / "cell/run.json")
    assert run["status"] == status
    assert (run["error"]["type"], run["error"]["message"]) == (ended.type, ended.message)


def test_a_cell_that_was_told_to_end_is_given_the_reason_and_keeps_the_rest(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    error = ErrorRecord("interrupted", "Interrupted", "SIGTERM", 1, 5, phase="forward")
    own = make_run_result(status="interrupted", error=error)
    own.write(tmp_path / "run.json")
    record_ended(tmp_path, FAILED, config)  # Slurm saw no more than an exit status
    assert read_run(tmp_path / "run.json") == own.to_dict()
    record_ended(tmp_path, CANCELLED, config)
    told = read_run(tmp_path / "run.json")["error"]
    assert (told["type"], told["message"], told["rank"]) == ("SlurmCancelled", "cancelled", 1)
    assert (told["step"], told["phase"]) == (5, "forward")


def test_a_cell_that_came_to_its_own_end_stays_as_it_is(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    own = make_run_result()
    own.write(tmp_path / "run.json")
    record_ended(tmp_path, CANCELLED, config)
    assert read_run(tmp_path / "run.json") == own.to_dict()
