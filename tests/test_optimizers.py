"""The optimizer and the schedule of its learning rate."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from dpexp.build import UserCodeError
from dpexp.errors import ConfigError
from dpexp.optimizers import build_lr_scheduler, build_optimizer


@pytest.fixture(scope="module", autouse=True)
def optimizers_are_imported() -> None:
    """The first optimizer of a process imports torch's compiler, which sets a variable."""
    torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)


def node(name: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": f"{__name__}.{name}", **arguments}


def sgd(lr: float = 0.1, zero: bool = False) -> torch.optim.Optimizer:
    return build_optimizer({"_target_": "torch.optim.SGD", "lr": lr}, nn.Linear(2, 2), zero=zero)


def test_the_optimizer_gets_the_trainable_parameters_only() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    optimizer = build_optimizer({"_target_": "torch.optim.SGD", "lr": 0.25}, model, zero=False)
    (group,) = optimizer.param_groups
    assert group["lr"] == 0.25
    assert [parameter.shape for parameter in group["params"]] == [(1, 3), (1,)]


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)])
def test_a_model_without_trainable_parameters_cannot_be_trained(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match="has no trainable parameter") as caught:
        build_optimizer({"_target_": "torch.optim.SGD", "lr": 0.1}, model, zero=False)
    assert (caught.value.key, caught.value.fix) == ("task", "task=forward")
    assert type(model).__name__ in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"lr": 0.1, "momentom": 0.9}, "unexpected keyword argument 'momentom'"),
    ],
)
def test_a_wrong_optimizer_argument_is_refused_with_the_cause(
    arguments: dict[str, Any], cause: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build_optimizer({"_target_": "torch.optim.SGD", **arguments}, nn.Linear(2, 2), zero=False)
    assert caught.value.key == "optimizer"
    assert cause in str(caught.value)


def refusing_optimizer(_parameters: Any, lr: float) -> torch.optim.Optimizer:
    raise ConfigError("optimizer.lr", lr, "is not allowed")


def test_a_refusal_by_an_optimizer_stays_what_it_is() -> None:
    with pytest.raises(ConfigError) as caught:
        build_optimizer(node("refusing_optimizer", lr=9.0), nn.Linear(2, 2), zero=False)
    assert str(caught.value) == "optimizer.lr=9.0: is not allowed."


def test_an_optimizer_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be imported") as caught:
        build_optimizer({"_target_": "torch.optim.SGDD"}, nn.Linear(2, 2), zero=False)
    assert caught.value.key == "optimizer._target_"


def test_the_state_of_what_is_no_optimizer_class_cannot_be_spread_over_ranks() -> None:
    with pytest.raises(ConfigError, match="needs an optimizer class") as caught:
        build_optimizer(node("refusing_optimizer", lr=9.0), nn.Linear(2, 2), zero=True)
    assert (caught.value.key, caught.value.value) == ("parallel.zero", True)


def rates(value: Any, steps: int | None, count: int, lr: float = 0.1) -> list[float]:
    """The learning rate of each step, and the one that a further step would have."""
    optimizer = sgd(lr)
    scheduler = build_lr_scheduler(value, optimizer, steps)
    assert scheduler is not None
    found = [optimizer.param_groups[0]["lr"]]
    for _ in range(count):
        optimizer.step()
        scheduler.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


def test_without_a_schedule_there_is_none() -> None:
    assert build_lr_scheduler("none", sgd(), 10) is None
    assert build_lr_scheduler("none", sgd(), None) is None


def test_linear_goes_down_evenly_to_zero_after_the_last_step() -> None:
    assert rates("linear", 4, 4, lr=0.4) == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.0], abs=1e-12)


def test_cosine_is_half_a_cosine_to_zero_after_the_last_step() -> None:
    # 0.1 * (1 + cos(pi * step / 4)) / 2
    half = math.sqrt(0.5)
    by_hand = [0.1, 0.05 * (1 + half), 0.05, 0.05 * (1 - half), 0.0]
    assert rates("cosine", 4, 4) == pytest.approx(by_hand, abs=1e-12)


@pytest.mark.parametrize("steps", [1, 3, 7])
@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_only_after_the_last_step_the_rate_is_zero(name: str, steps: int) -> None:
    found = rates(name, steps, steps)
    assert all(rate > 1e-4 for rate in found[:-1])
    assert found[-1] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_a_named_schedule_must_know_the_last_step(name: str) -> None:
    with pytest.raises(ConfigError, match="must know the last step") as caught:
        build_lr_scheduler(name, sgd(), None)
    assert (caught.value.key, caught.value.value) == ("lr_scheduler", name)
    assert caught.value.fix == "steps=1000"


def test_a_target_gets_the_optimizer_and_need_not_know_the_steps() -> None:
    exponential = {"_target_": "torch.optim.lr_scheduler.ExponentialLR", "gamma": 0.5}
    assert rates(exponential, None, 2, lr=0.4) == pytest.approx([0.4, 0.2, 0.1])


def test_a_schedule_of_the_rate_that_looks_at_the_loss_is_refused() -> None:
    plateau = {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau"}
    with pytest.raises(ConfigError, match="does not move by steps alone") as caught:
        build_lr_scheduler(plateau, sgd(), 10)
    assert caught.value.key == "lr_scheduler._target_"


def no_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    del optimizer
    return None  # type: ignore[return-value]


def failing_schedule(_optimizer: torch.optim.Optimizer) -> None:
    raise RuntimeError("disk is full")


def test_what_cannot_step_is_no_schedule() -> None:
    with pytest.raises(ConfigError, match="does not move by steps alone"):
        build_lr_scheduler(node("no_schedule"), sgd(), 10)


def test_a_schedule_that_raises_is_the_users_code() -> None:
    with pytest.raises(UserCodeError, match=r"lr_scheduler.*disk is full"):
        build_lr_scheduler(node("failing_schedule"), sgd(), 10)


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [({"gama": 0.5}, "unexpected keyword argument 'gama'"), ({}, "missing 1 required")],
)
def test_arguments_that_a_schedule_does_not_take_are_refused(
    arguments: dict[str, Any], cause: str
) -> None:
    exponential = {"_target_": "torch.optim.lr_scheduler.ExponentialLR", **arguments}
    with pytest.raises(ConfigError, match="does not take these arguments") as caught:
        build_lr_scheduler(exponential, sgd(), 10)
    assert caught.value.key == "lr_scheduler"
    assert cause in str(caught.value)
