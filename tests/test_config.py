"""From a composed config to plain, typed data."""

from __future__ import annotations

import json
import pickle
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
import yaml
from builders import composed, make_config
from omegaconf import OmegaConf

from dpexp.builtin import BUILTIN_ARGUMENTS, GROUPS
from dpexp.compose import config_folder
from dpexp.config import load, to_plain
from dpexp.errors import ConfigError
from dpexp.schema import NESTED, Backend, CommHook, Config, Precision, Scaling, StrategyName, Task
from dpexp.schema_workload import CompileMode, Preload


def refusal(changes: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(composed(changes=changes))
    return caught.value


def test_the_default_config_is_loaded_with_its_types() -> None:
    config = load(composed())
    assert (config.task, config.scaling) == (Task.forward, Scaling.strong)
    assert config.parallel.strategy is StrategyName.none
    assert (config.parallel.timeout_s, type(config.parallel.timeout_s)) == (300.0, float)
    assert config.parallel.backend is None
    assert (config.epochs, config.steps, config.loader.workers) == (1, None, 0)
    assert config.dataset["seed"] == 0


def test_a_loaded_config_holds_no_omegaconf_and_can_be_pickled() -> None:
    config = load(composed(changes={"model.widths": [64, 10], "optimizer.betas": [0.9, 0.999]}))
    assert type(config.model) is dict
    assert type(config.model["widths"]) is list
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_loaded_config_is_frozen() -> None:
    config = load(composed())
    with pytest.raises(FrozenInstanceError):
        config.seed = 3  # type: ignore[misc]


def test_loading_does_not_change_the_composed_config() -> None:
    source = composed(changes={"foo": 1})
    load(source)
    assert source == composed(changes={"foo": 1})


def test_unknown_top_level_keys_are_kept_as_extra() -> None:
    config = load(composed(changes={"foo": 1, "tags": {"a": [1, 2]}}))
    assert config.extra == {"foo": 1, "tags": {"a": [1, 2]}}


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("parallel.timeout_s", 6, 6.0),
        ("parallel.timeout_s", "6.5", 6.5),
        ("batch_size", "auto", "auto"),
        ("precision", "bf16", Precision.bf16),
        ("prepare.compile_mode", "reduce-overhead", CompileMode.reduce_overhead),
        ("loader.preload", None, Preload.none),
        ("loader.pin_memory", None, None),
        ("parallel.comm_hook", "none", CommHook.none),
        ("parallel.comm_hook", None, None),
        ("parallel.wrap", ["Block"], ["Block"]),
        ("clip_grad_norm", 1, 1.0),
        ("batch.inputs", {"x": 0}, {"x": 0}),
        ("batch.target", None, None),
        ("task", "train", Task.train),
        ("scaling", "weak", Scaling.weak),
        ("epochs", None, None),
        ("steps", 7, 7),
        ("shuffle", False, False),
        ("parallel.backend", "gloo", Backend.gloo),
        ("parallel.backend", None, None),
        ("parallel.strategy", None, StrategyName.none),  # what YAML makes of an unquoted null
        ("num_devices", 3, 3),
        ("loss", {"_target_": "m.L"}, {"_target_": "m.L"}),
    ],
)
def test_a_value_is_read_as_its_type(key: str, value: Any, read: Any) -> None:
    found: Any = load(composed(changes={key: value}))
    for part in key.split("."):
        found = getattr(found, part)
    assert (found, type(found)) == (read, type(read))


