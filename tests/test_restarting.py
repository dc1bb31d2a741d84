"""Whether a run is started again after a rank was lost, and what that cost."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from builders import make_config, make_plan_for, make_run_result

from dpexp.checkpoint import forget_later, newest, prune
from dpexp.records import ErrorRecord, RunResult
from dpexp.restarting import Attempts
from dpexp.worker import RankJob


def attempts(folder: Path, most: int, began: list[float]) -> Attempts:
    parallel = replace(make_config().parallel, max_restarts=most)
    plan = make_plan_for(parallel={"max_restarts": most})
    assert plan.config.parallel == parallel
    return Attempts(RankJob(plan, {}, folder), lambda: began[0])


def failed(kind: str = "crash", status: str = "failed") -> RunResult:
    error = ErrorRecord(kind, "SIGKILL", f"rank 1: {kind}", rank=1, step=7)
    return make_run_result(status=status, error=error)


def save(run: Path, step: int, taken_s: float) -> Path:
    folder = run / f"checkpoints/step-{step}"
    folder.mkdir(parents=True)
    (folder / "data").write_bytes(b"12")
    state = {"format": 1, "step": step, "taken_unix_s": taken_s, "config": {}, "files": {"data": 2}}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


@pytest.mark.parametrize("kind", ["crash", "hang"])
def test_a_lost_rank_is_worth_as_many_attempts_as_are_allowed(tmp_path: Path, kind: str) -> None:
    tried = attempts(tmp_path, 2, [0.0])
    assert [tried.again(failed(kind)) for _ in range(3)] == [True, True, False]
    told = tried.told(make_run_result())
    assert told.restarts is not None and told.restarts["count"] == 2
    assert {cause["gone_on_from"] for cause in told.restarts["causes"]} == {0}


@pytest.mark.parametrize("kind", ["oom", "user_error"])
def test_what_would_come_again_is_only_after_a_new_checkpoint(tmp_path: Path, kind: str) -> None:
    tried = attempts(tmp_path, 5, [0.0])
    assert not tried.again(failed(kind))
    save(tmp_path, 4, time.time() + 1)
    assert tried.again(failed(kind))
    assert not attempts(tmp_path, 5, [0.0]).again(replace(failed(kind), status="ok"))


@pytest.mark.parametrize("kind", ["config", "nonfinite", "interrupted"])
def test_the_rest_never_is(tmp_path: Path, kind: str) -> None:
    save(tmp_path, 4, time.time() + 1)
    status = "interrupted" if kind == "interrupted" else "failed"
    tried = attempts(tmp_path, 5, [0.0])
    assert not tried.again(failed(kind, status))
    assert tried.told(failed(kind, status)).restarts is None


def test_lost_are_the_steps_since_the_checkpoint_and_the_time_to_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("dpexp.restarting.time.time", lambda: now[0])
    began = [1010.0]
    tried = attempts(tmp_path, 3, began)
    save(tmp_path, 20, 1030.0)
    (tmp_path / "steps.rank0.csv").write_text("")
    now[0] = 1034.0
    assert tried.again(failed())  # 4 s of steps since the checkpoint
    assert (tmp_path / "earlier/attempt-1/steps.rank0.csv").exists()
    began[0] = 1036.0  # 2 s until its first step
    now[0] = 1037.0
    assert tried.again(failed())  # a second of steps, without a new checkpoint
    began[0] = 0.0
    now[0] = 1040.0
    assert tried.again(failed())  # ended after 3 s without a step
    began[0] = 1045.0  # 5 s until its first step
    assert not tried.again(make_run_result())
    restarts = tried.told(make_run_result()).restarts
    assert restarts is not None
    assert restarts["lost_s"] == pytest.approx(4 + 2 + 1 + 3 + 5)
    assert [cause["gone_on_from"] for cause in restarts["causes"]] == [20, 20, 20]


def test_a_checkpoint_with_a_file_too_few_or_too_short_is_none(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20):
        save(tmp_path, step, 0.0)
    (tmp_path / "checkpoints/.step-25.part").mkdir()
    (tmp_path / "checkpoints/step-20/data").write_bytes(b"1")
    (tmp_path / "checkpoints/step-15/data").unlink()
    (tmp_path / "checkpoints/step-10/state.json").write_text("{")
    found = newest(tmp_path)
    assert found is not None and found.step == 5
    assert newest(tmp_path / "nowhere") is None


def test_torn_checkpoints_are_removed_and_not_what_others_call_so(tmp_path: Path) -> None:
    for step in (5, 10):
        save(tmp_path, step, 0.0)
    other = tmp_path / "checkpoints/step-20"
    other.mkdir()
    (other / "model.bin").write_bytes(b"of another program")
    forget_later(tmp_path, 5)
    prune(tmp_path, 1)
    assert {path.name for path in other.parent.iterdir()} == {"step-5", "step-20"}


def test_what_is_told_of_a_lost_rank_does_not_drive_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = ErrorRecord("crash", "Error", "user said \x1b[2J.", rank=1)
    assert attempts(tmp_path, 1, [0.0]).again(make_run_result(status="failed", error=error))
    assert "user said \\u001b[2J; all ranks start again" in capsys.readouterr().err


def test_where_nothing_can_be_put_aside_the_run_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shapes.csv").write_text("")
    (tmp_path / "earlier").write_text("in the way")
    assert not attempts(tmp_path, 1, [0.0]).again(failed())
    assert "not started again" in capsys.readouterr().err
