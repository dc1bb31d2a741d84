"""Sweeps that were stopped, and go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import dpexp
from dpexp import server

Cli = Callable[..., "subprocess.CompletedProcess[str]"]
# A cell takes a second, so that there is time to kill it.
TYPED = ("parallel=none", "num_devices=1", "seed=0,1,2,3", "epochs=null", "steps=20",
         "inject.data_delay_s=0.05")  # fmt: skip
SOON_S = 60.0


def files(folder: Path) -> dict[str, int]:
    """All that lies in a folder, with the time of its last change."""
    inside = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in [folder, *inside]}


def result(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "run.json").read_text(encoding="utf-8")))


def kill_in_cell(work: Path, number: int) -> Path:
    """Start the sweep, kill the parent and the fork server within a cell. Returns its folder."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dpexp", "-m", *TYPED],
        cwd=work, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    pattern = f"outputs/sweeps/*/*/{number}_none_n1/steps.rank0.csv"
    deadline = time.monotonic() + SOON_S
    while not list(work.glob(pattern)) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.02)
    family = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    (steps,) = work.glob(pattern)
    assert psutil.wait_procs(family, timeout=SOON_S)[1] == []
    return steps.parent.parent


def test_a_sweep_that_was_killed_goes_on(tmp_path: Path, cli: Cli) -> None:
    folder = kill_in_cell(tmp_path, 2)
    assert not (folder / "2_none_n1/run.json").exists()
    # As if killed while files were written.
    (folder / "2_none_n1/.run.json.a1b2").write_text('{"schema"')
    (folder / "2_none_n1/run.json").write_text("")
    (folder / ".sweep.json.c3d4").write_text("{")
    done = {name: files(folder / name) for name in ("0_none_n1", "1_none_n1")}

    refused = cli("-m", *TYPED[:-2], "steps=21", TYPED[-1], "resume=last")
    assert refused.returncode == 1
    assert "other overrides: - steps=20, + steps=21. Try:" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (folder / "earlier").exists()

    ended = cli("-m", *reversed(TYPED), "resume=last")
    assert ended.returncode == 0, ended.stderr
    shown = folder.relative_to(tmp_path)
    assert f"note: {shown} goes on: 2 of 4 cells stay as they are, 2 run" in ended.stderr
    assert {name: files(folder / name) for name in done} == done
    assert [line.split(":")[0] for line in ended.stderr.splitlines() if ": ok" in line] == [
        "2_none_n1", "3_none_n1",
    ]  # fmt: skip
    assert {path.name for path in folder.iterdir()} == {
        "0_none_n1", "1_none_n1", "2_none_n1", "3_none_n1", "earlier", "multirun.yaml",
        "sweep.json", "summary.csv", "report.md", "report.html", "scaling",
    }  # fmt: skip
    for number in range(4):
        cell = folder / f"{number}_none_n1"
        record = result(cell)
        assert (record["status"], record["config"]["seed"]) == ("ok", number)
        assert not {"resume", "rerun"} & set(record["config"])
        assert len(list(cell.glob("events.out.tfevents.*"))) == 1
    sweep = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
    assert [cell["folder"] for cell in sweep["cells"]] == [f"{n}_none_n1" for n in range(4)]
    assert "resume" not in sweep["command"]
    assert (folder / "earlier/2_none_n1-1/steps.rank0.csv").exists()
    assert list(tmp_path.glob("outputs/sweeps/*/*")) == [folder]


GRID = ["parallel=none,dp", "num_devices=1", "repeats=2", "epochs=null", "steps=2"]


def test_from_python_with_repeats_too(workdir: Path) -> None:
    server.start(several_ranks=True)
    first = dpexp.sweep(GRID)
    names = [run.folder.name for run in first.runs]
    failed = first.folder / names[1] / "run.json"
    record = json.loads(failed.read_text())
    failed.write_text(json.dumps({**record, "status": "failed"}))
    (first.folder / names[3] / "run.json").write_text(json.dumps(record)[:100])
    kept = {name: files(first.folder / name) for name in (names[0], names[2])}

    again = dpexp.sweep([*GRID, "resume=last"])
    assert again.folder == first.folder
    assert [run.folder.name for run in again.runs] == names
    assert [run.result.status for run in again.runs] == ["ok"] * 4
    assert {name: files(first.folder / name) for name in kept} == kept
    assert again.runs[0].result == first.runs[0].result
    assert [cell.repeats for cell in again.cells] == [2, 2]
    assert sorted(path.name for path in (first.folder / "earlier").iterdir()) == sorted(
        [f"{names[1]}-1", f"{names[3]}-1"]
    )
    with pytest.raises(dpexp.ConfigError, match=r"- repeats=2, \+ repeats=3"):
        dpexp.sweep([*GRID[:2], "repeats=3", *GRID[3:], f"resume={first.folder}"])
    with pytest.raises(dpexp.ConfigError, match=r"already holds a sweep.*resume="):
        dpexp.sweep(GRID, folder=first.folder)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("task=train", "resume=last"), "does not say which run is to be gone on with"),
        (("-m", "rerun=all"), "none is given. Try: resume=last"),
        (("-m", "resume=last"), "there is no sweep below outputs/sweeps"),
        (("-m", "resume=nowhere"), "there is no sweep in this folder"),
        (("-m", "resume=a,b"), "resume='a,b': is for the whole sweep"),
    ],
)  # fmt: skip
def test_what_cannot_go_on_is_refused_and_leaves_nothing(
    tmp_path: Path, cli: Cli, arguments: tuple[str, ...], said: str
) -> None:
    ended = cli(*arguments)
    assert ended.returncode == 1
    assert said in ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert list(tmp_path.iterdir()) == []