@pytest.mark.parametrize("lr", [1e-3, "1e-3"])
def test_a_learning_rate_written_as_text_becomes_a_number(lr: Any) -> None:
    value = load(composed(changes={"optimizer.lr": lr})).optimizer["lr"]
    assert (value, type(value)) == (0.001, float)


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("accumulate", "2", "a whole number"),
        ("clip_grad_norm", "much", "a number or null"),
        ("precision", "fp8", "fp32, tf32, bf16, fp16"),
        ("prepare.compile_mode", "fast", "default, reduce-overhead, max-autotune"),
        ("prepare.init_from", 3, "text or null"),
        ("loader.preload", "cpu", "none, device"),
        ("loader.pin_memory", "yes", "true or false or null"),
        ("loader.timeout_s", None, "a number"),
        ("parallel.comm_hook", "fp8", "none, fp16, bf16, powersgd or null"),
        ("process_memory_mib", "all", "a number or null"),
        ("seed", True, "a whole number"),
        ("steps", 2.5, "a whole number or null"),
        ("shuffle", "yes", "true or false"),
        ("drop_last", 1, "true or false"),
        ("task", "infer", "forward, train, evaluate"),
        ("task", None, "forward, train, evaluate"),
        ("scaling", "big", "strong, weak"),
        ("forward_kwargs", [1], "a node with keys"),
        ("parallel.strategy", "dpp", "none, dp, ddp, fsdp"),
        ("parallel.timeout_s", "long", "a number"),
        ("parallel.timeout_s", True, "a number"),
        ("parallel.backend", "mpi", "auto, gloo, nccl or null"),
        ("parallel.static_graph", "maybe", "true or false or null"),
        ("loader.workers", "2", "a whole number"),
        ("shapes.print", 1, "true or false"),
        ("optimizer.lr", "fast", "a number"),
        ("optimizer.lr", None, "a number"),
        ("dataset.rows", "100", "a whole number"),
        ("model.in_features", [5], "a whole number"),
    ],
)
def test_a_value_of_another_type_is_refused_by_key_value_and_what_is_allowed(
    key: str, value: Any, allowed: str
) -> None:
    error = refusal({key: value})
    assert error.key == key
    assert error.value == value
    assert error.allowed == allowed
    assert error.fix.startswith(f"{key}=")


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("task", "infer", "is none of the choices"),
        ("parallel.backend", "mpi", "is none of the choices"),
        ("task", None, "is of the wrong type"),
        ("steps", "many", "is of the wrong type"),
    ],
)
def test_a_word_that_is_no_choice_is_told_from_a_wrong_type(
    key: str, value: Any, problem: str
) -> None:
    assert refusal({key: value}).problem == problem


@pytest.mark.parametrize(
    ("target", "key", "value", "allowed"),
    [
        ("dpexp.models.mlp", "widths", [64, "x"], "like [8,16]"),
        ("dpexp.models.mlp", "widths", 64, "like [8,16]"),
        ("dpexp.models.cnn", "channels", [1.5], "like [8,16]"),
        ("dpexp.models.cnn", "classes", "ten", "a whole number"),
    ],
)
def test_arguments_of_built_in_targets_are_checked(
    target: str, key: str, value: Any, allowed: str
) -> None:
    error = refusal({"model": {"_target_": target, key: value}})
    assert error.key == f"model.{key}"
    assert error.allowed.endswith(allowed)


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("steps", 2.5, "steps=8"),
        ("shuffle", "yes", "shuffle=true"),
        ("task", "infer", "task=forward"),
        ("parallel.backend", "mpi", "parallel.backend=auto"),
        ("optimizer.lr", "fast", "optimizer.lr=0.1"),
        ("model.in_features", "five", "model.in_features=8"),
    ],
)
def test_the_advice_for_a_value_of_another_type_is_an_override_that_is_accepted(
    key: str, value: Any, fix: str
) -> None:
    assert refusal({key: value}).fix == fix
    accepted = OmegaConf.from_dotlist([fix])
    load(composed(changes={key: OmegaConf.select(accepted, key)}))


def test_arguments_of_a_users_own_target_are_not_checked() -> None:
    model = {"_target_": "mymodule.Net", "widths": "anything", "lr": "x"}
    assert load(composed(changes={"model": model})).model == model


@pytest.mark.parametrize("group", list(GROUPS))
@pytest.mark.parametrize("value", [None, "linear", 3])
def test_a_group_without_an_option_is_refused_with_the_options(group: str, value: Any) -> None:
    error = refusal({group: value})
    assert error.key == group
    assert error.allowed == ", ".join(GROUPS[group])


