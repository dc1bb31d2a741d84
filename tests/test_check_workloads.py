"""What of task, model, loader, batch and strategies contradicts itself whatever the hardware."""

from __future__ import annotations

from typing import Any

import pytest
from builders import make_config

from dpexp.check import check
from dpexp.errors import ConfigError
from dpexp.schema import OPTIONS, CommHook, StrategyName, Task
from dpexp.schema_workload import CompileMode, Preload

TRAIN = {"task": Task.train}


def refusal(strategy: str = "none", **overrides: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check(make_config(strategy, **overrides))
    return caught.value


def accepted(strategy: str = "none", **overrides: Any) -> None:
    check(make_config(strategy, **overrides))


# Numbers


@pytest.mark.parametrize("size", [1, 10**9, "auto"])
def test_a_batch_size_is_a_number_or_auto(size: Any) -> None:
    accepted(batch_size=size)


@pytest.mark.parametrize("size", ["many", "", "AUTO", "32", 30.0, None, True])
def test_another_value_for_the_batch_size_is_refused(size: Any) -> None:
    error = refusal(batch_size=size)
    assert (error.key, error.value) == ("batch_size", size)
    assert error.allowed == "auto, or a whole number of at least 1"


@pytest.mark.parametrize(
    ("key", "overrides", "fix"),
    [
        ("clip_grad_norm", lambda x: {**TRAIN, "clip_grad_norm": x}, "1"),
        ("loader.timeout_s", lambda x: {"loader": {"timeout_s": x}}, "300"),
        (
            "process_memory_mib",
            lambda x: {"process_memory_mib": x},
            "2000",
        ),
    ],
)
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_number_that_must_be_above_zero_and_finite(
    key: str, overrides: Any, fix: str, value: float
) -> None:
    error = refusal(**overrides(value))
    assert (error.key, error.fix) == (key, f"{key}={fix}")
    accepted(**overrides(0.5))


# Tasks


@pytest.mark.parametrize("task", [Task.forward, Task.evaluate])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("accumulate", 2),
        ("clip_grad_norm", 1.0),
        ("lr_scheduler", "cosine"),
        ("lr_scheduler", {"_target_": "m.S"}),
    ],
)
def test_what_only_training_has_is_refused_elsewhere(task: Task, key: str, value: Any) -> None:
    error = refusal(task=task, **{key: value})
    assert (error.key, error.value, error.fix) == (key, value, "task=train")
    assert "is for training only" in str(error)
    accepted(task=Task.train, **{key: value})


@pytest.mark.parametrize("task", [Task.forward, Task.evaluate])
def test_parity_is_of_training_steps(task: Task) -> None:
    error = refusal(task=task, check={"parity": True})
    assert (error.key, error.value, error.fix) == ("check.parity", True, "task=train")
    for unasked in (None, False):
        accepted(task=task, check={"parity": unasked})
    accepted(**TRAIN, check={"parity": True})


@pytest.mark.parametrize("task", [Task.forward, Task.train])
@pytest.mark.parametrize("metric", ["accuracy", {"_target_": "m.f"}])
def test_a_metric_is_refused_where_nothing_is_evaluated(task: Task, metric: Any) -> None:
    error = refusal(task=task, metric=metric)
    assert (error.key, error.value, error.fix) == ("metric", metric, "task=evaluate")
    assert "is for evaluation only" in str(error)
    accepted(task=Task.evaluate, metric=metric)


def test_the_optimizers_state_is_spread_only_where_there_is_an_optimizer() -> None:
    assert refusal("ddp", parallel={"zero": True}).key == "parallel.zero"
    accepted("ddp", task=Task.train, parallel={"zero": True})


def test_an_evaluation_takes_every_sample_and_takes_it_once() -> None:
    evaluate = {"task": Task.evaluate}
    assert refusal(**evaluate, drop_last=True).key == "drop_last"
    for epochs in (2, None):
        error = refusal(**evaluate, epochs=epochs, steps=5)
        assert (error.key, error.value, error.fix) == ("epochs", epochs, "epochs=1")
    accepted(**evaluate)
    accepted(**evaluate, steps=5)


def test_whole_batches_cannot_be_printed_when_they_are_cut() -> None:
    error = refusal(**TRAIN, accumulate=2, shapes={"print": True})
    assert error.key == "shapes.print"
    assert error.fix.startswith("accumulate=1")
    accepted(**TRAIN, accumulate=2, shapes={"depth": 1})


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("metric", "auto, accuracy, mse, l1, cross_entropy, output"),
        ("lr_scheduler", "none, cosine, linear"),
    ],
)
@pytest.mark.parametrize("value", ["best", "", None, 3, ["mse"], {}, {"_target_": 3}, {"a": 1}])
def test_what_is_neither_a_name_nor_a_target_is_refused_with_the_names(
    key: str, names: str, value: Any
) -> None:
    error = refusal(task=Task.train, **{key: value})
    assert (error.key, error.value) == (key, value)
    assert error.allowed == f"{names}, or a node with a _target_"


@pytest.mark.parametrize(
    "metric", ["auto", "accuracy", "mse", "l1", "cross_entropy", "output", {"_target_": "m.f"}]
)
def test_a_metric_is_accepted(metric: Any) -> None:
    accepted(task=Task.evaluate, metric=metric)


# Model and loader


