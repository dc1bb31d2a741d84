"""Building the user's objects from `_target_` nodes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from dpexp.build import UserCodeError, build, build_callable, build_model, hidden_modules
from dpexp.datasets import Rows
from dpexp.errors import ConfigError

CPU = torch.device("cpu")


class Net(nn.Module):
    """A user's model."""

    def __init__(self, hidden: int, options: Any = None) -> None:
        super().__init__()
        self.options = options
        self.layer = nn.Linear(5, hidden)


class Touchy(nn.Module):
    """Its constructor raises `error`, or a TypeError deep inside."""

    def __init__(self, error: str) -> None:
        super().__init__()
        if error == "TypeError":
            nn.Linear("five", 2)  # type: ignore[arg-type]
        if error == "ConfigError":
            raise ConfigError("model.error", error, "is not allowed")
        if error == "StopIteration":
            next(iter(()))
        raise RuntimeError("disk is full")


class Hiding(nn.Module):
    """Modules and parameters in places where torch does not look."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = [nn.Linear(2, 2)]
        self.heads = {"a": nn.Linear(2, 2)}
        self.scales = (1.0, nn.Parameter(torch.zeros(1)))
        self.sizes = [3, 4]
        self.names = {"a": "b"}
        self.seen = nn.ModuleList([nn.Linear(2, 2)])


@pytest.fixture(scope="module", autouse=True)
def optimizers_are_imported() -> None:
    """The first optimizer of a process imports torch's compiler, which sets a variable."""
    torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)


def node(name: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": f"{__name__}.{name}", **arguments}


def refusal(target: dict[str, Any], key: str = "model") -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        build(key, target)
    return caught.value


def test_a_target_is_built_with_its_arguments() -> None:
    built = build("model", node("Net", hidden=3))
    assert isinstance(built, Net)
    assert built.layer.out_features == 3


def test_lists_and_dicts_arrive_as_plain_ones() -> None:
    built = build("model", node("Net", hidden=3, options={"betas": [0.9, 0.999]}))
    assert type(built.options) is dict
    assert type(built.options["betas"]) is list


def test_a_target_inside_of_a_target_is_built_too() -> None:
    built = build("model", node("Net", hidden=3, options={"_target_": "torch.nn.ReLU"}))
    assert isinstance(built.options, nn.ReLU)


def test_a_built_in_dataset_is_built() -> None:
    arguments = {"rows": 7, "features": 5, "targets": 2, "seed": 0}
    built = build("dataset", {"_target_": "dpexp.datasets.random_rows", **arguments})
    assert isinstance(built, Rows)
    assert len(built) == 7


@pytest.mark.parametrize(
    ("target", "cause"),
    [
        ("nomodule_of_this_name.Net", "No module named 'nomodule_of_this_name'"),
        (f"{__name__}.Nett", "Nett"),
        ("torch.nn.NoLayer", "NoLayer"),
        ("Net", "Net"),
    ],
)
def test_a_name_that_cannot_be_imported_is_refused_with_key_target_and_cause(
    target: str, cause: str
) -> None:
    error = refusal({"_target_": target}, key="dataset")
    assert (error.key, error.value) == ("dataset._target_", target)
    assert "cannot be imported" in str(error)
    assert cause in error.problem


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        ({"hiden": 3}, "unexpected keyword argument 'hiden'"),
        ({}, "missing 1 required positional argument: 'hidden'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_key_target_and_cause(
    arguments: dict[str, Any], cause: str
) -> None:
    error = refusal(node("Net", **arguments))
    assert (error.key, error.value) == ("model", f"{__name__}.Net")
    assert "does not take these arguments" in str(error)
    assert cause in str(error)


@pytest.mark.parametrize(
    ("error", "text"),
    [("RuntimeError", "disk is full"), ("TypeError", "TypeError: "), ("StopIteration", "StopIt")],
)
def test_a_constructor_that_raises_is_the_users_code_and_keeps_the_cause(
    error: str, text: str
) -> None:
    with pytest.raises(UserCodeError, match=text) as caught:
        build("model", node("Touchy", error=error))
    assert f"model._target_={__name__}.Touchy raised {error}" in str(caught.value)
    assert type(caught.value.__cause__).__name__ == error


def test_a_refusal_by_a_constructor_stays_what_it_is() -> None:
    error = refusal(node("Touchy", error="ConfigError"))
    assert str(error) == "model.error='ConfigError': is not allowed."


def test_a_model_is_put_on_the_device() -> None:
    model = build_model(node("Net", hidden=3), torch.device("meta"))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert model.training


def test_a_target_that_gives_no_module_is_refused_by_what_it_gives() -> None:
    with pytest.raises(ConfigError, match="gives a Tensor, not a torch module") as caught:
        build_model({"_target_": "torch.zeros", "_args_": [2]}, CPU)
    assert caught.value.value == "torch.zeros"


def test_hidden_modules_are_found_by_name_at_any_depth() -> None:
    assert hidden_modules(nn.Sequential(nn.ReLU(), Hiding())) == [
        "1.branches",
        "1.heads",
        "1.scales",
    ]


def test_a_model_that_hides_modules_is_warned_about() -> None:
    with pytest.warns(UserWarning) as caught:
        build_model(node("Hiding"), CPU)
    names = [str(warning.message).split()[1] for warning in caught]
    assert names == ["branches", "heads", "scales"]


def test_a_model_that_hides_nothing_is_not_warned_about() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_model(node("Net", hidden=3), CPU)


def distance(output: Any, target: Any, power: int = 1) -> Any:
    return (output - target) ** power


class Distance:
    """The same as an object."""

    def __init__(self, power: int = 1) -> None:
        self.power = power

    def __call__(self, output: Any, target: Any) -> Any:
        return distance(output, target, self.power)


class Average:
    """Is updated instead of called."""

    def update(self, output: Any, target: Any) -> None:
        self.last = output - target

    def compute(self) -> float:
        return 0.0


@pytest.mark.parametrize("name", ["distance", "Distance"])
def test_what_is_called_may_be_a_function_with_arguments_or_an_object(name: str) -> None:
    assert build_callable("loss", node(name, power=2))(5, 3) == 4


def test_an_object_that_is_updated_need_not_be_called() -> None:
    assert isinstance(build_callable("metric", node("Average")), Average)


@pytest.mark.parametrize(("name", "what"), [("Hidden", "Hidden"), ("NOTHING", "")])
def test_what_can_be_neither_is_refused(name: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_callable("metric", node(name))
    assert caught.value.key == "metric._target_"
    assert what in str(caught.value)


class Hidden:
    """An object that can be neither called nor updated."""
