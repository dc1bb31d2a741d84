"""From outputs and targets to the mean loss over rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from dpexp.errors import ConfigError
from dpexp.losses import make_loss


@dataclass
class Output:
    loss: torch.Tensor


OWN = torch.tensor(2.5)
PREDICTED = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
MEASURED = torch.tensor([[0.0, 0.0], [3.0, 2.0]])  # squares 1, 4, 0, 4: mean 2.25
LOGITS = torch.zeros(3, 4)  # every class as likely: the loss is ln 4
CLASSES = torch.tensor([0, 3, 1])


@pytest.mark.parametrize(
    ("name", "output", "target", "value"),
    [
        ("mse", PREDICTED, MEASURED, 2.25),
        ("auto", PREDICTED, MEASURED, 2.25),
        ("cross_entropy", LOGITS, CLASSES, 1.3862944),
        ("auto", LOGITS, CLASSES, 1.3862944),
        ("auto", OWN, None, 2.5),
        ("auto", {"loss": OWN, "logits": LOGITS}, None, 2.5),
        ("auto", Output(OWN), None, 2.5),
        ("output", OWN, CLASSES, 2.5),
        ("output", {"loss": OWN}, MEASURED, 2.5),
    ],
)
def test_the_loss_by_name(name: str, output: Any, target: Any, value: float) -> None:
    loss = make_loss(name, None)(output, target)
    assert loss.dim() == 0
    assert loss.item() == pytest.approx(value, abs=1e-6)


def test_the_losses_of_several_replicas_are_left_to_the_strategy() -> None:
    gathered = torch.tensor([0.5, 6.5, 16.0])
    assert make_loss("auto", None)(gathered, None) is gathered


@pytest.mark.parametrize("name", ["mse", "cross_entropy"])
def test_a_loss_against_a_target_needs_one(name: str) -> None:
    with pytest.raises(ConfigError, match="needs a target") as caught:
        make_loss(name, None)(PREDICTED, None)
    assert (caught.value.key, caught.value.value) == ("loss", name)


@pytest.mark.parametrize(
    "target", [torch.zeros(2), torch.zeros(2, 1), torch.zeros(2, 2, 1)], ids=["[2]", "[2,1]", "3d"]
)
def test_shapes_that_torch_would_broadcast_are_refused_with_both(target: torch.Tensor) -> None:
    with pytest.raises(ConfigError) as caught:
        make_loss("mse", None)(PREDICTED, target)
    assert f"output is of shape [2, 2], the target of shape {list(target.shape)}" in str(
        caught.value
    )


def test_an_output_that_is_no_tensor_is_refused_by_its_type() -> None:
    with pytest.raises(ConfigError, match="output is a tuple"):
        make_loss("mse", None)((PREDICTED,), MEASURED)


@pytest.mark.parametrize(
    ("output", "what"),
    [
        (PREDICTED, "of shape [2, 2]"),
        ({"logits": LOGITS}, "a NoneType"),
        ({"loss": 2.5}, "a float"),
        ((OWN,), "a tuple"),
    ],
    ids=["rows", "dict without loss", "number", "tuple"],
)
def test_an_output_that_is_no_loss_is_refused_with_what_it_is(output: Any, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_loss("auto", None)(output, None)
    assert f"the model's output is not a loss: it is {what}" in str(caught.value)


def test_a_built_loss_is_called_with_output_and_target() -> None:
    loss = make_loss({"_target_": "torch.nn.L1Loss"}, nn.L1Loss())
    # distances 1, 2, 0, 2
    assert loss(PREDICTED, MEASURED).item() == pytest.approx(1.25)


@pytest.mark.parametrize(
    ("custom", "what"),
    [(nn.L1Loss(reduction="none"), "of shape [2, 2]"), (lambda _o, _t: 3.0, "a float")],
    ids=["per element", "number"],
)
def test_a_built_loss_that_gives_no_mean_is_refused(
    custom: Callable[[Any, Any], Any], what: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_loss({"_target_": "m.L"}, custom)(PREDICTED, MEASURED)
    assert caught.value.key == "loss"
    assert f"not {what}" in str(caught.value)
