"""Plain data and run.json."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import make_rank_result, make_record, make_run_result, make_shape, make_summary

from dpexp.records import PHASES, ErrorRecord, RunResult, rank_result_from, read_run

# Users and scripts rely on these; the file may hold more.
FIELDS = {
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
    "metric",
    "batch_search",
}


def written(result: RunResult, folder: Path) -> dict[str, Any]:
    result.write(folder / "run.json")
    text = (folder / "run.json").read_text(encoding="utf-8")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    data: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return data


def test_the_phases_of_a_step_are_fields_of_its_record() -> None:
    record = make_record()
    assert math.fsum(getattr(record, f"{phase}_s") for phase in PHASES) == pytest.approx(0.020)


def test_run_json_has_every_promised_field_and_starts_with_the_schema(tmp_path: Path) -> None:
    data = written(make_run_result(), tmp_path)
    assert data.keys() >= FIELDS
    assert next(iter(data)) == "schema"
    assert data["schema"] == 1


def test_run_json_has_every_field_also_when_nothing_is_known_but_the_error(tmp_path: Path) -> None:
    error = ErrorRecord("crash", "SIGKILL", "rank 1 was killed", rank=1)
    result = RunResult("failed", "ddp-n2", {}, {}, "ddp", error=error)
    data = written(result, tmp_path)
    assert data.keys() >= FIELDS
    assert data["error"] == {
        "kind": "crash",
        "type": "SIGKILL",
        "message": "rank 1 was killed",
        "rank": 1,
        "step": None,
        "traceback": None,
        "user_frames": None,
        "phase": None,
        "during": None,
        "stacks": None,
        "host": None,
    }
    assert data["timing"] is None


def test_a_phase_has_mean_median_percentile_extremes_and_count(tmp_path: Path) -> None:
    data = written(make_run_result(timing={"step": make_summary(0.125)}), tmp_path)
    assert data["timing"]["step"] == {
        "mean_s": 0.125,
        "p50_s": 0.125,
        "p95_s": 0.125,
        "min_s": 0.125,
        "max_s": 0.125,
        "count": 3,
    }


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float64("nan")])
def test_a_non_finite_number_is_written_as_null(tmp_path: Path, value: float) -> None:
    config = {"optimizer": {"betas": [0.9, value]}}
    data = written(make_run_result(loss={"first": 1.5, "last": value}, config=config), tmp_path)
    assert data["loss"] == {"first": 1.5, "last": None}
    assert data["config"] == {"optimizer": {"betas": [0.9, None]}}


def test_large_counts_and_truth_values_are_exact(tmp_path: Path) -> None:
    data = written(make_run_result(samples_seen=16777217, emulated=True), tmp_path)
    assert data["samples_seen"] == 16777217
    assert data["emulated"] is True


def test_values_that_json_does_not_know_become_text(tmp_path: Path) -> None:
    data = written(make_run_result(config={"path": Path("a/b"), 3: (1, 2)}), tmp_path)
    assert data["config"] == {"path": "a/b", "3": [1, 2]}


def test_a_written_result_is_read_back(tmp_path: Path) -> None:
    result = make_run_result()
    result.write(tmp_path / "run.json")
    assert read_run(tmp_path / "run.json") == result.to_dict()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "not a dpexp result"),
        ('{"status": "ok"}', "not a dpexp result"),
        ('{"schema": 1}', "not a dpexp result"),
        ('{"schema": 2, "status": "ok"}', "has schema 2; this dpexp reads up to 1"),
        ('{"schema": "1", "status": "ok"}', "not a dpexp result"),
        ('{"schema": 1, "status": "ok", "label": "none-n1"}', "it has no config, environment"),
        (
            '{"schema": 1, "status": "ok", "label": "", "config": [], "environment": {}, '
            '"parallel": "none"}',
            "config and environment have no keys",
        ),
        ("", "not whole, or no JSON: Expecting value"),
        ('{"schema": 1, "sta', "not whole, or no JSON"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_run(file)


def test_of_fields_that_an_earlier_version_did_not_write_nothing_is_known(tmp_path: Path) -> None:
    whole = written(make_run_result(), tmp_path)
    old = {key: whole[key] for key in ("schema", "status", "label", "config", "environment")}
    file = tmp_path / "run.json"
    file.write_text(json.dumps({**old, "parallel": "none"}))
    found = read_run(file)
    assert found.keys() == whole.keys() - {"config_hash"}  # which is made from the config
    assert (found["comm"], found["repeat"], found["injected"]) == (None, 0, [])


@pytest.mark.parametrize("metric", [None, {"name": "accuracy", "value": 0.8, "samples": 5}])
def test_what_a_rank_reports_survives_json(metric: dict[str, Any] | None) -> None:
    result = make_rank_result(metric=metric, shapes=(make_shape(),), notes=("a note",))
    assert rank_result_from(json.loads(json.dumps(asdict(result)))) == result
