"""Sweeps: their folder, their figures, and cells that fail without stopping the others."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

import dpexp
from dpexp import env, server
from dpexp.repeats import interleaved
from dpexp.report.numbers import ranged, times

Cli = Callable[..., "subprocess.CompletedProcess[str]"]

TESTS = Path(__file__).parent
GRID = ("parallel=none,dp,ddp", "num_devices=1,2", "dataset.rows=300")
CELLS = ("0_none_n1", "1_none_n2", "2_dp_n1", "3_dp_n2", "4_ddp_n1", "5_ddp_n2")


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The grid, typed on the command line: how it ended, and its folder."""
    work = tmp_path_factory.mktemp("typed")
    ended = subprocess.run(
        [sys.executable, "-m", "dpexp", "-m", *GRID],
        cwd=work,
        env={**os.environ, "PYTHONPATH": str(TESTS), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    (folder,) = work.glob("outputs/sweeps/*/*")
    return ended, folder


@pytest.fixture(scope="module")
def called(tmp_path_factory: pytest.TempPathFactory) -> dpexp.Sweep:
    """The same grid through the API."""
    server.start(several_ranks=True)
    return dpexp.sweep(list(GRID), folder=tmp_path_factory.mktemp("called") / "sweep")


@pytest.fixture(params=["typed", "called"])
def folder(request: pytest.FixtureRequest) -> Path:
    """The folder of the grid, whoever started it."""
    if request.param == "typed":
        _, typed_folder = request.getfixturevalue("typed")
        return Path(typed_folder)
    return Path(request.getfixturevalue("called").folder)


def refuse_constant(name: str) -> NoReturn:
    raise AssertionError(f"{name} is not JSON")


def read(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    parsed: dict[str, Any] = json.loads(text, parse_constant=refuse_constant)
    return parsed


def rates(folder: Path) -> dict[str, float]:
    """samples/s of the cells that ran, from their run.json."""
    records = {path.parent.name: read(path) for path in folder.glob("*/run.json")}
    return {
        name: record["throughput"]["samples_per_s"]
        for name, record in records.items()
        if record["status"] == "ok"
    }


def statuses(sweep: dpexp.Sweep) -> list[str]:
    return [run.result.status for run in sweep.runs]


# The grid


def test_a_sweep_with_skipped_cells_ends_with_0(typed: tuple[Any, Path]) -> None:
    ended, _ = typed
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_sweeps_folder_has_the_files_of_the_contract(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    reports = {"report.md", "report.html", "scaling"}
    assert names == {"multirun.yaml", "sweep.json", "summary.csv"} | reports | set(CELLS)


def test_each_cell_that_ran_has_the_files_of_a_run(folder: Path) -> None:
    for name in CELLS:
        files = {path.name for path in (folder / name).iterdir()}
        if name == "1_none_n2":
            assert {file for file in files if ".tfevents." not in file} == {".hydra", "run.json"}
        else:
            assert {".hydra", "run.json", "shapes.csv", "dpexp.log", "steps.rank0.csv"} < files
        assert len(list((folder / name).glob("events.out.tfevents.*"))) == 1


def test_none_on_two_devices_is_skipped_with_its_reason(folder: Path) -> None:
    record = read(folder / "1_none_n2/run.json")
    assert record["status"] == "skipped"
    assert record["label"] == "none-n2"
    assert record["error"]["kind"] == "config"
    assert "num_devices=2" in record["error"]["message"]
    assert record["throughput"] is None
    assert "| 1_none_n2 | skipped (config) |" in (folder / "report.md").read_text(encoding="utf-8")


def test_speed_up_and_efficiency_are_those_of_the_runs(folder: Path) -> None:
    rate = rates(folder)
    assert set(rate) == set(CELLS) - {"1_none_n2"}
    for cell in read(folder / "sweep.json")["cells"]:
        if cell["status"] == "skipped":
            assert cell["speedup"] is None and cell["efficiency"] is None
            continue
        devices = int(cell["folder"][-1])
        speedup = rate[cell["folder"]] / rate["0_none_n1"]
        assert cell["baseline"] == "0_none_n1"
        assert cell["samples_per_s"] == pytest.approx(rate[cell["folder"]])
        assert cell["speedup"] == pytest.approx(speedup)
        assert cell["efficiency"] == pytest.approx(speedup / devices)


def test_sweep_json_lists_the_cells_in_order_with_their_batches(folder: Path) -> None:
    got = read(folder / "sweep.json")
    assert got["schema"] == 1
    assert got["status"] == "ok"
    assert [cell["folder"] for cell in got["cells"]] == list(CELLS)
    states = [cell["status"] for cell in got["cells"]]
    assert states == ["ok", "skipped", "ok", "ok", "ok", "ok"]
    ran = [cell for cell in got["cells"] if cell["status"] == "ok"]
    assert [cell["batch_global"] for cell in ran] == [30] * 5
    assert [cell["batch_per_device"] for cell in ran] == [30, 30, 15, 30, 15]
    assert [cell["emulated"] for cell in ran] == [False, True, True, False, False]
    assert "parallel=none,dp,ddp" in got["command"]


def test_summary_csv_says_the_same_as_sweep_json(folder: Path) -> None:
    with (folder / "summary.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    cells = read(folder / "sweep.json")["cells"]
    assert [row["folder"] for row in rows] == [cell["folder"] for cell in cells]
    for row, cell in zip(rows, cells, strict=True):
        for key in ("samples_per_s", "speedup", "efficiency"):
            assert (float(row[key]) if row[key] else None) == cell[key]


def test_the_report_has_a_table_that_names_mode_and_baseline(folder: Path) -> None:
    lines = (folder / "report.md").read_text(encoding="utf-8").splitlines()
    table = [line for line in lines[: lines.index("## Where the time went")] if line[:1] == "|"]
    assert len(table) == 2 + 6
    assert {line.count("|") for line in table} == {table[0].count("|")}
    text = "\n".join(lines)
    assert "strong scaling" in text
    assert "against 0_none_n1" in text
    assert "emulated" in table[5]
    assert "python -m dpexp -m parallel=none,dp,ddp num_devices=1,2" in text


def test_the_scaling_run_has_the_number_of_devices_as_its_axis(folder: Path) -> None:
    assert len(list((folder / "scaling").iterdir())) == 1
    board = EventAccumulator(str(folder / "scaling"))
    board.Reload()
    rate = rates(folder)
    axes = {"none": {1: "0_none_n1"}, "dp": {1: "2_dp_n1", 2: "3_dp_n2"}}
    axes["ddp"] = {1: "4_ddp_n1", 2: "5_ddp_n2"}
    tags = {
        f"scaling/{strategy}/{figure}"
        for strategy in axes
        for figure in ("samples_per_s", "speedup", "efficiency")
    }
    assert set(board.Tags()["scalars"]) == tags
    for strategy, cells in axes.items():
        events = board.Scalars(f"scaling/{strategy}/samples_per_s")
        assert [event.step for event in events] == list(cells)
        expected = [rate[name] for name in cells.values()]
        assert [event.value for event in events] == pytest.approx(expected, rel=1e-6)


def test_tensorboard_sees_one_run_per_cell(folder: Path) -> None:
    board = EventMultiplexer()
    board.AddRunsFromDirectory(str(folder))
    board.Reload()
    assert set(board.Runs()) == set(CELLS) | {"scaling"}
    for name, tags in board.Runs().items():
        assert len(tags["scalars"]) <= 30, name
        assert (len(tags["scalars"]) > 0) == (name != "1_none_n2")


def test_the_command_line_ends_with_the_scaling_table(typed: tuple[Any, Path]) -> None:
    ended, folder = typed
    cells = read(folder / "sweep.json")["cells"]
    lines = ended.stdout.splitlines()
    for index, cell in enumerate(cells):
        (row,) = [line for line in lines if line.split()[:2] == [str(index), cell["parallel"]]]
        assert cell["status"] in row
        if cell["speedup"] is not None:
            assert f"{times(cell['speedup'])}×" in row
            assert f"{cell['efficiency']:.0%}" in row
    assert "1_none_n2: skipped (in plan): num_devices=2" in ended.stdout
    assert f" -m dpexp.board {folder.relative_to(folder.parents[3])}" in ended.stdout


def test_the_sweep_of_the_api_returns_what_it_wrote(called: dpexp.Sweep) -> None:
    assert [run.folder for run in called.runs] == [called.folder / name for name in CELLS]
    assert statuses(called) == ["ok", "skipped", "ok", "ok", "ok", "ok"]
    written = read(called.folder / "sweep.json")["cells"]
    for cell, entry, run in zip(called.cells, written, called.runs, strict=True):
        assert (cell.folder, cell.speedup) == (entry["folder"], entry["speedup"])
        assert run.samples_per_s == cell.samples_per_s


# Baselines


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dpexp.Sweep]:
    """Sweep in a folder of its own."""
    server.start(several_ranks=True)

    def start(*overrides: str) -> dpexp.Sweep:
        return dpexp.sweep(list(overrides), folder=tmp_path_factory.mktemp("sweep") / "sweep")

    return start


def test_without_a_none_cell_the_smallest_count_of_the_strategy_is_the_baseline(
    sweep: Callable[..., dpexp.Sweep],
) -> None:
    got = sweep("parallel=dp,ddp", "num_devices=3,2")
    rate = rates(got.folder)
    baselines = ["1_dp_n2", "1_dp_n2", "3_ddp_n2", "3_ddp_n2"]
    assert [cell.baseline for cell in got.cells] == baselines
    for cell in got.cells:
        speedup = rate[cell.folder] / rate[cell.baseline]
        assert cell.speedup == pytest.approx(speedup)
        assert cell.efficiency == pytest.approx(speedup / (cell.num_devices / 2))


def test_cells_are_compared_only_with_cells_of_the_same_workload(
    sweep: Callable[..., dpexp.Sweep],
) -> None:
    got = sweep("batch_size=10,30", "parallel=none,dp", "num_devices=1")
    assert [cell.baseline for cell in got.cells] == [
        *["0_none_n1"] * 2,
        *["2_none_n1"] * 2,
    ]
    assert [cell.speedup for cell in got.cells if cell.parallel == "none"] == [1.0, 1.0]


def test_weak_scaling_is_named_and_grows_the_batch(sweep: Callable[..., dpexp.Sweep]) -> None:
    got = sweep("scaling=weak", "batch_size=16", "parallel=dp", "num_devices=1,2")
    assert [cell.batch_global for cell in got.cells] == [16, 32]
    assert [cell.batch_per_device for cell in got.cells] == [16, 16]
    assert "weak scaling" in (got.folder / "report.md").read_text(encoding="utf-8")


# Repeats

TWICE = ("parallel=none,dp", "num_devices=1", "repeats=3", "dataset.rows=300", "seed=3")
KINDS = [["parallel=none"], ["parallel=dp"]]


@pytest.fixture(scope="module")
def repeated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A sweep with repeats, typed on the command line: how it ended, and its folder."""
    work = tmp_path_factory.mktemp("repeated")
    ended = subprocess.run(
        [sys.executable, "-m", "dpexp", "-m", *TWICE],
        cwd=work,
        env={**os.environ, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    (folder,) = work.glob("outputs/sweeps/*/*")
    return ended, folder


def drawn_folders() -> list[str]:
    order = interleaved(["none", "dp"], 3, seed=3)
    return [f"{number}_{name}_n1" for number, (name, _) in enumerate(order)]


def test_the_runs_of_a_sweep_with_repeats_come_in_the_order_of_the_seed(
    repeated: tuple[Any, Path],
) -> None:
    ended, folder = repeated
    assert ended.returncode == 0, ended.stderr
    records = {path.parent.name: read(path) for path in folder.glob("*/run.json")}
    assert sorted(records) == drawn_folders()
    for number, name in enumerate(drawn_folders()):
        assert (records[name]["status"], records[name]["repeat"]) == ("ok", number // 2)
        assert records[name]["config"]["repeats"] == 3
    begun = [(folder / name / "dpexp.log").stat().st_mtime_ns for name in drawn_folders()]
    assert begun == sorted(begun)


def test_the_repeats_of_a_cell_are_one_row_with_its_interval(repeated: tuple[Any, Path]) -> None:
    ended, folder = repeated
    cells = read(folder / "sweep.json")["cells"]
    assert [(cell["parallel"], cell["repeats"]) for cell in cells] == [("none", 3), ("dp", 3)]
    for cell in cells:
        own = [name for name in drawn_folders() if name.endswith(f"_{cell['parallel']}_n1")]
        assert cell["folders"] == own
        throughputs = [read(folder / name / "run.json")["throughput"] for name in own]
        samples = sum(each["samples_measured"] for each in throughputs)
        seconds = sum(each["wall_s"] for each in throughputs)
        assert cell["samples_per_s"] == pytest.approx(samples / seconds)
        assert cell["samples_per_s_low"] < cell["samples_per_s"] < cell["samples_per_s_high"]
    base, dp = cells
    assert dp["speedup_low"] < dp["speedup"] < dp["speedup_high"]
    shown = ranged(dp["speedup"], dp["speedup_low"], dp["speedup_high"], "×")
    assert shown in ended.stdout
    assert f"noise floor: two runs of {base['folder']} differ by up to" in ended.stdout
    assert shown in (folder / "report.md").read_text(encoding="utf-8")
    with (folder / "summary.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["speedup"]) for row in rows] == [1.0, dp["speedup"]]


def test_the_api_repeats_in_the_same_order(sweep: Callable[..., dpexp.Sweep]) -> None:
    got = sweep(*TWICE)
    assert [run.folder.name for run in got.runs] == drawn_folders()
    assert [run.result.repeat for run in got.runs] == [0, 0, 1, 1, 2, 2]
    assert [cell.repeats for cell in got.cells] == [3, 3]


def test_a_repeat_that_fails_is_told_and_the_others_count(
    sweep: Callable[..., dpexp.Sweep], tmp_path: Path
) -> None:
    target = "model._target_=usercode.SecondTime"
    got = sweep("model=custom", target, f"+model.path={tmp_path / 'diary'}", "repeats=3")
    assert statuses(got) == ["ok", "failed", "ok"]
    (cell,) = got.cells
    assert (cell.repeats, cell.status) == (2, "failed")
    (failure,) = cell.failures
    assert failure.startswith("1_none_n1: failed: ") and "the second time" in failure
    assert cell.samples_per_s is not None


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (("repeats=3",), "repeats=3: a single run is not repeated"),
        (("-m", "repeats=1,2"), "repeats='1,2': is for the whole sweep"),
        (("-m", "repeats=two"), "repeats='two': is not a number of repeats"),
        (("-m", "repeats=2", "repeat=0,1"), "repeat=1: is set by the sweep"),
        (("-m", "repeats=2", "hydra/sweeper=basic"), "BasicSweeper does not repeat"),
    ],
)
def test_repeats_that_mean_nothing_are_refused_before_a_folder_is_made(
    cli: Cli, tmp_path: Path, typed: tuple[str, ...], said: str
) -> None:
    ended = cli(*typed)
    assert ended.returncode == 1
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "outputs").exists()


# Cells that fail


def test_a_failing_cell_does_not_stop_the_others_and_each_failure_is_told(
    cli: Cli, tmp_path: Path
) -> None:
    model = ("model=custom", "model._target_=usercode.Moody", "+model.text=fine,sour,fine,bitter")
    ended = cli("-m", *model)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    (folder,) = tmp_path.glob("outputs/sweeps/*/*")
    sweep = read(folder / "sweep.json")
    assert sweep["status"] == "failed"
    assert [cell["status"] for cell in sweep["cells"]] == ["ok", "failed", "ok", "failed"]
    for number, text in ((1, "sour"), (3, "bitter")):
        assert f"RuntimeError: {text}" in ended.stderr
        assert f"{number}_none_n1: failed" in ended.stdout
        log = (folder / f"{number}_none_n1/dpexp.log").read_text(encoding="utf-8")
        assert "Traceback (most recent call last)" in log
        assert f"RuntimeError: {text}" in log
    assert "2 of 4 cells failed" in ended.stdout
    assert "2 of 4 cells failed" in (folder / "report.md").read_text(encoding="utf-8")


def test_a_cell_killed_by_a_signal_does_not_stop_the_others(
    sweep: Callable[..., dpexp.Sweep],
) -> None:
    model = ("model=custom", "model._target_=usercode.Failing", "+model.how=kill")
    got = sweep("parallel=dp,ddp,dp", "num_devices=2", *model)
    assert statuses(got) == ["ok", "failed", "ok"]
    assert "rank 1 was killed by SIGKILL" in got.cells[1].reason


@pytest.mark.parametrize(
    ("override", "word"), [("num_devices=two,1", "two"), ("batch_size=abc,10", "abc")]
)
def test_a_value_of_the_wrong_type_fails_its_cell_alone_in_the_api(
    sweep: Callable[..., dpexp.Sweep], override: str, word: str
) -> None:
    got = sweep(override)
    assert statuses(got) == ["failed", "ok"]
    assert word in got.cells[0].reason


def test_a_value_of_the_wrong_type_fails_its_cell_alone_on_the_command_line(
    cli: Cli, tmp_path: Path
) -> None:
    ended = cli("-m", "batch_size=abc,10", "steps=2")
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert "batch_size='abc'" in ended.stderr
    (folder,) = tmp_path.glob("outputs/sweeps/*/*")
    cells = read(folder / "sweep.json")["cells"]
    assert [cell["status"] for cell in cells] == ["failed", "ok"]


def test_a_sweep_of_skipped_cells_alone_has_no_figures(sweep: Callable[..., dpexp.Sweep]) -> None:
    got = sweep("parallel=none", "num_devices=2,3")
    assert statuses(got) == ["skipped", "skipped"]
    assert [cell.speedup for cell in got.cells] == [None, None]
    assert read(got.folder / "sweep.json")["status"] == "ok"


def test_a_folder_that_holds_a_sweep_is_refused_and_left_as_it_is(
    sweep: Callable[..., dpexp.Sweep],
) -> None:
    first = sweep("batch_size=10,30")
    before = {path: path.read_bytes() for path in first.folder.rglob("*") if path.is_file()}
    with pytest.raises(dpexp.ConfigError, match="already holds"):
        dpexp.sweep(["seed=3,4"], folder=first.folder)
    after = {path: path.read_bytes() for path in first.folder.rglob("*") if path.is_file()}
    assert after == before


# Processes


def test_each_cell_has_processes_of_its_own(sweep: Callable[..., dpexp.Sweep]) -> None:
    got = sweep("parallel=ddp", "num_devices=1,2,3", "steps=2")
    assert statuses(got) == ["ok", "ok", "ok"]
    pids = [[rank["pid"] for rank in run.result.ranks] for run in got.runs]
    assert [len(own) for own in pids] == [1, 2, 3]
    assert len({pid for own in pids for pid in own}) == 6


def test_ddp_with_loader_processes_between_two_single_runs(
    sweep: Callable[..., dpexp.Sweep], capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    got = sweep("parallel=none,ddp,none", "num_devices=auto", "loader.workers=2", "steps=2")
    assert statuses(got) == ["ok", "ok", "ok"]
    errors = capfd.readouterr().err
    assert "destroy_process_group" not in errors
    assert "Warning" not in errors
    first, middle, last = (run.result for run in got.runs)
    cores = env.usable_cores()
    assert (first.num_devices, middle.num_devices, last.num_devices) == (1, cores, 1)
    assert first.model == last.model
    # The threads of the ranks are not those of the cell after them.
    assert [rank["threads"] for rank in middle.ranks] == [1] * cores
    assert first.ranks[0]["threads"] == last.ranks[0]["threads"] == cores


# Names


def test_paths_in_a_sweep_make_folders_of_one_level(
    sweep: Callable[..., dpexp.Sweep], tmp_path: Path
) -> None:
    for name in ("1.pt", "2.pt"):
        torch.save(torch.zeros(30, 5), tmp_path / name)
    paths = f"dataset.path={tmp_path / '1.pt'},{tmp_path / '2.pt'}"
    got = sweep("dataset=tensors", paths, "warmup_steps=0")
    assert statuses(got) == ["ok", "ok"]
    folders = sorted(path.parent.relative_to(got.folder) for path in got.folder.rglob("run.json"))
    assert [str(path) for path in folders] == ["0_none_n1", "1_none_n1"]
    board = EventMultiplexer()
    board.AddRunsFromDirectory(str(got.folder))
    board.Reload()
    cells = {name for name in board.Runs() if not name.startswith("scaling")}
    assert cells == {"0_none_n1", "1_none_n1"}


def test_lists_as_choices_are_one_cell_each(sweep: Callable[..., dpexp.Sweep]) -> None:
    got = sweep("model=mlp", "model.widths=[5,8,2],[5,16,2]")
    assert statuses(got) == ["ok", "ok"]
    widths = [run.result.config["model"]["widths"] for run in got.runs]
    assert widths == [[5, 8, 2], [5, 16, 2]]
