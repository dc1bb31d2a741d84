"""What a run leaves in its folder: the files of the contract and what they say."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

import dpexp
from dpexp import server
from dpexp.sweep_lock import claim_run

Runner = Callable[..., dpexp.Run]

NONE = ("parallel=none",)
DP2, DP3 = ("parallel=dp", "num_devices=2"), ("parallel=dp", "num_devices=3")
DDP2, DDP3 = ("parallel=ddp", "num_devices=2"), ("parallel=ddp", "num_devices=3")
TRAIN = ("task=train", "dataset.rows=300", "warmup_steps=2")  # ten batches of 30
STRATEGIES = {"none": NONE, "dp": DP2, "ddp": DDP2}

PHASES = ("data", "transfer", "forward", "backward", "optimizer", "other")
DP_PARTS = ("scatter", "replicate", "parallel_apply", "gather")
# What a training step's communication adds; a single process waits for nobody.
COMM_PARTS = {
    "none": (),
    "dp": ("comm_exposed", "comm_overlapped"),
    "ddp": ("comm_exposed", "comm_overlapped", "straggler_wait"),
}

# Schema 1 of the contract.
KEYS = {
    "schema",
    "status",
    "error",
    "label",
    "config",
    "environment",
    "parallel",
    "device",
    "emulated",
    "num_devices",
    "num_processes",
    "threads_per_process",
    "batch",
    "scaling",
    "steps",
    "samples_seen",
    "timing",
    "throughput",
    "memory",
    "loss",
}
OWN_KEYS = {
    "timing_rank", "model", "ranks", "notes", "metric", "batch_search", "repeat", "uncertainty",
    "comm", "stragglers", "parity", "compute", "energy", "machine", "injected", "config_hash",
    "pinned", "claimed_devices", "checkpoint", "restarts", "hosts",
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Run a configuration once; asked again, give the same run."""
    server.start(several_ranks=True)
    done: dict[tuple[str, ...], dpexp.Run] = {}

    def once(*overrides: str) -> dpexp.Run:
        if overrides not in done:
            done[overrides] = dpexp.run(list(overrides), folder=tmp_path_factory.mktemp("run"))
        result = done[overrides].result
        assert result.status == "ok", result.error and result.error.traceback
        return done[overrides]

    return once


@pytest.fixture(params=STRATEGIES)
def trained(request: pytest.FixtureRequest, run: Runner) -> dpexp.Run:
    """Ten training steps under each strategy, on 2 devices where it can."""
    return run(*TRAIN, *STRATEGIES[request.param])


def refuse_constant(name: str) -> NoReturn:
    raise AssertionError(f"{name} is not JSON")


def record(run: dpexp.Run) -> dict[str, Any]:
    text = (run.folder / "run.json").read_text(encoding="utf-8")
    parsed: dict[str, Any] = json.loads(text, parse_constant=refuse_constant)
    return parsed


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def steps(run: dpexp.Run, rank: int = 0) -> list[dict[str, str]]:
    return table(run.folder / f"steps.rank{rank}.csv")


def shapes(run: dpexp.Run) -> list[tuple[str, int, str, str, int, int, int]]:
    return [
        (
            row["module"],
            int(row["replica"]),
            row["input_shape"],
            row["output_shape"],
            int(row["count"]),
            int(row["first_step"]),
            int(row["last_step"]),
        )
        for row in table(run.folder / "shapes.csv")
    ]


def events(run: dpexp.Run) -> EventAccumulator:
    board = EventAccumulator(str(run.folder), size_guidance={"scalars": 0, "tensors": 0})
    board.Reload()
    return board


def text(board: EventAccumulator, tag: str) -> str:
    content: bytes = board.Tensors(f"{tag}/text_summary")[0].tensor_proto.string_val[0]
    return content.decode()


def hparams_of(board: EventAccumulator, part: str) -> HParamsPluginData:
    return HParamsPluginData.FromString(board.SummaryMetadata(part).plugin_data.content)


