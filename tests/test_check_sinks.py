"""Sinks that are refused before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from builders import composed

from dpexp import compose
from dpexp.builtin import BUILTIN_ARGUMENTS, GROUPS
from dpexp.check_sinks import check_sinks
from dpexp.compose import config_folder
from dpexp.config import load
from dpexp.errors import ConfigError

MLFLOW = {
    "_target_": "dpexp.sinks.MlflowSink",
    "tracking_uri": "sqlite:///a.db",
    "experiment": "e",
}
WANDB = {"_target_": "dpexp.sinks.WandbSink", "project": "p", "entity": None, "mode": "offline"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if MLflow and wandb were there."""
    monkeypatch.setattr("dpexp.extras._is_there", lambda package, own: True)


def refusal(node: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check_sinks({"x": node})
    return caught.value


@pytest.mark.parametrize(
    "uri",
    [
        "sqlite:///outputs/mlflow.db",
        "http://127.0.0.1:5000",
        "https://me@here.example",
        "databricks",
        None,
    ],
)
def test_stores_of_mlflow_are_accepted(installed: None, uri: str | None) -> None:
    check_sinks({"mlflow": {**MLFLOW, "tracking_uri": uri}, "wandb": WANDB})


@pytest.mark.parametrize("uri", ["outputs/mlruns", "./mlruns", "file:///data/mlruns"])
def test_a_folder_as_a_store_is_refused(installed: None, uri: str) -> None:
    error = refusal({**MLFLOW, "tracking_uri": uri})
    assert (error.key, error.value) == ("sinks.x.tracking_uri", uri)
    assert "sqlite" in error.fix


def test_a_password_is_refused_and_not_shown(installed: None) -> None:
    error = refusal({**MLFLOW, "tracking_uri": "postgresql://me:geheim@db.example/runs"})
    assert "postgresql://me:***@db.example/runs" in str(error)
    assert "geheim" not in str(error)
    assert "MLFLOW_TRACKING_URI" in error.fix


def test_a_mode_that_is_none_is_refused(installed: None) -> None:
    error = refusal({**WANDB, "mode": "shared"})
    assert (error.key, error.allowed) == ("sinks.x.mode", "offline, online")


@pytest.mark.parametrize(
    ("node", "key"),
    [
        ({**MLFLOW, "projekt": 1}, "sinks.x.projekt"),
        ({**MLFLOW, "experiment": ""}, "sinks.x.experiment"),
        ({k: v for k, v in WANDB.items() if k != "mode"}, "sinks.x.mode"),
        ({"_target_": "dpexp.sinks.CsvSink"}, "sinks.x._target_"),
    ],
)
def test_other_arguments_are_refused(installed: None, node: dict[str, Any], key: str) -> None:
    assert refusal(node).key == key


def test_arguments_of_a_users_own_sink_are_not_judged() -> None:
    check_sinks({"mine": {"_target_": "mine.Sink", "mode": "", "projekt": 1}})


@pytest.mark.parametrize("package", ["mlflow", "wandb"])
def test_a_package_that_is_missing_is_told_with_its_extra(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpexp.extras._is_there", lambda package, own: False)
    node = {"mlflow": MLFLOW, "wandb": WANDB}[package]
    assert refusal(node).fix == f'pip install "dpexp[{package}]"'


# The group


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("none", []),
        ("mlflow", ["mlflow"]),
        ("[mlflow,wandb]", ["mlflow", "wandb"]),
        ("[none,wandb]", ["wandb"]),
    ],
)
def test_the_group_takes_one_option_or_several(choice: str, names: list[str]) -> None:
    compose.refuse_bad_choices([f"sinks={choice}"])
    assert list(load(compose.composed([f"sinks={choice}"])).sinks) == names


def test_a_sink_of_the_users_may_stand_beside_others() -> None:
    overrides = ["sinks=wandb", "+sinks.mine._target_=mine.Sink", "+sinks.mine.a=1"]
    sinks = load(compose.composed(overrides)).sinks
    assert sinks["mine"] == {"_target_": "mine.Sink", "a": 1}
    assert list(sinks) == ["wandb", "mine"]


@pytest.mark.parametrize("value", ["[]", "null", "", "none,[]", "{a: 1}", "3"])
def test_no_choice_is_refused_with_the_options(value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose.refuse_bad_choices([f"sinks={value}"])
    assert caught.value.allowed == "custom, mlflow, none, wandb"


def test_an_option_that_is_not_there_is_refused_also_in_brackets() -> None:
    with pytest.raises(ConfigError) as caught:
        compose.composed(["sinks=[mlflow,wandd]"])
    assert (caught.value.key, caught.value.value) == ("sinks", "wandd")
    assert caught.value.fix == "sinks=wandb"


def test_a_key_of_a_sink_that_is_not_chosen_names_the_choice() -> None:
    with pytest.raises(ConfigError) as caught:
        compose.composed(["sinks.mlflow.experiment=x"])
    assert caught.value.fix.startswith("sinks=mlflow;")


@pytest.mark.parametrize(
    ("sinks", "key"),
    [
        ({"x": 3}, "sinks.x"),
        ({"x": {"a": 1}}, "sinks.x._target_"),
        ({"x": {**WANDB, "project": 3}}, "sinks.x.project"),
    ],
)
def test_a_node_without_a_target_or_with_a_wrong_type_is_refused(
    sinks: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(composed(changes={"sinks": sinks}))
    assert caught.value.key == key


def test_the_options_in_conf_have_one_node_of_their_name_with_typed_arguments() -> None:
    for option in set(GROUPS["sinks"]) - {"none", "custom"}:
        file = config_folder() / "sinks" / f"{option}.yaml"
        (name, node), *rest = yaml.safe_load(file.read_text(encoding="utf-8")).items()
        assert (name, rest) == (option, [])
        assert list(node)[1:] == list(BUILTIN_ARGUMENTS[node["_target_"]])