@pytest.mark.parametrize("group", ["dataset", "model", "optimizer"])
@pytest.mark.parametrize("target", [None, "", 3])
def test_a_group_without_a_target_is_refused(group: str, target: Any) -> None:
    assert refusal({f"{group}._target_": target}).key == f"{group}._target_"


@pytest.mark.parametrize("key", ["dataset._target_", "optimizer.lr", "batch_size"])
def test_a_missing_mandatory_value_is_named_by_its_full_key(key: str) -> None:
    error = refusal({key: "???"})
    assert error.key == key
    assert "must be given" in str(error)


@pytest.mark.parametrize("key", ["seed", "task", "shapes", "model"])
def test_a_removed_key_is_named(key: str) -> None:
    config = composed()
    del config[key]
    if key == "seed":
        config.dataset.seed = 0
    with pytest.raises(ConfigError) as caught:
        load(config)
    assert caught.value.key == key


def test_a_removed_key_of_a_node_is_named() -> None:
    config = composed()
    del config.loader["workers"]
    with pytest.raises(ConfigError, match=r"loader\.workers: the key is missing"):
        load(config)


def test_an_interpolation_to_nowhere_names_both_keys() -> None:
    error = refusal({"model.in_features": "${dataset.featuress}"})
    assert error.key == "model.in_features"
    assert error.value == "${dataset.featuress}"
    assert "dataset.featuress" in error.problem


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [("parallel.bucket_cap", "parallel.bucket_cap_mb=…"), ("loader.zzz", "leave out loader.zzz")],
)
def test_an_unknown_option_of_a_node_is_refused_with_a_suggestion(
    key: str, suggestion: str
) -> None:
    error = refusal({key: 1})
    assert (error.key, error.fix) == (key, suggestion)


def test_to_plain_gives_json_types_without_null_options() -> None:
    plain = to_plain(load(composed(changes={"foo": {"bar": 1}})))
    assert json.loads(json.dumps(plain)) == plain
    assert plain["parallel"] == {
        "strategy": "none",
        "timeout_s": 300.0,
        "ranks_from": "auto",
        "max_restarts": 0,
    }
    assert (plain["task"], plain["scaling"]) == ("forward", "strong")
    assert plain["steps"] is None
    assert plain["foo"] == {"bar": 1}
    assert "extra" not in plain


@pytest.mark.parametrize("strategy", ["none", "dp", "ddp", "fsdp"])
def test_a_config_written_as_plain_data_is_loaded_again(strategy: str) -> None:
    config = make_config(strategy, extra={"foo": 1})
    assert load(OmegaConf.create(to_plain(config))) == config


def test_every_key_of_the_schema_is_documented() -> None:
    nodes = [Config, *NESTED.values()]
    specs = [spec for node in nodes for spec in fields(node) if spec.name != "extra"]
    assert [spec.name for spec in specs if len(spec.metadata["doc"]) < 10] == []
    sections = {spec.name for spec in fields(Config) if not spec.metadata["section"]}
    assert sections == {"extra"}


def test_the_config_file_holds_exactly_the_keys_of_the_schema() -> None:
    file = yaml.safe_load((config_folder() / "config.yaml").read_text(encoding="utf-8"))
    keys = (file.keys() | GROUPS.keys()) - {"defaults", "hydra"}
    assert keys == {spec.name for spec in fields(Config)} - {"extra"}


@pytest.mark.parametrize("group", list(GROUPS))
def test_the_schema_lists_exactly_the_options_that_lie_in_conf(group: str) -> None:
    assert sorted(path.stem for path in (config_folder() / group).glob("*.yaml")) == list(
        GROUPS[group]
    )


def test_the_built_in_targets_of_conf_have_typed_arguments() -> None:
    for group in ("dataset", "model", "optimizer"):
        for file in (config_folder() / group).glob("*.yaml"):
            node = yaml.safe_load(file.read_text(encoding="utf-8"))
            target = node.pop("_target_")
            if target.startswith(("dpexp.", "torch.")):  # not those of other libraries
                assert node.keys() <= BUILTIN_ARGUMENTS[target].keys(), file