# The folder


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [(NONE, 1), (DP3, 1), (DDP2, 2), (DDP3, 3)],
    ids=["none", "dp", "ddp-2", "ddp-3"],
)
def test_a_run_leaves_exactly_the_files_of_the_contract(
    run: Runner, overrides: tuple[str, ...], ranks: int
) -> None:
    names = {path.name for path in run(*overrides).folder.iterdir()}
    board = {name for name in names if name.startswith("events.out.tfevents.")}
    assert len(board) == 1
    own = {".hydra", "run.json", "shapes.csv", "dpexp.log"}
    assert names - board == own | {f"steps.rank{rank}.csv" for rank in range(ranks)}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_on_several_devices_leaves_a_timeline_too(run: Runner, strategy: str) -> None:
    names = {path.name for path in run(*TRAIN, *STRATEGIES[strategy]).folder.iterdir()}
    assert ("timeline.json" in names) == (strategy != "none")


def test_the_hydra_folder_has_the_composed_config_and_the_overrides(run: Runner) -> None:
    folder = run(*DP2).folder / ".hydra"
    overrides = (folder / "overrides.yaml").read_text(encoding="utf-8")
    assert overrides == "- parallel=dp\n- num_devices=2\n"
    assert "strategy: dp" in (folder / "config.yaml").read_text(encoding="utf-8")


def test_a_command_line_run_leaves_the_same_files_as_the_api(
    cli: Callable[..., Any], tmp_path: Path, run: Runner
) -> None:
    ended = cli("parallel=ddp", "num_devices=2")
    assert ended.returncode == 0, ended.stderr
    (folder,) = (tmp_path / "outputs/runs").glob("*/*")
    kinds = {path.name.split(".tfevents")[0] for path in folder.iterdir()}
    assert kinds == {path.name.split(".tfevents")[0] for path in run(*DDP2).folder.iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]
    overrides = (folder / ".hydra/overrides.yaml").read_text(encoding="utf-8")
    assert overrides == "- parallel=ddp\n- num_devices=2\n"
    assert f" -m dpexp.board {folder.relative_to(tmp_path)}" in ended.stdout


