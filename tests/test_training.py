"""What training adds to a step."""

from __future__ import annotations

import math

import pytest
import torch
from builders import FakeComm, make_context
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from dpexp.losses import make_loss
from dpexp.masking import MaskedTargets
from dpexp.parallel import make_strategy
from dpexp.schema import StrategyName
from dpexp.training import Training

ALONE = make_strategy(StrategyName.none, make_context("none", 1))


def one_weight(count: int = 1) -> nn.Linear:
    layer = nn.Linear(count, 1, bias=False)
    nn.init.constant_(layer.weight, 1.0)
    return layer


def training(
    model: nn.Module,
    lr: float = 0.1,
    *,
    scaler: torch.amp.GradScaler | None = None,
    clip_norm: float | None = None,
    decay: float | None = None,
) -> Training:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    scheduler: LRScheduler | None = None
    if decay is not None:
        scheduler = LambdaLR(optimizer, lambda step: decay**step)
    masked = MaskedTargets(FakeComm(), applies=False)
    return Training(make_loss("auto", None), model, optimizer, scaler, clip_norm, scheduler, masked)


def total(model: nn.Linear, *rows: float) -> torch.Tensor:
    """A loss whose gradient is the rows."""
    return model(torch.tensor([rows])).sum()


def test_an_update_is_a_step_along_the_gradient_and_leaves_none() -> None:
    model = one_weight()
    own = training(model)
    own.backward(total(model, 3.0))
    own.update(ALONE)
    assert model.weight.item() == pytest.approx(1 - 0.1 * 3)
    assert model.weight.grad is None


def test_the_gradients_of_micro_batches_add_up_until_the_update() -> None:
    model = one_weight()
    own = training(model)
    for row in (1.0, 2.0, 4.0):
        own.backward(total(model, row))
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 7.0
    own.update(ALONE)
    assert model.weight.item() == pytest.approx(1 - 0.1 * 7)


@pytest.mark.parametrize(
    ("limit", "step"), [(1.0, (0.6, 0.8)), (2.5, (1.5, 2.0)), (5.0, (3.0, 4.0)), (9.0, (3.0, 4.0))]
)
def test_a_gradient_of_norm_five_is_cut_to_the_limit_in_its_own_direction(
    limit: float, step: tuple[float, float]
) -> None:
    model = one_weight(2)
    own = training(model, lr=1.0, clip_norm=limit)
    own.backward(total(model, 3.0, 4.0))
    own.update(ALONE)
    assert model.weight.tolist()[0] == pytest.approx([1 - step[0], 1 - step[1]], abs=1e-5)


def test_the_norm_is_that_of_all_parameters_together_and_fixed_ones_do_not_count() -> None:
    model = nn.ModuleDict({"a": one_weight(), "b": one_weight(), "fixed": one_weight()})
    model["fixed"].requires_grad_(False)
    own = training(model, lr=1.0, clip_norm=1.0)
    own.backward(3 * model["a"].weight.sum() + 4 * model["b"].weight.sum())
    own.update(ALONE)
    after = [model[name].weight.item() for name in ("a", "b", "fixed")]
    assert after == pytest.approx([0.4, 0.2, 1.0], abs=1e-5)


def test_the_learning_rate_is_that_of_the_next_update_and_moves_with_each() -> None:
    model = one_weight()
    own, rates = training(model, lr=0.4, decay=0.5), []
    for _ in range(3):
        rates.append(own.learning_rate)
        own.backward(total(model, 1.0))
        own.update(ALONE)
    assert rates == pytest.approx([0.4, 0.2, 0.1])
    assert model.weight.item() == pytest.approx(1 - 0.4 - 0.2 - 0.1)


def scaler(start: float = 1024.0) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=start)


def test_a_scaled_loss_makes_the_same_update_as_an_unscaled_one() -> None:
    for clip_norm in (None, 1.0):
        plain, scaled = one_weight(), one_weight()
        for model, own in (
            (plain, training(plain, clip_norm=clip_norm)),
            (scaled, training(scaled, clip_norm=clip_norm, scaler=scaler())),
        ):
            for row in (1.0, 2.0):
                own.backward(total(model, row))
            own.update(ALONE)
        assert scaled.weight.item() == pytest.approx(plain.weight.item(), abs=1e-6)


def test_the_gradient_is_scaled_before_it_is_computed() -> None:
    model = one_weight()
    own = training(model, scaler=scaler(1024.0))
    own.backward(total(model, 3.0))
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 3 * 1024


def test_an_update_with_a_gradient_that_is_not_finite_is_left_out_and_noted() -> None:
    model = one_weight()
    own = training(model, scaler=scaler())
    for row in (math.inf, math.nan, 2.0):
        own.backward(total(model, row))
        own.update(ALONE)
    assert model.weight.item() == pytest.approx(1 - 0.1 * 2)
    (note,) = own.notes()
    assert "2 updates were left out" in note


@pytest.mark.parametrize("scaled", [True, False])
def test_without_such_a_gradient_there_is_no_note(scaled: bool) -> None:
    model = one_weight()
    own = training(model, scaler=scaler() if scaled else None)
    own.backward(total(model, 1.0))
    own.update(ALONE)
    assert own.notes() == ()


@pytest.mark.filterwarnings("error:Detected call of `lr_scheduler.step")
def test_a_left_out_first_update_is_not_taken_for_a_mistake_of_the_schedule() -> None:
    model = one_weight()
    own = training(model, scaler=scaler(), decay=0.5)
    own.backward(total(model, math.inf))
    own.update(ALONE)
