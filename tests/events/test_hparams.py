"""A run as a row of the HParams tab."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from builders import make_run_result
from tensorboard.plugins.hparams.metadata import (
    parse_experiment_plugin_data,
    parse_session_start_info_plugin_data,
)

from dpexp.events.hparams import FIRST, hparams_row, hyperparameters, overrides_of
from dpexp.records import RunResult


def test_the_columns_are_the_same_for_every_strategy_and_can_be_overlooked() -> None:
    columns = [list(hyperparameters(make_run_result(s, 1), [])) for s in ("none", "dp", "ddp")]
    assert columns[0] == columns[1] == columns[2]
    assert set(FIRST) < set(columns[0])
    assert len(columns[0]) <= 30


def test_values_are_those_of_config_and_plan() -> None:
    row = hyperparameters(make_run_result("dp", 3), ["+experiment=digits", "parallel=dp"])
    assert (row["parallel"], row["num_devices"], row["batch_size_global"]) == ("dp", 3, 30)
    assert (row["status"], row["emulated"], row["overrides"]) == ("ok", True, "+experiment=digits")
    assert row["model"] == "linear in_features=5 out_features=2"
    assert (row["optimizer.lr"], row["steps"], row["prepare.compile"]) == (0.01, "null", False)


def test_what_is_not_known_of_a_refused_run_is_left_out() -> None:
    row = hyperparameters(RunResult("skipped", "none-n2", {"seed": 3}, {}, "none"), [])
    assert (row["status"], row["parallel"], row["seed"]) == ("skipped", "none", 3)
    assert not {"num_devices", "batch_size_global", "num_processes", "device", "cores"} & set(row)


def test_a_run_with_figures_lists_the_columns_and_says_which_come_first() -> None:
    row = hyperparameters(make_run_result("ddp", 2), [])
    experiment, start, _ = hparams_row(row, "ok", ["summary/samples_per_s"])
    listed = parse_experiment_plugin_data(experiment.value[0].metadata.plugin_data.content)
    assert [info.name for info in listed.hparam_infos] == list(row)
    assert {info.name for info in listed.hparam_infos if info.differs} == set(FIRST)
    assert [info.name.tag for info in listed.metric_infos] == ["summary/samples_per_s"]
    held = parse_session_start_info_plugin_data(start.value[0].metadata.plugin_data.content)
    assert set(held.hparams) == set(row)


def test_a_run_without_figures_lists_no_columns() -> None:
    assert len(hparams_row({"status": "failed"}, "failed", [])) == 2


@pytest.mark.parametrize("typed", [None, ["seed=1", "optimizer.lr=0.1,0.2"]])
def test_in_a_sweep_what_varies_comes_first(tmp_path: Path, typed: list[str] | None) -> None:
    record = tmp_path / "0_none_n1/.hydra"
    record.mkdir(parents=True)
    (record / "overrides.yaml").write_text("- seed=1\n- optimizer.lr=0.1\n")
    if typed is not None:
        lines = "".join(f"    - {text}\n" for text in typed)
        (tmp_path / "multirun.yaml").write_text(f"hydra:\n  overrides:\n    task:\n{lines}")
    expected = ["seed=1", "optimizer.lr=0.1"]
    assert overrides_of(record.parent) == (expected if typed is None else expected[::-1])
    assert overrides_of(tmp_path) == []


def test_a_model_of_the_users_is_told_in_one_line() -> None:
    result = make_run_result()
    model = {"_target_": "mine.Net", "widths": [8, 2], "name": None}
    changed = replace(result, config={**result.config, "model": model, "optimizer": None})
    row = hyperparameters(changed, [])
    assert (row["model"], row["optimizer"]) == ("Net widths=[8, 2] name=null", "null")
    assert row["optimizer.lr"] == "null"
