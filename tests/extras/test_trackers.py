"""MLflow and Weights & Biases: real stores, read back."""

from __future__ import annotations

import csv
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from library import library

from dpexp import env
from dpexp.sinks.mlflow import one_at_a_time

TESTS = Path(__file__).parent.parent
QUIET = {"DO_NOT_TRACK", "MLFLOW_DISABLE_TELEMETRY", "WANDB_ERROR_REPORTING"}

env.quiet_trackers()  # for this process; those of the runs must see to it themselves
mlflow = library("mlflow")
wandb = library("wandb")

# All runs are made in the setup of the first test.
pytestmark = pytest.mark.timeout(400)

BOTH = "sinks=[mlflow,wandb]"
# Rank 1 raises in its third step.
FAILING = (
    "model=custom",
    "model._target_=usercode.Failing",
    "+model.how=raise",
    "+model.rank=1",
    "+model.call=2",
)


@dataclass(frozen=True)
class Done:
    """A folder in which a single run and a sweep have been made."""

    here: Path
    outputs: str  # of both on stderr
    connections: int  # tried through the proxy of the environment

    @property
    def client(self) -> Any:
        return mlflow.MlflowClient(f"sqlite:///{self.here}/outputs/mlflow.db")

    def runs(self) -> dict[str, Any]:
        """MLflow's runs by name."""
        client = self.client
        experiment = client.get_experiment_by_name("dpexp")
        found = client.search_runs([experiment.experiment_id])
        names = [run.info.run_name for run in found]
        assert len(names) == len(set(names))
        return dict(zip(names, found, strict=True))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Done]:
    here = tmp_path_factory.mktemp("trackers")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = f"http://127.0.0.1:{listener.getsockname()[1]}"
        names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
        proxies = {key: proxy for name in names for key in (name, name.lower())}
        others = {key: value for key, value in os.environ.items() if key not in QUIET}
        # What the environment says of modes and keys is no reason to send anything.
        asking = {"WANDB_MODE": "online", "WANDB_API_KEY": "0" * 40, "PYTHONPATH": str(TESTS)}
        outputs = ""
        for arguments, status in (
            ("task=train parallel=ddp num_devices=2 epochs=25 hydra.run.dir=one", 0),
            ("-m parallel=ddp num_devices=1,2 hydra.sweep.dir=all", 1),
        ):
            failing = FAILING if arguments.startswith("-m") else ()
            ended = subprocess.run(
                [sys.executable, "-m", "dpexp", *arguments.split(), BOTH, *failing],
                cwd=here,
                env={**others, **proxies, **asking},
                capture_output=True,
                text=True,
                timeout=150,
                check=False,
            )
            assert ended.returncode == status, ended.stderr
            outputs += ended.stderr
        waiting, _, _ = select.select([listener], [], [], 0)
        yield Done(here, outputs, len(waiting))


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "steps.rank0.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_nothing_is_sent_and_nothing_is_said(done: Done) -> None:
    assert done.connections == 0
    assert "wandb:" not in done.outputs
    assert "alembic" not in done.outputs
    assert "mlflow" not in done.outputs
    assert [p.name for p in sorted(done.here.iterdir())] == ["all", "one", "outputs"]


def test_no_key_is_in_the_files_of_a_run(done: Done) -> None:
    files = [path for path in (done.here / "one").rglob("*") if path.is_file()]
    assert len(files) > 5
    assert [path for path in files if b"0" * 40 in path.read_bytes()] == []


def test_mlflow_has_config_status_and_artifacts_of_a_run(done: Done) -> None:
    run = done.runs()["ddp-n2"]
    assert run.info.status == "FINISHED"
    assert run.data.params["model.in_features"] == "5"
    assert run.data.params["parallel"] == "ddp"
    assert run.data.params["num_devices"] == "2"
    assert run.data.tags["dpexp.emulated"] == "false"
    assert run.data.tags["dpexp.folder"] == str(done.here / "one")
    listed = {info.path for info in done.client.list_artifacts(run.info.run_id)}
    assert listed == {"run.json", "shapes.csv"}
    artifacts = done.here / "outputs/mlflow-artifacts" / run.info.run_id / "artifacts"
    assert json.loads((artifacts / "run.json").read_text())["label"] == "ddp-n2"


def test_mlflow_has_every_step_as_in_the_table(done: Done) -> None:
    client, run = done.client, done.runs()["ddp-n2"]
    rows = table(done.here / "one")
    assert len(rows) == 100  # 19 scalars each: more than a batch of MLflow holds
    history = client.get_metric_history(run.info.run_id, "time/step_ms")
    assert [metric.step for metric in history] == list(range(100))
    step_ms = [float(row["step_s"]) * 1e3 for row in rows]
    assert [metric.value for metric in history] == pytest.approx(step_ms)
    losses = client.get_metric_history(run.info.run_id, "loss/train")
    assert [metric.value for metric in losses] == [float(row["loss"]) for row in rows]
    times_ms = [metric.timestamp for metric in history]
    assert times_ms == sorted(times_ms)
    assert run.info.start_time <= times_ms[0]
    assert run.info.end_time == times_ms[-1]
    result = json.loads((done.here / "one/run.json").read_text())
    (summary,) = client.get_metric_history(run.info.run_id, "summary/samples_per_s")
    assert summary.value == result["throughput"]["samples_per_s"]
    assert summary.step == 99