@pytest.mark.parametrize("strategy", ["none", "ddp", "fsdp"])
def test_a_model_can_be_compiled_except_under_dp(strategy: str) -> None:
    accepted(strategy, prepare={"compile": True, "compile_mode": CompileMode.max_autotune})
    error = refusal("dp", prepare={"compile": True})
    assert error.key == "prepare.compile"
    assert "parallel=ddp" in error.fix


def test_a_mode_of_compilation_needs_compilation() -> None:
    error = refusal(prepare={"compile_mode": CompileMode.reduce_overhead})
    assert (error.key, error.value) == ("prepare.compile_mode", "reduce-overhead")
    assert error.fix == "prepare.compile=true"


def test_a_preloaded_dataset_has_no_use_for_loader_processes() -> None:
    error = refusal(loader={"preload": Preload.device, "workers": 2})
    assert error.key == "loader.preload"
    assert "loader.workers=2" in str(error)
    accepted(loader={"preload": Preload.device})
    accepted(loader={"workers": 2})


# Entries of a batch


@pytest.mark.parametrize(
    "inputs",
    ["auto", 0, -1, "image.pixels", [0], [0, "x"], {"tokens": 0, "labels": "y"}],
)
def test_inputs_are_entries_of_a_batch(inputs: Any) -> None:
    accepted(batch={"inputs": inputs})


@pytest.mark.parametrize(
    "inputs", [None, "", [], {}, 1.0, True, [None], [[0]], {"x": None}, {"x": [0]}]
)
def test_what_names_no_entries_is_refused(inputs: Any) -> None:
    error = refusal(batch={"inputs": inputs})
    assert (error.key, error.value, error.fix) == ("batch.inputs", inputs, "batch.inputs=auto")


@pytest.mark.parametrize("target", ["auto", "none", None, 0, -1, "y", "y.box"])
def test_a_target_is_one_entry_or_none(target: Any) -> None:
    accepted(batch={"target": target})


@pytest.mark.parametrize("target", ["", [0], {}, 1.0, False])
def test_what_names_no_entry_is_no_target(target: Any) -> None:
    error = refusal(batch={"target": target})
    assert (error.key, error.value, error.fix) == ("batch.target", target, "batch.target=auto")


# Options of strategies

VALUES: dict[str, Any] = {
    "find_unused_parameters": False,
    "static_graph": True,
    "gradient_as_bucket_view": True,
    "broadcast_buffers": True,
    "bucket_cap_mb": 25.0,
    "comm_hook": CommHook.powersgd,
    "powersgd_rank": 2,
    "powersgd_start": 5,
    "zero": True,
    "wrap": "blocks",
    "reshard_after_forward": False,
}
ONLY_DDP = [key for key in OPTIONS[StrategyName.ddp] if key != "backend"]
ONLY_FSDP = [key for key in OPTIONS[StrategyName.fsdp] if key != "backend"]


@pytest.mark.parametrize(
    ("key", "owner", "strategy"),
    [
        *((key, "ddp", strategy) for key in ONLY_DDP for strategy in ("none", "dp", "fsdp")),
        *((key, "fsdp", strategy) for key in ONLY_FSDP for strategy in ("none", "dp", "ddp")),
    ],
)
def test_an_option_of_one_strategy_is_refused_under_the_others(
    key: str, owner: str, strategy: str
) -> None:
    error = refusal(strategy, **TRAIN, parallel={key: VALUES[key]})
    assert (error.key, error.value) == (f"parallel.{key}", VALUES[key])
    assert f"is an option of {owner}, not of {strategy}" in str(error)
    assert error.fix == f"parallel={owner}"
    accepted(owner, **TRAIN, parallel={key: VALUES[key]})


@pytest.mark.parametrize(
    ("strategy", "key"),
    [(name.value, key) for name, keys in OPTIONS.items() for key in keys],
)
def test_a_strategy_needs_a_value_for_each_of_its_options(strategy: str, key: str) -> None:
    error = refusal(strategy, parallel={key: None})
    assert (error.key, error.fix) == (f"parallel.{key}", f"parallel={strategy}")
    assert f"{strategy} needs a value" in str(error)


@pytest.mark.parametrize(
    ("key", "least", "fix"), [("powersgd_rank", 1, "=1"), ("powersgd_start", 2, "=2")]
)
def test_powersgd_has_least_values(key: str, least: int, fix: str) -> None:
    error = refusal("ddp", parallel={key: least - 1})
    assert (error.key, error.allowed) == (f"parallel.{key}", f"{least} or more")
    assert error.fix == f"parallel.{key}{fix}"
    accepted("ddp", task=Task.train, parallel={key: least, "comm_hook": CommHook.powersgd})


@pytest.mark.parametrize("wrap", ["blocks", "model", ["Block"], ["Block", "Head"], 1, 10**6])
def test_a_way_to_wrap_is_accepted(wrap: Any) -> None:
    accepted("fsdp", parallel={"wrap": wrap})


@pytest.mark.parametrize("wrap", ["Block", "", [], [3], ["Block", None], 0, -1, 1.5, True, {}])
def test_what_is_no_way_to_wrap_is_refused_with_the_ways(wrap: Any) -> None:
    error = refusal("fsdp", parallel={"wrap": wrap})
    assert (error.key, error.value) == ("parallel.wrap", wrap)
    assert error.allowed == "blocks, model, a list of class names, or a number of parameters"
