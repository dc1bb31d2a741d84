"""What dp's real and virtual replicas have in common."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dpexp.errors import ConfigError
from dpexp.parallel.replicas import ReplicaError, check_gatherable, drop_idle

Pair = namedtuple("Pair", "left right")

X = torch.zeros(2, 5)


@dataclass
class Output:
    logits: torch.Tensor


def test_calls_without_rows_are_dropped_together_with_their_keywords() -> None:
    inputs, kwargs = drop_idle([(X,), (), ()], [{"delta": 3}] * 3)
    assert inputs == ((X,),)
    assert kwargs == ({"delta": 3},)


def test_calls_that_all_have_rows_are_kept() -> None:
    inputs, kwargs = drop_idle([(X,), (X,)], [{}, {}])
    assert (len(inputs), len(kwargs)) == (2, 2)


def test_rows_may_come_as_keywords_only() -> None:
    inputs, kwargs = drop_idle([(), (), ()], [{"x": X, "n": 1}, {"x": X, "n": 1}, {"n": 1}])
    assert inputs == ((), ())
    assert [list(entry) for entry in kwargs] == [["x", "n"], ["x", "n"]]


@pytest.mark.parametrize(("inputs", "kwargs"), [([], []), ([(3,), (3,)], [{}, {}])])
def test_without_any_tensor_nobody_is_idle(inputs: Any, kwargs: Any) -> None:
    assert drop_idle(inputs, kwargs) == (tuple(inputs), tuple(kwargs))


@pytest.mark.parametrize(
    "output",
    [
        X,
        None,
        (X, None),
        [X, [X]],
        {"loss": X, "aux": None, "parts": [X, (X,)]},
        Pair(X, {"a": X}),
    ],
    ids=lambda output: type(output).__name__,
)
def test_what_torch_can_gather_is_accepted(output: Any) -> None:
    check_gatherable(output)


@pytest.mark.parametrize(
    ("output", "path", "kind"),
    [
        ({"loss": X, "k": 3}, "output['k']", "int"),
        ([X, [X, 0.5]], "output[1][1]", "float"),
        (Output(X), "output,", "Output"),
        ({"a": (X, Output(X))}, "output['a'][1]", "Output"),
        (Pair(X, "text"), "output[1]", "str"),
        (True, "output,", "bool"),
    ],
    ids=["int in dict", "float in list", "dataclass", "dataclass in dict", "text", "bool"],
)
def test_what_torch_cannot_gather_is_refused_by_place_and_type(
    output: Any, path: str, kind: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_gatherable(output)
    assert f"cannot gather {path}" in str(caught.value)
    assert f"of type {kind}" in str(caught.value)


def test_a_replicas_error_names_its_number_its_input_and_the_cause() -> None:
    error = ReplicaError(2, (1, 3), ValueError("Expected more than 1 value per channel"))
    assert error.replica == 2
    assert str(error) == (
        "in replica 2 with input [1, 3]: ValueError: Expected more than 1 value per channel"
    )


def test_a_bare_stop_iteration_is_explained() -> None:
    text = str(ReplicaError(0, (1, 3), StopIteration()))
    assert "parameters() is empty in a replica" in text
