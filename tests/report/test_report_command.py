"""``python -m dpexp.report``: a report again, from the results alone."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_content import at, lost, written

from dpexp.report import build as building
from dpexp.report.__main__ import main
from dpexp.report.build import build

FILES = ("sweep.json", "summary.csv", "report.md")


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    folder = written(tmp_path / "sweep", at("none", 1, 100.0), at("ddp", 2, 150.0), lost())
    (folder / "multirun.yaml").write_text("hydra: {overrides: {task: ['parallel=none,ddp']}}")
    return folder


def texts(folder: Path) -> list[str]:
    return [(folder / name).read_text(encoding="utf-8") for name in FILES]


def test_it_writes_the_same_files_again_without_torch(sweep: Path) -> None:
    build(sweep, ["parallel=none,ddp"])
    before = texts(sweep)
    for name in FILES:
        (sweep / name).unlink()
    code = (
        "import sys; from dpexp.report.__main__ import main; status = main(sys.argv[1:]);"
        "print('torch' in sys.modules); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(sweep)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("ddp on 2 (forward only): 1.50× (one run each: no interval), 75 %")
    assert "2_ddp_n2: failed (oom, rank 1, step 7): no room" in lines
    assert f"report: {sweep / 'report.html'}" in lines
    assert lines[-1] == "False"
    assert texts(sweep) == before
    assert len(list((sweep / "scaling").glob("events*"))) == 1


def test_sweep_json_has_answers_warnings_and_failures_too(sweep: Path) -> None:
    assert main([str(sweep)]) == 0
    data: dict[str, Any] = json.loads((sweep / "sweep.json").read_text(encoding="utf-8"))
    assert list(data) == ["schema", "command", "status", "environment", "cells", "answers",
                          "warnings", "failures", "resume"]  # fmt: skip
    assert data["command"] == "python -m dpexp -m 'parallel=none,ddp'" or data["command"] == (
        "python -m dpexp -m parallel=none,ddp"
    )
    assert data["answers"][1] == "1 of 3 cells failed: oom 1"
    assert data["failures"][0]["kind"] == "oom"
    header = (sweep / "summary.csv").read_text(encoding="utf-8").splitlines()[0].split(",")
    assert header[:6] == ["folder", "label", "parallel", "num_devices", "setting", "status"]
    assert header[header.index("straggler") + 1] == "lost_to_data_s"


def test_several_sweeps_and_runs_make_a_report_of_their_own(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    at("none", 1, 100.0).write(run / "run.json")
    out = tmp_path / "deep" / "out"
    gone = tmp_path / "gone"
    assert main([str(sweep), str(run), str(sweep), str(gone), "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert said.err == f"python -m dpexp.report: {gone}: there is no such folder\n"
    assert f"report: {out / 'report.html'}" in said.out
    cells = json.loads((out / "sweep.json").read_text(encoding="utf-8"))["cells"]
    assert [cell["folder"] for cell in cells] == [
        "sweep/0_none_n1", "sweep/1_ddp_n2", "sweep/2_ddp_n2", "run",
    ]  # fmt: skip
    assert not (sweep / "report.md").exists()


def test_a_single_run_has_a_report_and_no_second_event_file(tmp_path: Path) -> None:
    at("none", 1, 100.0).write(tmp_path / "run.json")
    assert main([str(tmp_path)]) == 0
    assert "none on 1" in (tmp_path / "report.md").read_text(encoding="utf-8")
    assert not list(tmp_path.glob("**/events*"))


def test_several_folders_need_a_place_for_their_report(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(sweep), str(tmp_path)])
    assert ended.value.code == 2
    assert "--out DIR" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["sweep", "sweep/0_none_n1", "sweep/new"])
def test_a_report_of_several_is_not_written_into_one_of_them(
    tmp_path: Path, sweep: Path, out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = written(tmp_path / "other", at("none", 1, 100.0))
    before = sorted(sweep.rglob("*"))
    with pytest.raises(SystemExit, match="2"):
        main([str(sweep), str(other), "--out", str(tmp_path / out)])
    assert f"is in {sweep}, whose results are not touched" in capsys.readouterr().err
    assert sorted(sweep.rglob("*")) == before


def test_where_there_is_nothing_to_report_it_says_why_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, broken = tmp_path / "empty", tmp_path / "broken"
    empty.mkdir()
    (broken / "0_none_n1").mkdir(parents=True)
    (broken / "0_none_n1/run.json").write_text("{")
    (tmp_path / "file").touch()
    for folder, why in {
        empty: "nothing to report: no run's result can be read here",
        broken: "is not whole, or no JSON",
        tmp_path / "file": "no folder",
        tmp_path / "gone": "there is no such folder",
    }.items():
        assert main([str(folder)]) == 1
        line = capsys.readouterr().err
        assert line.startswith(f"python -m dpexp.report: {folder}: ")
        assert why in line and line.count("\n") == 1
    assert [path.name for path in broken.iterdir()] == ["0_none_n1"]
    assert list(empty.iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main([str(sweep), "--out", str(tmp_path / "file" / "out")]) == 1
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_a_part_that_fails_keeps_no_other_from_being_written(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(content: object) -> str:
        raise ZeroDivisionError("a [figure]\nmore")

    monkeypatch.setattr(building, "markdown", broken)
    assert main([str(sweep)]) == 0
    told = "dpexp: report.md cannot be written: ZeroDivisionError: a [figure]\n"
    assert capsys.readouterr().err == told
    assert not (sweep / "report.md").exists()
    assert (sweep / "sweep.json").exists() and (sweep / "scaling").exists()


def test_a_report_that_cannot_be_written_at_all_is_shown_and_says_so(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(building, "write_whole", full)
    monkeypatch.setattr(building, "write_boards", lambda folder, cells: full(folder, ""))
    assert main([str(sweep)]) == 1
    said = capsys.readouterr()
    assert said.out.startswith("ddp on 2")
    assert "report:" not in said.out
    assert said.err == (
        f"dpexp: the report cannot be written to {sweep}: no space left on device\n"
    )


def test_a_result_that_could_not_be_written_is_in_the_report_all_the_same(sweep: Path) -> None:
    result = at("ddp", 4, 300.0).to_dict()
    content = build(sweep, None, {"3_ddp_n4": result}).content
    assert [(cell.folder, cell.speedup) for cell in content.cells][-1] == ("3_ddp_n4", 3.0)
