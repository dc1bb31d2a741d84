"""Reports of many cells: the work grows with their number, and what is to be read does not."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from realruns import Runs

from benchmarks.cells import GRID, write_sweep
from dpexp.records import read_run
from dpexp.report.build import build
from dpexp.report.content import content_of
from dpexp.report.reading import read_sources


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of two ranks, whose result the cells are derived from."""
    run = Runs(tmp_path_factory)(
        "task=train", "parallel=ddp", "num_devices=2", "epochs=5", "measure.calibration_pairs=2"
    )
    return read_run(run.folder / "run.json")


def calls(folder: Path) -> int:
    """How often a function of dpexp is called while a report's content is made."""
    count = 0

    def counted(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call" and "dpexp" in frame.f_code.co_filename

    sys.setprofile(counted)
    try:
        content_of([folder])
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("repeats", [1, 2])
def test_twice_as_many_cells_are_twice_as_much_work(
    tmp_path: Path, real: dict[str, Any], repeats: int
) -> None:
    few, many = tmp_path / "few", tmp_path / "many"
    write_sweep(few, real, 100, repeats)
    write_sweep(many, real, 200, repeats)
    assert 1.8 < calls(many) / calls(few) < 2.05


def test_a_large_report_is_cut_where_people_read_and_whole_where_programs_do(
    tmp_path: Path, real: dict[str, Any]
) -> None:
    write_sweep(tmp_path, real, 1200)
    content = build(tmp_path).content
    assert len(content.cells) == 1200
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert len(report) < 100_000
    assert "- and 115 more settings in summary.csv" in report
    assert "and 1,100 more cells in summary.csv" in report
    assert "and 20 more rows in sweep.json" in report
    assert "python -m dpexp -m parallel=none,dp,ddp" in report
    assert len((tmp_path / "summary.csv").read_text().splitlines()) == 1201
    assert len(list((tmp_path / "scaling").iterdir())) == 100
    assert ("scaling", "TensorBoard has the 100 settings that scale best") in content.notes


def test_what_many_cells_share_is_held_once(tmp_path: Path, real: dict[str, Any]) -> None:
    write_sweep(tmp_path, real, 2 * len(GRID))
    runs = list(read_sources([tmp_path])[0].runs.values())
    assert len({id(run["environment"]) for run in runs}) == 1
    assert len({id(run["config"]["dataset"]) for run in runs}) == 1
    assert all("compute" not in run and "energy" not in run for run in runs)
