"""The folder of a sweep: who may write into it, and what an earlier start has left there."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from dpexp.errors import ConfigError
from dpexp.resuming import Planned
from dpexp.sweep_folder import as_first_typed, first_overrides, left_to_run, write_record
from dpexp.sweep_lock import LOCK, claim_earlier, claim_new

HOLD = """
import sys, time
from pathlib import Path
from dpexp.sweep_lock import claim_new
held = claim_new(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def sweep_folder(path: Path, begun_s: float = 0.0, task: tuple[str, ...] = ()) -> Path:
    """A folder with the record of a sweep that began at this time."""
    path.mkdir(parents=True)
    hydra = {"overrides": {"task": list(task), "hydra": ["hydra.mode=MULTIRUN"]}}
    write_record(path, OmegaConf.create({"hydra": hydra, "resume": "last", "seed": 0}))
    os.utime(path / "multirun.yaml", (begun_s, begun_s))
    return path


def cell(folder: Path, name: str, status: str | None, text: str | None = None) -> Path:
    """A cell's folder, with an event file; `text` in place of a result."""
    made = folder / name
    made.mkdir()
    (made / "events.out.tfevents.1.host").write_text("e")
    if text is None and status is not None:
        text = run_json(status)
    if text is not None:
        (made / "run.json").write_text(text)
    return made


def run_json(status: str, a: int = 1, schema: int = 1) -> str:
    run = {"schema": schema, "status": status, "label": "c", "parallel": "none"}
    return json.dumps({**run, "config": {"a": a}, "environment": {}})


def planned(count: int) -> list[Planned]:
    return [Planned(number, f"{number}_c", {"a": 1}) for number in range(count)]


# Whose it is


def test_of_two_sweeps_in_one_folder_the_second_is_refused(tmp_path: Path) -> None:
    held = claim_new(tmp_path / "s")
    with pytest.raises(ConfigError, match=r"hydra\.sweep\.dir='.*/s': another process works"):
        claim_new(tmp_path / "s")
    held.release()
    assert list((tmp_path / "s").iterdir()) == []
    claim_new(tmp_path / "s").release()


def test_a_disk_that_has_become_read_only_keeps_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: Any, **_more: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    held = claim_new(tmp_path / "s")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        held.release()
    claim_new(tmp_path / "s").release()


def test_a_killed_process_keeps_no_lock(tmp_path: Path) -> None:
    folder = sweep_folder(tmp_path / "s")
    (folder / "multirun.yaml").rename(tmp_path / "kept")
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    try:
        assert owner.stdout.readline() == "held\n"
        (tmp_path / "kept").rename(folder / "multirun.yaml")
        with pytest.raises(ConfigError, match="another process works"):
            claim_earlier(str(folder), tmp_path / "x", tmp_path / "default")
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    assert (folder / LOCK).exists()
    found, lock = claim_earlier(str(folder), tmp_path / "x", tmp_path / "default")
    assert found == folder
    lock.release()
    assert not (folder / LOCK).exists()


@pytest.mark.parametrize("name", ["multirun.yaml", "0_c/run.json", "0_c/steps.rank0.csv"])
def test_a_new_sweep_is_refused_where_one_has_begun(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("")
    with pytest.raises(ConfigError, match=f"already holds a sweep .*resume={tmp_path}"):
        claim_new(tmp_path)
    assert not (tmp_path / LOCK).exists()


# Which one is the last


def test_the_last_one_is_the_one_that_began_last(tmp_path: Path) -> None:
    default = tmp_path / "outputs/sweeps"
    sweep_folder(default / "2026-11-29/23-00-00-aa", begun_s=3)
    newest = sweep_folder(default / "2026-11-29/01-00-00-bb", begun_s=5)
    sweep_folder(default / "2026-11-30/00-00-00-cc", begun_s=4)
    (default / "2026-11-30/no-sweep").mkdir()
    found, lock = claim_earlier("last", default / "2026-11-30/now", default)
    lock.release()
    assert found == newest


def test_with_a_folder_of_ones_own_the_last_one_lies_beside_it(tmp_path: Path) -> None:
    sweep_folder(tmp_path / "outputs/sweeps/day/time", begun_s=9)
    beside = sweep_folder(tmp_path / "mine/one", begun_s=1)
    found, lock = claim_earlier("last", tmp_path / "mine/two", tmp_path / "outputs/sweeps")
    lock.release()
    assert found == beside


@pytest.mark.parametrize("asked", ["last", "nowhere", 3, True, ""])
def test_where_there_is_no_sweep_none_goes_on(workdir: Path, asked: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        claim_earlier(asked, Path("outputs/sweeps/a/b"), Path("outputs/sweeps"))
    assert (caught.value.key, caught.value.value) == ("resume", asked)
    assert list(workdir.iterdir()) == []


# The record


def test_the_record_has_the_overrides_without_resume(tmp_path: Path) -> None:
    folder = sweep_folder(tmp_path / "s", task=("a=1,2", "resume=last", "b=3"))
    assert first_overrides(folder) == (["a=1,2", "b=3"], ["hydra.mode=MULTIRUN"])
    assert OmegaConf.load(folder / "multirun.yaml").resume is None
    assert as_first_typed(folder, ["b=3", "a=1,2"], ["hydra.sweep.dir=x"]) == ["a=1,2", "b=3"]


@pytest.mark.parametrize(
    ("first", "now", "same"),
    [
        ('+x="a b",c', "+x='a b',c", True),
        ("x=[1, 'a']", 'x=[1,"a"]', True),
        ("x=choice(1,2)", "x=1,2", True),
        ("x=1", "x='1'", False),
        ("x=1,2", "x='1',2", False),
        ("x=1,2", "x=2,1", False),
        ("x=1,2", "x=shuffle(1,2)", False),
        ("x=shuffle([1,2,3,4,5,6,7,8])", "x=shuffle([1,2,3,4,5,6,7,8])", True),
        ("x=sort(2,1)", "x=sort(2, 1)", True),
        ("model=glob(m*)", "model=glob(*)", False),
        ("x=1", "++x=1", False),
    ],
)
def test_overrides_are_the_same_whatever_their_quotes_and_spaces(
    tmp_path: Path, first: str, now: str, same: bool
) -> None:
    folder = sweep_folder(tmp_path / "s", task=(first,))
    if same:
        assert as_first_typed(folder, [now]) == [now]
    else:
        with pytest.raises(ConfigError, match="started with other overrides"):
            as_first_typed(folder, [now])


@pytest.mark.parametrize("text", ["hydra: [", "hydra: {}", "a: 1", "- 1", "hydra: 3"])
def test_a_record_that_somebody_has_changed_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "multirun.yaml").write_text(f"{text}\n# the end\n")
    assert first_overrides(tmp_path) is None


@pytest.mark.parametrize("length", [None, 0, 30, -1])
def test_a_record_that_is_missing_or_cut_off_says_nothing(
    tmp_path: Path, length: int | None
) -> None:
    folder = sweep_folder(tmp_path / "s", task=("a=1",))
    record = folder / "multirun.yaml"
    text = record.read_text()
    record.unlink() if length is None else record.write_text(text[:length])
    assert as_first_typed(folder, ["b=2"]) == ["b=2"]


# What is left


def test_what_is_not_ok_runs_and_is_kept_where_nobody_counts_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cell(tmp_path, "0_c", "ok")
    cell(tmp_path, "1_c", "failed")
    cell(tmp_path, "2_c", None)
    cell(tmp_path, "3_c", None, text='{"schema": 1, "stat')
    cell(tmp_path, "4_c", None, text="")
    cell(tmp_path, "5_c", "skipped")
    for name in (".sweep.json.ab12", ".multirun.yaml.x", "2_c/.run.json.zz"):
        (tmp_path / name).write_text("cut")
    before = {path: path.stat().st_mtime_ns for path in [tmp_path / "0_c", *tmp_path.glob("0_c/*")]}
    assert left_to_run(tmp_path, planned(7), None) == [1, 2, 3, 4, 5, 6]
    assert "goes on: 1 of 7 cells stay as they are, 6 run" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0_c", "earlier"]
    kept = {path.relative_to(tmp_path / "earlier") for path in (tmp_path / "earlier").glob("*/*")}
    hidden = "events.out.earlier.1.host"
    assert {str(path) for path in kept} == {
        "1_c-1/run.json", "3_c-1/run.json", "4_c-1/run.json", "2_c-1/.run.json.zz",
        *(f"{number}_c-1/{hidden}" for number in (1, 2, 3, 4)),
    }  # fmt: skip
    assert not list(tmp_path.glob("earlier/**/*tfevents*"))


@pytest.mark.parametrize(("kind", "stays"), [("time_limit", True), ("nonfinite", False)])
def test_a_checkpoint_stays_with_a_cell_that_was_ended_from_outside(
    tmp_path: Path, kind: str, stays: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    run = {**json.loads(run_json("failed")), "error": {"kind": kind}}
    step = cell(tmp_path, "0_c", None, json.dumps(run)) / "checkpoints/step-4"
    step.mkdir(parents=True)
    (step / "data").write_bytes(b"12")
    state = {"format": 1, "step": 4, "taken_unix_s": 0, "config": {"a": 1}, "files": {"data": 2}}
    (step / "state.json").write_text(json.dumps(state))
    assert left_to_run(tmp_path, planned(1), None) == [0]
    assert step.exists() is stays
    assert ("1 run, 1 of them from a checkpoint" in capsys.readouterr().err) is stays


def test_what_is_kept_overwrites_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        cell(tmp_path, "0_c", "failed")
        assert left_to_run(tmp_path, planned(1), None) == [0]
    assert {path.name for path in (tmp_path / "earlier").iterdir()} == {"0_c-1", "0_c-2"}


def test_what_is_in_the_place_of_a_cell_is_put_aside_whatever_it_is(tmp_path: Path) -> None:
    (tmp_path / "0_c").write_text("a file")
    (tmp_path / "1_c").symlink_to("1_c")
    elsewhere = cell(tmp_path, "skipped_before", "skipped")
    (tmp_path / "2_c").symlink_to(elsewhere)
    cell(tmp_path, "3_c", "failed")
    cell(tmp_path, "3_copy", "ok")  # the user's own: no cell, since there is one
    assert left_to_run(tmp_path, planned(4), None) == [0, 1, 2, 3]
    assert {path.name for path in tmp_path.iterdir()} == {"3_copy", "earlier", "skipped_before"}
    kept = {path.name for path in (tmp_path / "earlier").iterdir()}
    assert kept == {"0_c-1", "1_c-1", "2_c-1", "3_c-1"}
    assert (elsewhere / "run.json").exists()


def test_a_refusal_moves_nothing(tmp_path: Path) -> None:
    cell(tmp_path, "0_c", "failed")
    cell(tmp_path, "1_c", "ok", text=run_json("ok", a=2))
    with pytest.raises(ConfigError, match="1_c is done, with another config: a: 2, now 1"):
        left_to_run(tmp_path, planned(2), None)
    (tmp_path / "1_c/run.json").write_text(run_json("ok", schema=99))
    with pytest.raises(ConfigError, match="has schema 99"):
        left_to_run(tmp_path, planned(2), None)
    assert not (tmp_path / "earlier").exists()


def test_it_waits_for_who_still_writes_into_a_cell(tmp_path: Path) -> None:
    made = cell(tmp_path, "0_c", None)
    code = "import sys, time; f = open(sys.argv[1], 'a'); print(flush=True); time.sleep(0.5)"
    orphan = subprocess.Popen(
        [sys.executable, "-c", code, str(made / "steps.rank0.csv")], stdout=subprocess.PIPE
    )
    assert orphan.stdout is not None
    orphan.stdout.readline()
    began = time.monotonic()
    left_to_run(tmp_path, planned(1), None)
    waited = time.monotonic() - began
    orphan.stdout.close()
    assert orphan.wait() == 0
    assert waited > 0.3
