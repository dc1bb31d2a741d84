"""What is wrong with a config whatever the hardware."""

from __future__ import annotations

from typing import Any

import pytest
from builders import make_config

from dpexp.check import check
from dpexp.errors import ConfigError, SkippedCellError
from dpexp.schema import Backend, Task


def refusal(strategy: str = "none", *, in_sweep: bool = False, **overrides: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check(make_config(strategy, **overrides), in_sweep=in_sweep)
    return caught.value


def test_none_on_four_devices_is_an_error_in_a_single_run() -> None:
    error = refusal(num_devices=4)
    assert not isinstance(error, SkippedCellError)
    assert (error.key, error.value) == ("num_devices", 4)
    assert "parallel=dp" in error.fix


def test_none_on_four_devices_is_skipped_in_a_sweep() -> None:
    assert isinstance(refusal(num_devices=4, in_sweep=True), SkippedCellError)


def test_a_mistake_is_not_skipped_in_a_sweep() -> None:
    assert not isinstance(refusal("dp", batch_size=0, in_sweep=True), SkippedCellError)


@pytest.mark.parametrize("strategy", ["none", "dp", "ddp", "fsdp"])
def test_the_default_config_is_accepted(strategy: str) -> None:
    check(make_config(strategy))


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:12", "mps", "xpu"])
def test_a_device_string_is_accepted(device: str) -> None:
    check(make_config(device=device))


@pytest.mark.parametrize(
    "device",
    [
        "cuda: 0",
        "cuda:-1",
        "cuda:00",
        " cpu",
        "cpu ",
        "cpu\n",
        "0",
        "cuda:0,1",
        "cuda:None",
        "cuda:cuda:0",
        "",
        "CUDA:0",
        "cpu:99",
        0,
        None,
    ],
)
def test_a_string_that_is_no_device_is_quoted_with_the_valid_forms(device: Any) -> None:
    error = refusal(device=device)
    assert error.key == "device"
    assert ("null" if device is None else repr(device)) in str(error)
    assert "auto, cpu, cuda, cuda:<i>, mps, xpu" in str(error)


@pytest.mark.parametrize(
    ("device", "fix"),
    [("cuda: 0", "device=cuda:0"), ("CPU", "device=cpu"), ("gpu", "device=auto")],
)
def test_the_suggested_device_is_the_meant_one_where_it_can_be_told(device: str, fix: str) -> None:
    assert refusal(device=device).fix == fix


@pytest.mark.parametrize("count", ["auto", 1, 1024])
def test_a_number_of_devices_is_accepted(count: Any) -> None:
    check(make_config("dp", num_devices=count))


@pytest.mark.parametrize("count", ["two", "2", 0, -1, 1025, 1.0, True, None, [1, 2]])
def test_what_is_no_number_of_devices_is_refused_by_its_key(count: Any) -> None:
    error = refusal("dp", num_devices=count)
    assert (error.key, error.value) == ("num_devices", count)
    assert error.allowed == "auto, or a whole number from 1 to 1024"


@pytest.mark.parametrize(
    ("key", "overrides", "allowed", "fix"),
    [
        ("batch_size", {"batch_size": 0}, "1 or more", "batch_size=1"),
        ("epochs", {"epochs": 0}, "1 or more", "epochs=1"),
        ("warmup_steps", {"warmup_steps": -1}, "0 or more", "warmup_steps=1"),
        ("seed", {"seed": -1}, "0 or more", "seed=1"),
        ("repeats", {"repeats": 0}, "1 or more", "repeats=1"),
        ("repeat", {"repeat": -1}, "0 or more", "repeat=1"),
        ("check.steps", {"check": {"steps": 0}}, "1 or more", "check.steps=1"),
        (
            "measure.calibration_pairs",
            {"measure": {"calibration_pairs": -1}},
            "0 or more",
            "measure.calibration_pairs=1",
        ),
        ("inject.at_step", {"inject": {"at_step": -1}}, "0 or more", "inject.at_step=1"),
        ("loader.workers", {"loader": {"workers": -1}}, "0 or more", "loader.workers=1"),
        ("shapes.depth", {"shapes": {"depth": -1}}, "0 or more", "shapes.depth=1"),
        ("accumulate", {"task": Task.train, "accumulate": 0}, "1 or more", "accumulate=1"),
        ("loader.prefetch", {"loader": {"prefetch": 0}}, "1 or more", "loader.prefetch=1"),
    ],
)
def test_a_number_below_its_least_is_refused_with_the_least(
    key: str, overrides: dict[str, Any], allowed: str, fix: str
) -> None:
    error = refusal(**overrides)
    assert (error.key, error.allowed, error.fix) == (key, allowed, fix)


@pytest.mark.parametrize("steps", [0, -3])
def test_no_steps_are_refused_as_nothing_to_do(steps: int) -> None:
    error = refusal(steps=steps)
    assert error.key == "steps"
    assert f"nothing would be left to do: {steps} steps" in str(error)


def test_epochs_and_steps_both_null_would_never_end() -> None:
    assert "epochs and steps are both null" in str(refusal(epochs=None, steps=None))


@pytest.mark.parametrize(("epochs", "steps"), [(None, 5), (3, None), (3, 5)])
def test_one_of_epochs_and_steps_is_enough(epochs: int | None, steps: int | None) -> None:
    check(make_config(epochs=epochs, steps=steps))


def test_a_single_run_is_not_repeated_and_a_cell_of_a_sweep_is() -> None:
    error = refusal(repeats=3)
    assert (error.key, error.value) == ("repeats", 3)
    assert "-m" in error.fix
    check(make_config(repeats=3), in_sweep=True)
    check(make_config(repeat=3))


def test_with_until_ci_neither_epochs_nor_steps_are_needed() -> None:
    check(make_config(epochs=None, steps=None, until={"ci": 0.02}))


@pytest.mark.parametrize("ci", [1.0, 2.0])
def test_an_interval_as_wide_as_the_mean_is_no_aim(ci: float) -> None:
    assert refusal(until={"ci": ci}).key == "until.ci"


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_schedule_that_ends_at_the_last_step_needs_to_know_it(schedule: str) -> None:
    error = refusal(task=Task.train, lr_scheduler=schedule, until={"ci": 0.02})
    assert (error.key, error.value) == ("lr_scheduler", schedule)
    assert "until.ci=0.02" in error.problem
    node = {"_target_": "torch.optim.lr_scheduler.ExponentialLR", "gamma": 0.9}
    check(make_config(task=Task.train, lr_scheduler=node, until={"ci": 0.02}))


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 604800.0])
def test_what_is_no_time_out_is_refused(seconds: float) -> None:
    assert refusal("ddp", parallel={"timeout_s": seconds}).key == "parallel.timeout_s"


