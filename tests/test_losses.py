"""From outputs and targets to the mean loss over rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
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


# Where the classes are


def class_target(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.int64)


def sure_of_class_1(shape: tuple[int, ...], dim: int) -> torch.Tensor:
    """Scores whose loss is nearly 0 if the classes are looked for in dimension `dim`."""
    scores = torch.zeros(shape)
    scores.select(dim, 1).fill_(50.0)
    return scores


@pytest.mark.parametrize(
    ("shape", "classes", "target"),
    [
        ((4, 3), 1, (4,)),
        ((4, 3, 6), 1, (4, 6)),  # as torch has them
        ((4, 6, 3), 2, (4, 6)),  # as language models give them
        ((4, 3, 5, 6), 1, (4, 5, 6)),
        ((4, 5, 6, 3), 3, (4, 5, 6)),
        ((4, 4), 1, (4,)),  # as many classes as rows
        ((1, 7), 1, (1,)),
    ],
)
@pytest.mark.parametrize("name", ["cross_entropy", "auto"])
def test_classes_are_in_dimension_1_or_in_the_last_one(
    name: str, shape: tuple[int, ...], classes: int, target: tuple[int, ...]
) -> None:
    output = sure_of_class_1(shape, classes)
    assert make_loss(name, None)(output, class_target(*target)).item() < 1e-6


def test_classes_that_could_be_in_either_dimension_are_refused_with_the_shapes() -> None:
    with pytest.raises(ConfigError, match="could be in dimension 1 or in the last one") as caught:
        make_loss("cross_entropy", None)(torch.zeros(4, 3, 3), class_target(4, 3))
    assert "of shape [4, 3, 3], the target of shape [4, 3]" in str(caught.value)
    assert "loss={_target_" in caught.value.fix


@pytest.mark.parametrize(
    ("output", "target"),
    [((4, 3), (5,)), ((4, 3, 5), (4, 6)), ((4, 3), (4, 1)), ((4, 3), (4, 3)), ((4, 3, 5), (4,))],
)
def test_classes_that_are_in_neither_dimension_are_refused_with_the_shapes(
    output: tuple[int, ...], target: tuple[int, ...]
) -> None:
    with pytest.raises(ConfigError, match="are in neither place") as caught:
        make_loss("auto", None)(torch.zeros(output), class_target(*target))
    assert f"{list(output)}, the target of shape {list(target)}" in str(caught.value)


@pytest.mark.parametrize("output", [torch.zeros(4), torch.tensor(0.5)], ids=["[4]", "0-dim"])
def test_an_output_without_classes_is_refused_with_the_shapes(output: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="the target of shape"):
        make_loss("auto", None)(output, class_target(4))


def test_small_whole_numbers_are_classes_too() -> None:
    target = torch.tensor([0, 3, 1], dtype=torch.uint8)
    assert make_loss("auto", None)(LOGITS, target).item() == pytest.approx(1.3862944)


def test_probabilities_of_the_classes_are_a_target_of_the_cross_entropy() -> None:
    half = torch.tensor([[0.5, 0.5, 0.0, 0.0]] * 3)
    assert make_loss("cross_entropy", None)(LOGITS, half).item() == pytest.approx(1.3862944)


# Parts of outputs, and types


@pytest.mark.parametrize(
    "output", [{"logits": LOGITS, "loss": OWN}, SimpleNamespace(logits=LOGITS, loss=OWN)]
)
def test_a_model_that_returns_its_loss_means_it_also_when_there_is_a_target(output: Any) -> None:
    assert make_loss("auto", None)(output, CLASSES).item() == OWN.item()


@pytest.mark.parametrize(
    "output",
    [
        {"logits": LOGITS, "hidden": PREDICTED},
        {"output": LOGITS, "hidden": PREDICTED},
        {"hidden": None, "scores": LOGITS},
        SimpleNamespace(logits=LOGITS, hidden=PREDICTED),
        SimpleNamespace(output=LOGITS, hidden=PREDICTED),
        SimpleNamespace(scores=LOGITS, note="text"),
    ],
    ids=["logits", "output", "only tensor", "field logits", "field output", "only field"],
)
def test_the_prediction_is_a_named_part_of_the_output_or_the_only_tensor(output: Any) -> None:
    assert make_loss("auto", None)(output, CLASSES).item() == pytest.approx(1.3862944)


@pytest.mark.parametrize(
    "output",
    [{"a": LOGITS, "b": LOGITS}, SimpleNamespace(a=LOGITS, b=LOGITS), {"a": 3}],
    ids=["dict", "fields", "no tensor"],
)
def test_an_output_of_several_parts_is_refused_with_their_names(output: Any) -> None:
    with pytest.raises(ConfigError, match="which part of it is meant") as caught:
        make_loss("auto", None)(output, CLASSES)
    assert f"a {type(output).__name__} with a" in str(caught.value)


@pytest.mark.parametrize("name", ["mse", "l1", "bce_with_logits"])
@pytest.mark.parametrize("target", [torch.float64, torch.float32, torch.int64])
def test_a_target_is_taken_in_the_outputs_number_format(name: str, target: torch.dtype) -> None:
    loss = make_loss(name, None)(PREDICTED, torch.ones(2, 2, dtype=target))
    assert loss.dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "output", "target", "value"),
    [
        ("l1", PREDICTED, MEASURED, 1.25),  # distances 1, 2, 0, 2
        ("bce_with_logits", torch.zeros(4), torch.tensor([0, 1, 1, 0]), 0.6931472),  # ln 2
        ("bce_with_logits", torch.tensor([50.0, -50.0]), torch.tensor([1.0, 0.0]), 0.0),
    ],
)
def test_further_losses_by_name(name: str, output: Any, target: Any, value: float) -> None:
    assert make_loss(name, None)(output, target).item() == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize(
    ("dtype", "target"), [(torch.bfloat16, 1001.0), (torch.float16, 100000.0)], ids=str
)
def test_a_target_keeps_its_digits_beside_a_short_output(dtype: torch.dtype, target: float) -> None:
    # What autocast makes of a last layer. 1001 is no bf16, 100000 is beyond fp16's largest.
    output = torch.zeros(2, dtype=dtype)
    with torch.autocast("cpu", dtype):
        loss = make_loss("l1", None)(output, torch.full((2,), target))
    assert loss.item() == target