def test_mlflow_has_the_cells_of_a_sweep_under_one_run_with_their_status(done: Done) -> None:
    runs = done.runs()
    assert set(runs) == {"ddp-n2", "sweep all", "0_ddp_n1", "1_ddp_n2"}
    good, bad, parent = runs["0_ddp_n1"], runs["1_ddp_n2"], runs["sweep all"]
    assert [good.info.status, bad.info.status, parent.info.status] == [
        "FINISHED",
        "FAILED",
        "FAILED",
    ]
    for run in (good, bad):
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert "mlflow.parentRunId" not in runs["ddp-n2"].data.tags
    assert bad.data.tags["dpexp.error"].startswith("user_error: ")
    assert bad.data.tags["dpexp.error"] in bad.data.tags["mlflow.note.content"]
    assert "time/step_ms" in bad.data.metrics
    assert "summary/samples_per_s" not in bad.data.metrics


def wandb_records(folder: Path) -> list[Any]:
    """The records of an offline run: a log in LevelDB's format, after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    data, at, whole, found = file.read_bytes(), 7, b"", []
    assert data[:4] == b":W&B"
    while at < len(data):
        left = 32768 - at % 32768
        if left < 7:  # no room for a head in this block
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, last
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            found.append(record)
            whole = b""
    return found


def items(entries: Any) -> dict[str, Any]:
    return {
        entry.key or ".".join(entry.nested_key): json.loads(entry.value_json) for entry in entries
    }


def test_two_cells_open_a_new_database_one_after_the_other(tmp_path: Path) -> None:
    # A lock belongs to an open folder, so two threads stand for two processes.
    turns: list[str] = []

    def second() -> None:
        with one_at_a_time(tmp_path):
            turns.append("second")

    thread = threading.Thread(target=second)
    with one_at_a_time(tmp_path):
        thread.start()
        thread.join(0.3)
        turns.append("first")
    thread.join(10)
    assert turns == ["first", "second"]
    assert list(tmp_path.iterdir()) == []


def test_wandb_has_config_steps_summary_and_files_of_a_run(done: Done) -> None:
    records = wandb_records(done.here / "one")
    (run,) = [each.run for each in records if each.WhichOneof("record_type") == "run"]
    assert (run.project, run.display_name, run.job_type) == ("dpexp", "ddp-n2", "ddp")
    assert (run.run_group, list(run.tags)) == ("", ["ddp", "ok"])
    config = items(run.config.update)
    assert (config["parallel"], config["num_devices"], config["model.in_features"]) == ("ddp", 2, 5)
    rows = table(done.here / "one")
    history = [items(each.history.item) for each in records if each.HasField("history")]
    assert [entry["_step"] for entry in history] == list(range(100))
    assert [entry["loss/train"] for entry in history] == [float(row["loss"]) for row in rows]
    summary: dict[str, Any] = {}
    for each in records:
        if each.HasField("summary"):
            summary |= items(each.summary.update)
    result = json.loads((done.here / "one/run.json").read_text())
    assert summary["summary/samples_per_s"] == result["throughput"]["samples_per_s"]
    assert [each.exit.exit_code for each in records if each.HasField("exit")] == [0]
    (files,) = (done.here / "one").glob("wandb/offline-run-*/files")
    assert {path.name for path in files.iterdir()} == {"run.json", "shapes.csv"}


def test_wandb_has_a_failed_cell_as_failed_in_the_group_of_its_sweep(done: Done) -> None:
    records = wandb_records(done.here / "all/1_ddp_n2")
    (run,) = [each.run for each in records if each.WhichOneof("record_type") == "run"]
    assert (run.run_group, run.display_name) == ("all", "1_ddp_n2")
    assert list(run.tags) == ["ddp", "failed"]
    assert [each.exit.exit_code for each in records if each.HasField("exit")] == [1]
    summary: dict[str, Any] = {}
    for each in records:
        if each.HasField("summary"):
            summary |= items(each.summary.update)
    assert summary["dpexp/error"].startswith("user_error: ")


def test_a_store_that_cannot_be_reached_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "outputs").write_text("a file where the database's folder should be")
    ended = subprocess.run(
        [sys.executable, "-m", "dpexp", "sinks=mlflow", "hydra.run.dir=one"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    (note,) = [line for line in ended.stderr.splitlines() if line.startswith("note: sinks.")]
    assert note.startswith("note: sinks.mlflow: not written: ")
    assert "outputs" in note
    assert json.loads((tmp_path / "one/run.json").read_text())["status"] == "ok"
