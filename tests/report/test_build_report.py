"""A sweep's files, made from the results in its cells' folders."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import make_run_result
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dpexp.records import ErrorRecord, RunResult
from dpexp.report.build import build
from dpexp.report.numbers import ranged
from dpexp.report.reading import read_sources

OVERRIDES = ["parallel=none,ddp", "num_devices=1,2", "model.widths=[8, 2]"]


def at_rate(strategy: str, num_devices: int, rate: float) -> RunResult:
    throughput = {"samples_per_s": rate, "samples_per_s_per_device": rate / num_devices}
    return make_run_result(strategy, num_devices, throughput=throughput)


def ended(strategy: str, status: str) -> RunResult:
    error = ErrorRecord("config", "SkippedCellError", "num_devices=2: one device only.")
    return RunResult(status, f"{strategy}-n2", {}, {}, strategy, error=error, num_devices=2)


def sweep_of(folder: Path, *results: RunResult) -> Path:
    for number, result in enumerate(results):
        cell = folder / f"{number}_{result.parallel}_n{result.num_devices}"
        cell.mkdir()
        result.write(cell / "run.json")
    return folder


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """A sweep of which one cell was skipped."""
    return sweep_of(
        tmp_path,
        at_rate("none", 1, 100.0),
        ended("none", "skipped"),
        at_rate("ddp", 1, 80.0),
        at_rate("ddp", 2, 160.0),
    )


def scaling_run(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = EventAccumulator(str(folder / "scaling"))
    accumulator.Reload()
    found = accumulator.Tags()
    read = {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in found["scalars"]}
    for tag in set(found["tensors"]) - {"custom_scalars__config__"}:
        events = accumulator.Tensors(tag)
        read[tag] = [(event.step, event.tensor_proto.float_val[0]) for event in events]
    return read


def test_cells_are_read_in_the_order_of_the_sweep_also_beyond_nine(tmp_path: Path) -> None:
    sweep_of(tmp_path, *[at_rate("dp", 1, 1.0)] * 12)
    assert list(read_sources([tmp_path])[0].runs) == [f"{number}_dp_n1" for number in range(12)]


def test_sweep_json_has_schema_command_status_environment_and_cells(sweep: Path) -> None:
    cells = build(sweep, OVERRIDES).content.cells
    data: dict[str, Any] = json.loads((sweep / "sweep.json").read_text(encoding="utf-8"))
    assert (data["schema"], data["status"]) == (1, "ok")
    assert data["environment"] == {"cores": 4}
    assert data["command"] == (
        "python -m dpexp -m parallel=none,ddp num_devices=1,2 'model.widths=[8, 2]'"
    )
    assert [cell["folder"] for cell in data["cells"]] == [cell.folder for cell in cells]
    assert data["cells"][3]["speedup"] == pytest.approx(1.6)
    assert data["cells"][3]["efficiency"] == pytest.approx(0.8)
    assert data["cells"][1]["status"] == "skipped"


def test_summary_csv_has_a_row_per_cell_with_the_notes_in_one(sweep: Path) -> None:
    build(sweep, OVERRIDES)
    with (sweep / "summary.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["label"] for row in rows] == ["none-n1", "none-n2", "ddp-n1", "ddp-n2"]
    assert [row["samples_per_s"] for row in rows] == ["100.0", "", "80.0", "160.0"]
    assert [row["status"] for row in rows] == ["ok", "skipped", "ok", "ok"]


def test_the_report_names_every_cell_and_why_one_has_no_figure(sweep: Path) -> None:
    build(sweep, OVERRIDES)
    report = (sweep / "report.md").read_text(encoding="utf-8")
    assert report.startswith(f"# Sweep {sweep.name}\n")
    row = "| 1_none_n2 | skipped (config) | – | – | – | num_devices=2: one device only. |"
    assert row in report.splitlines()
    assert "speed-up against 0_none_n1" in report


def test_the_scaling_run_has_the_number_of_devices_as_its_axis(sweep: Path) -> None:
    build(sweep, OVERRIDES)
    assert scaling_run(sweep) == {
        "scaling/none/samples_per_s": [(1, 100.0)],
        "scaling/none/speedup": [(1, 1.0)],
        "scaling/none/efficiency": [(1, 1.0)],
        "scaling/ddp/samples_per_s": [(1, 80.0), (2, 160.0)],
        "scaling/ddp/speedup": [(1, pytest.approx(0.8)), (2, pytest.approx(1.6))],
        "scaling/ddp/efficiency": [(1, pytest.approx(0.8)), (2, pytest.approx(0.8))],
    }


def test_building_the_report_again_gives_the_same_and_one_event_file(sweep: Path) -> None:
    build(sweep, OVERRIDES)
    before = [(sweep / name).read_text() for name in ("sweep.json", "summary.csv", "report.md")]
    curves = scaling_run(sweep)
    build(sweep, OVERRIDES)
    after = [(sweep / name).read_text() for name in ("sweep.json", "summary.csv", "report.md")]
    assert after == before
    assert len(list((sweep / "scaling").glob("events.out.tfevents.*"))) == 1
    assert scaling_run(sweep) == curves


@pytest.mark.parametrize(
    ("statuses", "status"),
    [
        (["skipped"], "ok"),
        (["failed"], "failed"),
        (["failed", "skipped"], "failed"),
        (["failed", "interrupted"], "interrupted"),
    ],
)
def test_the_status_of_a_sweep(tmp_path: Path, statuses: list[str], status: str) -> None:
    results = [ended("none", each) for each in statuses]
    build(sweep_of(tmp_path, at_rate("none", 1, 1.0), *results), [])
    assert json.loads((tmp_path / "sweep.json").read_text())["status"] == status


def test_the_environment_is_that_of_a_cell_that_ran(tmp_path: Path) -> None:
    sweep_of(tmp_path, ended("none", "failed"), at_rate("ddp", 2, 1.0))
    build(tmp_path, [])
    assert json.loads((tmp_path / "sweep.json").read_text())["environment"] == {"cores": 4}


def test_a_sweep_in_which_nothing_ran_has_its_files_and_no_scaling_run(tmp_path: Path) -> None:
    sweep_of(tmp_path, ended("ddp", "failed"))
    build(tmp_path, [])
    assert (tmp_path / "report.md").exists()
    assert not (tmp_path / "scaling").exists()


def repeat_of(strategy: str, num_devices: int, repeat: int, rate: float) -> RunResult:
    made = at_rate(strategy, num_devices, rate)
    throughput = {**(made.throughput or {}), "samples_measured": rate, "wall_s": 1.0}
    return replace(made, throughput=throughput, config={**made.config, "repeat": repeat})


def test_repeats_are_one_row_in_every_file_with_their_intervals(tmp_path: Path) -> None:
    rates = ((0, 98.0, 200.0), (1, 100.0, 190.0), (2, 102.0, 210.0))
    runs = [
        repeat_of(strategy, count, repeat, rate)
        for repeat, one, two in rates
        for strategy, count, rate in (("ddp", 2, two), ("none", 1, one))
    ]
    (base, cell) = build(sweep_of(tmp_path, *runs), OVERRIDES).content.cells
    data = json.loads((tmp_path / "sweep.json").read_text(encoding="utf-8"))
    assert data["cells"][1]["folders"] == ["0_ddp_n2", "2_ddp_n2", "4_ddp_n2"]
    assert data["cells"][1]["speedup_low"] == cell.speedup_low
    with (tmp_path / "summary.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["repeats"] for row in rows] == ["3", "3"]
    assert rows[1]["folders"] == "0_ddp_n2 2_ddp_n2 4_ddp_n2"
    assert float(rows[1]["speedup_high"]) == cell.speedup_high
    assert (rows[0]["verdict"], rows[1]["verdict"]) == ("", "faster")
    assert float(rows[0]["noise_floor"]) == base.noise_floor
    curves = scaling_run(tmp_path)
    for name in ("speedup_low", "speedup_high"):
        assert curves[f"scaling/ddp/{name}"] == [(2, pytest.approx(getattr(cell, name)))]
        assert f"scaling/none/{name}" not in curves
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert cell.speedup_low is not None and cell.speedup_high is not None
    assert ranged(2.0, cell.speedup_low, cell.speedup_high, "×") in report
    assert "noise floor: two runs of 1_none_n1 differ by up to" in report