def test_two_runs_started_at_once_get_different_folders(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dpexp", "steps=1"]
    both = [subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    folders = list((tmp_path / "outputs/runs").glob("*/*"))
    assert len(folders) == 2
    assert all(json.loads((f / "run.json").read_text())["status"] == "ok" for f in folders)


def test_runs_of_the_api_in_one_second_get_different_folders(workdir: Path) -> None:
    folders = {dpexp.run(["steps=1"]).folder for _ in range(3)}
    assert len(folders) == 3
    assert all(folder.parent.parent == workdir / "outputs/runs" for folder in folders)


def test_a_folder_that_holds_a_run_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    first = dpexp.run(["steps=1"], folder=tmp_path / "mine")
    before = {path: path.read_bytes() for path in first.folder.rglob("*") if path.is_file()}
    with pytest.raises(dpexp.ConfigError, match="already holds a run"):
        dpexp.run(["steps=2"], folder=tmp_path / "mine")
    after = {path: path.read_bytes() for path in first.folder.rglob("*") if path.is_file()}
    assert after == before


def test_a_folder_in_which_another_run_has_begun_is_refused(
    cli: Callable[..., Any], tmp_path: Path
) -> None:
    held = claim_run(tmp_path / "mine")
    ended = cli("hydra.run.dir=mine", "steps=1")
    assert ended.returncode == 1
    assert "another process works in this folder" in ended.stderr
    with pytest.raises(dpexp.ConfigError, match="another process works in this folder"):
        dpexp.run(["steps=1"], folder=tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == [".lock"]
    held.release()
    run = dpexp.run(["steps=1"], folder=tmp_path / "mine")
    assert run.result.status == "ok" and not (run.folder / ".lock").exists()


def test_the_command_line_refuses_a_folder_that_holds_a_run(
    cli: Callable[..., Any], tmp_path: Path
) -> None:
    first = dpexp.run(["steps=1"], folder=tmp_path / "mine")
    before = {path: path.read_bytes() for path in first.folder.rglob("*") if path.is_file()}
    ended = cli("hydra.run.dir=mine", "steps=2")
    assert ended.returncode == 1
    assert "hydra.run.dir" in ended.stderr and "already holds a run" in ended.stderr
    assert "Traceback" not in ended.stderr
    after = {path: path.read_bytes() for path in first.folder.rglob("*") if path.is_file()}
    assert after == before


@pytest.mark.parametrize(
    "mistake",
    [
        ("model=custom", "model._target_=usercode.Nett"),
        ("model.out_features=3", "task=train"),
        ("batch_size=0",),
    ],
    ids=["class", "shape", "value"],
)
def test_a_folder_of_the_users_choice_is_free_again_after_a_refusal(
    tmp_path: Path, mistake: tuple[str, ...]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("keep me")
    with pytest.raises(dpexp.ConfigError):
        dpexp.run(list(mistake), folder=tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    run = dpexp.run(["steps=1"], folder=tmp_path / "mine")
    assert run.result.status == "ok"
    assert len(list(run.folder.glob("events.out.tfevents.*"))) == 1
    assert (tmp_path / "mine/notes.txt").read_text() == "keep me"


# run.json


def test_run_json_has_the_keys_of_schema_1(trained: dpexp.Run) -> None:
    got = record(trained)
    assert set(got) == KEYS | OWN_KEYS
    assert got["schema"] == 1
    assert got["status"] == "ok"
    assert got["error"] is None


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (
            "none",
            {"label": "none-n1", "num_devices": 1, "num_processes": 1, "emulated": False},
        ),
        ("dp", {"label": "dp-n2", "num_devices": 2, "num_processes": 1, "emulated": True}),
        ("ddp", {"label": "ddp-n2", "num_devices": 2, "num_processes": 2, "emulated": False}),
    ],
)
def test_run_json_says_what_was_run(run: Runner, strategy: str, expected: dict[str, Any]) -> None:
    got = record(run(*TRAIN, *STRATEGIES[strategy]))
    expected = {**expected, "parallel": strategy, "device": "cpu", "scaling": "strong"}
    assert {key: got[key] for key in expected} == expected
    assert got["batch"] == {"global": 30, "per_device": 30 // expected["num_devices"]}
    assert got["steps"] == {"measured": 8, "warmup": 2}
    assert len(got["memory"]["peak_bytes"]) == expected["num_processes"]
    assert all(peak > 50 * 2**20 for peak in got["memory"]["peak_bytes"])
    assert got["config"]["dataset"]["rows"] == 300
    assert got["config"]["parallel"]["strategy"] == strategy
    assert got["environment"]["torch"]


def test_run_json_summarizes_the_measured_steps_of_every_phase(trained: dpexp.Run) -> None:
    timing = record(trained)["timing"]
    parts = DP_PARTS if trained.result.parallel == "dp" else ()
    assert set(timing) == {"step", *PHASES, *parts, *COMM_PARTS[trained.result.parallel]}
    for phase, summary in timing.items():
        assert set(summary) == {"mean_s", "p50_s", "p95_s", "min_s", "max_s", "count"}, phase
        assert summary["count"] == 8
        assert summary["min_s"] <= summary["p50_s"] <= summary["p95_s"] <= summary["max_s"]
        seconds = [
            float(row[f"{phase}_s"])
            for row in steps(trained, trained.result.timing_rank)
            if row["warmup"] == "0"
        ]
        assert summary["mean_s"] == pytest.approx(sum(seconds) / 8, rel=1e-6)
        assert summary["max_s"] == pytest.approx(max(seconds), rel=1e-6)


def test_loss_is_null_when_nothing_is_trained(run: Runner) -> None:
    got = record(run(*DP2))
    assert got["loss"] is None
    assert got["timing"]["backward"]["max_s"] == 0
    assert [row["loss"] for row in steps(run(*DP2))] == [""] * 4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_samples_seen_counts_each_row_once(run: Runner, strategy: str) -> None:
    assert record(run(*STRATEGIES[strategy]))["samples_seen"] == 100


def test_throughput_is_samples_by_the_wall_time_of_the_slowest_rank(trained: dpexp.Run) -> None:
    got = record(trained)
    walls, rows = [], []
    for rank in range(got["num_processes"]):
        measured = [row for row in steps(trained, rank) if row["warmup"] == "0"]
        walls.append(sum(float(row["step_s"]) for row in measured))
        rows.append(sum(int(row["global_rows"]) for row in measured))
    assert set(rows) == {240}
    rate = got["throughput"]["samples_per_s"]
    assert rate == pytest.approx(240 / max(walls), rel=1e-6)
    each = got["throughput"]["samples_per_s_per_device"]
    assert each == pytest.approx(rate / got["num_devices"])


def test_all_steps_being_warm_up_gives_no_figures_and_a_note(run: Runner) -> None:
    got = record(run("steps=2", "warmup_steps=5"))
    assert got["steps"] == {"measured": 0, "warmup": 2}
    assert got["timing"]["step"]["mean_s"] is None
    assert got["throughput"]["samples_per_s"] is None
    assert any("warmup_steps=5" in note for note in got["notes"])


# steps.rank<r>.csv


def test_the_phases_of_a_step_add_up_to_it(trained: dpexp.Run) -> None:
    for rank in range(trained.result.num_processes):
        for row in steps(trained, rank):
            total = sum(float(row[f"{phase}_s"]) for phase in PHASES)
            assert total == pytest.approx(float(row["step_s"]), rel=1e-6)
            assert all(float(row[f"{phase}_s"]) > 0 for phase in PHASES)


def test_dps_four_steps_lie_within_forward(run: Runner) -> None:
    for row in steps(run(*TRAIN, *DP2)):
        parts = sum(float(row[f"{part}_s"]) for part in DP_PARTS)
        assert 0 < parts < float(row["forward_s"])


@pytest.mark.parametrize("strategy", ["none", "ddp"])
def test_the_columns_of_dps_four_steps_are_empty_elsewhere(run: Runner, strategy: str) -> None:
    for row in steps(run(*TRAIN, *STRATEGIES[strategy])):
        assert [row[f"{part}_s"] for part in DP_PARTS] == [""] * 4


def test_every_rank_has_a_row_for_every_step(run: Runner) -> None:
    got = run(*DDP3)
    for rank, sizes in enumerate(([10, 10, 10, 4], [10, 10, 10, 4], [10, 10, 10, 2])):
        rows = steps(got, rank)
        assert [int(row["step"]) for row in rows] == [0, 1, 2, 3]
        assert [int(row["rows"]) for row in rows] == sizes
        assert [int(row["global_rows"]) for row in rows] == [30, 30, 30, 10]


def test_epochs_and_warm_up_are_marked_on_each_step(run: Runner) -> None:
    rows = steps(run("epochs=2", "warmup_steps=3"))
    assert [int(row["epoch"]) for row in rows] == [0] * 4 + [1] * 4
    assert [int(row["warmup"]) for row in rows] == [1, 1, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("rows", "batch", "expected"),
    [
        (14, 9, [[3, 3, 3, 0], [2, 2, 1, 0]]),
        (10, 10, [[3, 3, 3, 1]]),
        (3, 3, [[1, 1, 1, 0]]),
        (7, 6, [[2, 2, 2, 0], [1, 0, 0, 0]]),
    ],
)
@pytest.mark.parametrize("strategy", ["dp", "ddp"])
def test_idle_devices_have_zero_rows_and_no_shape(
    run: Runner, strategy: str, rows: int, batch: int, expected: list[list[int]]
) -> None:
    spread = (f"parallel={strategy}", "num_devices=4")
    got = run(*spread, f"dataset.rows={rows}", f"batch_size={batch}", "shuffle=false")
    logged = [[int(row[f"replica_{i}_rows"]) for i in range(4)] for row in steps(got)]
    assert logged == expected
    counted = {
        ("", device, f"[{sizes[device]}, 5]", f"[{sizes[device]}, 2]", 1, step, step)
        for step, sizes in enumerate(expected)
        for device in range(4)
        if sizes[device]
    }
    assert set(shapes(got)) == counted
    assert record(got)["samples_seen"] == rows


# shapes.csv: 100 rows in batches of 30 are 30, 30, 30 and 10.

THRICE, ONCE = (3, 0, 2), (1, 3, 3)


@pytest.mark.parametrize("strategy", ["dp", "ddp"])
@pytest.mark.parametrize(
    ("devices", "large", "small"),
    [
        (1, [30], [10]),
        (2, [15, 15], [5, 5]),
        (3, [10, 10, 10], [4, 4, 2]),
    ],
)
def test_shapes_of_the_exercise(
    run: Runner, strategy: str, devices: int, large: list[int], small: list[int]
) -> None:
    got = run(f"parallel={strategy}", f"num_devices={devices}")
    expected = []
    for device in range(devices):
        expected.append(("", device, f"[{large[device]}, 5]", f"[{large[device]}, 2]", *THRICE))
        expected.append(("", device, f"[{small[device]}, 5]", f"[{small[device]}, 2]", *ONCE))
    assert shapes(got) == expected


def test_shapes_of_the_exercise_on_one_device(run: Runner) -> None:
    assert shapes(run(*NONE)) == [
        ("", 0, "[30, 5]", "[30, 2]", 3, 0, 2),
        ("", 0, "[10, 5]", "[10, 2]", 1, 3, 3),
    ]


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [(NONE, [30]), (DP2, [15, 15]), (DDP2, [15, 15])],
    ids=["none", "dp", "ddp"],
)
def test_depth_1_also_has_the_shapes_of_the_models_children(
    run: Runner, overrides: tuple[str, ...], sizes: list[int]
) -> None:
    mlp = ("model=mlp", "model.widths=[5,4,2]", "steps=2")
    got = run(*overrides, *mlp, "shapes.depth=1")
    widths = {"": (5, 2), "0": (5, 5), "1": (5, 4), "2": (4, 4), "3": (4, 2)}
    expected = {
        (module, device, f"[{size}, {before}]", f"[{size}, {after}]", 2, 0, 1)
        for module, (before, after) in widths.items()
        for device, size in enumerate(sizes)
    }
    assert set(shapes(got)) == expected
    assert len(shapes(got)) == len(expected)


def test_depth_0_has_the_models_own_shapes_only(run: Runner) -> None:
    got = run(*DP2, "model=mlp", "model.widths=[5,4,2]", "steps=2")
    assert {module for module, *_ in shapes(got)} == {""}


# The event file


def test_there_is_one_event_file_and_steps_strictly_increase(trained: dpexp.Run) -> None:
    assert len(list(trained.folder.rglob("events.out.tfevents.*"))) == 1
    board = events(trained)
    for tag in board.Tags()["scalars"]:
        numbers = [event.step for event in board.Scalars(tag)]
        if tag.startswith("summary/"):
            assert numbers == [9]
        else:
            assert numbers == list(range(10)), tag


def test_the_event_file_has_the_tags_of_the_contract(trained: dpexp.Run) -> None:
    tags = set(events(trained).Tags()["scalars"])
    parts = DP_PARTS if trained.result.parallel == "dp" else ()
    replicas = range(trained.result.num_devices)
    comm = COMM_PARTS[trained.result.parallel]
    expected = {f"time/{phase}_ms" for phase in ("step", *PHASES, *parts, *comm)}
    if parts:
        expected.remove("time/comm_overlapped_ms")  # dp always stands still while it copies
    if comm:
        expected |= {"comm/bytes_per_step", "comm/bus_gb_per_s"}
    expected |= {"throughput/samples_per_s", "memory/peak_mib"}
    expected |= {"loss/train", "optimizer/learning_rate"}
    expected |= {"shape/global_rows", *(f"shape/replica_{i}_rows" for i in replicas)}
    assert {tag for tag in tags if not tag.startswith("summary/")} == expected


def test_the_event_file_says_the_same_as_the_csv(trained: dpexp.Run) -> None:
    board, rows = events(trained), steps(trained)

    def scalars(tag: str) -> list[float]:
        return [event.value for event in board.Scalars(tag)]

    written = {tag for tag in board.Tags()["scalars"] if tag.startswith("time/")}
    assert len(written) >= 7
    for phase in (tag[len("time/") : -len("_ms")] for tag in written):
        milliseconds = [float(row[f"{phase}_s"]) * 1e3 for row in rows]
        assert scalars(f"time/{phase}_ms") == pytest.approx(milliseconds, rel=1e-6)
    rate = [int(row["global_rows"]) / float(row["step_s"]) for row in rows]
    assert scalars("throughput/samples_per_s") == pytest.approx(rate, rel=1e-6)
    assert scalars("loss/train") == pytest.approx([float(row["loss"]) for row in rows], rel=1e-6)
    assert scalars("optimizer/learning_rate") == pytest.approx([0.01] * 10)
    assert [row["learning_rate"] for row in rows] == ["0.01"] * 10
    assert scalars("shape/global_rows") == [30.0] * 10
    each = 30 / trained.result.num_devices
    assert scalars("shape/replica_0_rows") == [each] * 10


def test_config_environment_and_shapes_are_readable_text(trained: dpexp.Run) -> None:
    board = events(trained)
    config = text(board, "config")
    assert all(line.startswith("    ") for line in config.splitlines())
    for key in ("batch_size: 30", "task: train", f"strategy: {trained.result.parallel}"):
        assert key in config
    assert "torch:" in text(board, "environment")
    lines = text(board, "shapes").splitlines()
    assert lines[1].replace("|", "").strip("-") == ""
    assert len(lines) - 2 == len(shapes(trained))
    assert f"[{30 // trained.result.num_devices}, 5]" in lines[2]


def test_hparams_have_the_same_columns_under_every_strategy(run: Runner) -> None:
    boards = [events(run(*TRAIN, *overrides)) for overrides in STRATEGIES.values()]
    columns, metrics = [], []
    for board in boards:
        start = hparams_of(board, "_hparams_/session_start_info").session_start_info
        columns.append(set(start.hparams))
        experiment = hparams_of(board, "_hparams_/experiment").experiment
        assert {info.name for info in experiment.hparam_infos} == set(start.hparams)
        metrics.append({info.name.tag for info in experiment.metric_infos})
    assert columns[0] == columns[1] == columns[2]
    assert {"parallel", "num_devices", "batch_size_global", "optimizer.lr"} <= columns[0]
    assert metrics[0] == metrics[1] == metrics[2] != set()


def test_each_hparams_metric_is_a_scalar_of_the_same_run(trained: dpexp.Run) -> None:
    board = events(trained)
    experiment = hparams_of(board, "_hparams_/experiment").experiment
    assert len(experiment.metric_infos) > 0
    for info in experiment.metric_infos:
        (event,) = board.Scalars(info.name.tag)
        assert event.value > 0
    throughput = record(trained)["throughput"]["samples_per_s"]
    assert board.Scalars("summary/samples_per_s")[0].value == pytest.approx(throughput, rel=1e-6)


def test_a_long_run_keeps_every_step_in_the_csv_and_the_first_thousand_in_events(
    run: Runner,
) -> None:
    got = run("epochs=null", "steps=1300")
    assert [int(row["step"]) for row in steps(got)] == list(range(1300))
    numbers = [event.step for event in events(got).Scalars("time/step_ms")]
    assert numbers[:1000] == list(range(1000))
    assert len(numbers) < 1300
    assert numbers[-1] == 1299
    assert all(before < after for before, after in pairwise(numbers))


def test_virtual_devices_are_called_and_told_apart(run: Runner) -> None:
    got = run(*DP3)
    assert record(got)["emulated"] is True
    assert {replica for _, replica, *_ in shapes(got)} == {0, 1, 2}


def test_a_ddp_run_of_four_ranks_has_one_folder_for_all(workdir: Path) -> None:
    got = dpexp.run(["parallel=ddp", "num_devices=4", "steps=1"])
    assert got.result.status == "ok"
    assert list((workdir / "outputs/runs").glob("*/*")) == [got.folder]
    assert len(list(workdir.rglob(".hydra"))) == 1
    names = sorted(path.name for path in workdir.rglob("steps.rank*.csv"))
    assert names == [f"steps.rank{rank}.csv" for rank in range(4)]