@pytest.mark.parametrize("size", [0.0, -1.0, float("nan")])
def test_a_bucket_needs_a_positive_size(size: float) -> None:
    assert refusal("ddp", parallel={"bucket_cap_mb": size}).key == "parallel.bucket_cap_mb"


def test_a_bucket_may_be_smaller_than_a_mebibyte() -> None:
    check(make_config("ddp", parallel={"bucket_cap_mb": 0.5}))


@pytest.mark.parametrize("option", ["backend", "bucket_cap_mb", "static_graph"])
def test_ddp_needs_a_value_for_each_of_its_options(option: str) -> None:
    error = refusal("ddp", parallel={option: None})
    assert error.key == f"parallel.{option}"
    assert "ddp needs a value" in str(error)


@pytest.mark.parametrize("strategy", ["none", "dp"])
@pytest.mark.parametrize(
    ("option", "value"),
    [("backend", Backend.gloo), ("bucket_cap_mb", 25.0), ("broadcast_buffers", False)],
)
def test_an_option_of_ddp_is_refused_elsewhere(strategy: str, option: str, value: Any) -> None:
    error = refusal(strategy, parallel={option: value})
    assert error.key == f"parallel.{option}"
    assert f"is an option of ddp, not of {strategy}" in str(error)


@pytest.mark.parametrize(
    "loss", ["auto", "mse", "l1", "bce_with_logits", "output", {"_target_": "torch.nn.L1Loss"}]
)
def test_a_loss_is_accepted(loss: Any) -> None:
    check(make_config(loss=loss))


@pytest.mark.parametrize("loss", ["MSE", "", None, 3, ["mse"], {}, {"_target_": None}, {"a": 1}])
def test_what_is_no_loss_is_refused_with_the_names(loss: Any) -> None:
    error = refusal(loss=loss)
    assert (error.key, error.value) == ("loss", loss)
    assert "auto, mse, l1, bce_with_logits, cross_entropy, output" in error.allowed
