"""Runs that are handed to sinks when they are over."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import TESTS
from realruns import Runs

import dpexp
from dpexp.errors import ConfigError
from dpexp.publishing import _outcomes
from dpexp.records import read_run

DIARY = ("+sinks.diary._target_=usersinks.Diary", "+sinks.diary.title=mine")
TWO = ("task=train", "parallel=ddp", "num_devices=2")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory)


def diary(run: dpexp.Run) -> dict[str, Any]:
    entry: dict[str, Any] = json.loads((run.folder / "diary.json").read_text(encoding="utf-8"))
    return entry


def test_a_sink_of_the_users_gets_the_steps_of_rank_0_and_the_result(run: Runs) -> None:
    made = run(*TWO, *DIARY)
    entry = diary(made)
    assert (entry["title"], entry["status"], entry["world"]) == ("mine", "ok", 2)
    assert (entry["error"], entry["sweep"]) == (None, None)
    assert entry["steps"] == [0, 1, 2, 3]
    assert entry["replica_rows"] == [[15, 15], [15, 15], [15, 15], [5, 5]]
    with (made.folder / "steps.rank0.csv").open(encoding="utf-8", newline="") as file:
        assert entry["losses"] == [float(row["loss"]) for row in csv.DictReader(file)]
    assert not [note for note in made.result.notes if note.startswith("sinks")]


def test_the_sink_runs_in_a_process_of_its_own_in_the_users_folder(run: Runs) -> None:
    made = run(*TWO, *DIARY)
    entry = diary(made)
    assert entry["pid"] not in {os.getpid(), *(rank["pid"] for rank in made.result.ranks)}
    assert entry["here"] == str(Path.cwd())


def test_the_time_at_which_the_steps_began_lies_before_they_were_written(run: Runs) -> None:
    made = run(*TWO, *DIARY)
    written_s = (made.folder / "steps.rank0.csv").stat().st_mtime
    with (made.folder / "steps.rank0.csv").open(encoding="utf-8", newline="") as file:
        total_s = sum(float(row["step_s"]) for row in csv.DictReader(file))
    assert diary(made)["begin_s"] == pytest.approx(written_s - total_s, abs=1e-3)


def test_a_run_whose_rank_was_killed_is_handed_over_as_failed(run: Runs) -> None:
    made = run.ended(*TWO, *DIARY, "inject.die_rank=1", "inject.at_step=2")
    assert made.result.status == "failed"
    entry = diary(made)
    assert entry["status"] == "failed"
    assert entry["error"]["type"] == "SIGKILL"
    assert entry["steps"][:1] == [0]


def test_a_sink_that_fails_is_a_note_and_no_failure_of_the_run(
    run: Runs, capfd: pytest.CaptureFixture[str]
) -> None:
    sinks = (
        "+sinks.far._target_=usersinks.Unreachable",
        "+sinks.unfit._target_=usersinks.Diary",  # without its title
        *DIARY,
        "+sinks.gone._target_=usersinks.Gone",
    )
    made = run(*sinks)
    assert diary(made)["steps"] == [0, 1, 2, 3]
    far, unfit, gone = [note for note in made.result.notes if note.startswith("sinks.")]
    again = "python -m dpexp.publish <folder>"
    assert far.startswith("sinks.far: not written: ConnectionError: no answer from example.invalid")
    assert gone.startswith("sinks.gone: not written: its process ended with exit status 7")
    assert "sinks.unfit='usersinks.Diary': does not take these arguments" in unfit
    assert "'title'" in unfit
    assert far.count(again) == gone.count(again) == 1
    assert read_run(made.folder / "run.json")["notes"] == made.result.notes
    told = capfd.readouterr()
    assert f"note: {far}" in told.err
    assert "a sink may print" not in told.out
    assert "raise ConnectionError" in (made.folder / "dpexp.log").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["+sinks.x._target_=usersinks.NoSink"], "is not a sink"),
        (["+sinks.x._target_=usersinks.Missing"], "module 'usersinks' has no 'Missing'"),
    ],
)
def test_what_is_no_sink_is_refused_before_the_first_step(
    overrides: list[str], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=problem):
        dpexp.run([*overrides, "parallel=ddp", "num_devices=2"], folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def publish(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dpexp.publish", str(folder)],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_run_can_be_handed_over_again_and_knows_its_sweep(run: Runs, tmp_path: Path) -> None:
    made = run(*TWO, *DIARY)
    cell = tmp_path / "sweep/0_ddp_n2"
    shutil.copytree(made.folder, cell)
    (tmp_path / "sweep/multirun.yaml").touch()
    with (cell / "steps.rank0.csv").open("a", encoding="utf-8") as file:
        file.write("4,0,0,30")  # half a row, as a killed process leaves it
    ended = publish(cell)
    assert (ended.returncode, json.loads(ended.stdout)) == (0, {"sink": "diary", "failure": None})
    entry = json.loads((cell / "diary.json").read_text(encoding="utf-8"))
    assert entry["steps"] == [0, 1, 2, 3]
    assert entry["sweep"] == str(tmp_path / "sweep")


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    ended = publish(tmp_path)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith(f"dpexp: FOLDER='{tmp_path}'")
    assert len(ended.stderr.splitlines()) == 1


def test_a_run_that_is_interrupted_is_handed_over_as_such(tmp_path: Path) -> None:
    slow = ("model=custom", "model._target_=usercode.Slow", "+model.seconds=0.2", "epochs=1000")
    began = subprocess.Popen(
        [sys.executable, "-m", "dpexp", *slow, *DIARY, "hydra.run.dir=run"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
    )
    table = tmp_path / "run/steps.rank0.csv"
    deadline = time.monotonic() + 60
    while not (table.exists() and table.read_text().count("\n") > 1):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    began.send_signal(signal.SIGINT)
    assert began.wait(60) == 130
    entry = json.loads((tmp_path / "run/diary.json").read_text(encoding="utf-8"))
    assert (entry["status"], entry["error"]["kind"]) == ("interrupted", "interrupted")
    assert entry["steps"][0] == 0


def test_what_a_sink_writes_among_the_outcomes_is_no_outcome() -> None:
    lines = ('{"sink": "a", "failure": null}', "junk", "[1]", "{}", '{"sink": "b", "failure": "x"}')
    assert _outcomes("\n".join(lines)) == {"a": None, "b": "x"}
