"""What ranks tell each other: data comes through as it was, and nothing else is made of it."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from dpexp.records import PhaseSummary, ShapeRecord
from dpexp.wire import UntrustedError, pack, unpack_all

Pair = namedtuple("Pair", "first second")
NOTHING = pack(None)


class Labelled(torch.Tensor):
    """A tensor of a class of its own, as torchvision has them."""


class Batch:
    """An object with fields, as a user's collate function may make."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows


class Told:
    """Pickles to a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


def sent(value: Any, own: bytes = NOTHING) -> Any:
    (received,) = unpack_all([pack(value)], own)
    return received


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).T,
        torch.tensor(3, dtype=torch.int64),
        torch.ones(0, 5),
        torch.tensor([True, False]),
        torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        torch.tensor([1 + 2j]).conj(),
        torch.ones(2, requires_grad=True) * 2,
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
def test_a_tensor_comes_as_it_was(tensor: torch.Tensor) -> None:
    received = sent(tensor)
    assert (received.dtype, received.shape) == (tensor.dtype, tensor.shape)
    torch.testing.assert_close(received, tensor.detach(), rtol=0, atol=0, equal_nan=True)
    assert not received.requires_grad
    received.zero_()  # it has memory of its own


def test_plain_data_numbers_and_records_need_nothing_of_their_kind_on_rank_0() -> None:
    summary = PhaseSummary(1.0, 1.0, 1.0, 1.0, float("inf"), 3)
    value = {
        "records": (summary, ShapeRecord("", 0, "[1]", "[2]", 1, 0, 0)),
        3: [None, {1, 2}, b"\x00", OrderedDict(a=1), numpy.float64(2.5), numpy.int64(7)],
    }
    assert sent(value) == value
    assert (sent(numpy.arange(4.0).reshape(2, 2)) == numpy.arange(4.0).reshape(2, 2)).all()


def test_a_users_classes_come_where_rank_0_has_them_too() -> None:
    own = pack([Pair(1, 2), Batch(torch.zeros(1)), Labelled(torch.zeros(1))])
    pair, batch, labelled = sent(
        [Pair(torch.ones(2), "x"), Batch(torch.ones(3)), torch.ones(2).as_subclass(Labelled)], own
    )
    assert (type(pair), pair.second, type(labelled)) == (Pair, "x", Labelled)
    assert batch.rows.tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(UntrustedError, match=r"test_wire\.Pair is not expected"):
        sent(Pair(1, 2))


@pytest.mark.parametrize(
    ("function", "argument"),
    [
        (os.system, "touch stranger"),
        (eval, "open('stranger', 'w')"),
        (torch.load, "stranger"),
        (torch.storage._load_from_bytes, pickle.dumps(Told(os.mkdir, "stranger"))),
        (getattr, "stranger"),
    ],
)
def test_what_would_call_something_calls_nothing(
    workdir: Path, function: Any, argument: Any
) -> None:
    stranger = pickle.dumps(Told(function, argument))
    for own in (NOTHING, pack([1, torch.ones(2), Pair(1, 2)])):
        with pytest.raises(UntrustedError):
            list(unpack_all([stranger], own))
    # Also where rank 0's own value has such a thing.
    if function in (eval, torch.storage._load_from_bytes, getattr):
        with pytest.raises(UntrustedError):
            list(unpack_all([NOTHING], stranger))
    assert list(workdir.iterdir()) == []
