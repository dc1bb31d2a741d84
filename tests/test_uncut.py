"""Putting a batch together again."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch

from dpexp.batches import Inputs, cut
from dpexp.uncut import numbers_in, same, uncut

Pair = namedtuple("Pair", ["left", "right"])
ROWS = torch.arange(14.0).reshape(7, 2)


def batch() -> Inputs:
    nested = {"x": ROWS + 1, "pair": Pair(ROWS + 2, None), "texts": [f"row {i}" for i in range(7)]}
    many = [torch.full((i + 1,), float(i)) for i in range(7)]  # images of different sizes
    return Inputs((ROWS, nested, 3), {"many": many, "scale": torch.ones(())}, ROWS[:, 0])


@pytest.mark.parametrize("sizes", [[7], [4, 3], [3, 3, 1]])
def test_what_was_cut_is_put_together_again(sizes: list[int]) -> None:
    pieces = cut(batch(), 7, sizes)
    whole = uncut(list(zip(pieces, sizes, strict=True)))
    assert same(tuple(whole), tuple(batch()))
    assert type(whole.args[1]["pair"]) is Pair


def test_parts_can_change_places() -> None:
    first, second = cut(Inputs((ROWS,), {}, None), 7, [4, 3])
    (swapped,) = uncut([(second, 3), (first, 4)]).args
    assert swapped[:, 0].tolist() == [8, 10, 12, 0, 2, 4, 6]


def test_keywords_of_the_config_are_no_part_of_the_batch() -> None:
    pieces = [(Inputs((ROWS[:3],), {"table": torch.ones(3)}, None), 3)] * 2
    assert uncut(pieces, {"table"}).kwargs["table"].shape == (3,)
    assert uncut(pieces).kwargs["table"].shape == (6,)


def test_parts_padded_to_different_lengths_cannot_be_put_together() -> None:
    short, long = Inputs((torch.ones(2, 3),), {}, None), Inputs((torch.ones(2, 4),), {}, None)
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        uncut([(short, 2), (long, 2)])


def test_the_numbers_of_a_batch_are_those_that_the_model_gets() -> None:
    assert numbers_in(Inputs((ROWS, {"x": torch.ones(7, 3)}), {}, torch.ones(7, 100)), 7) == 35
    assert numbers_in(Inputs((["a", "b"],), {}, None), 2) == 2


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), True),
        (torch.tensor([1.0]), torch.tensor([1.0 + 1e-6]), False),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), False),
        (torch.ones(2), torch.ones(3), False),
        (torch.tensor([True]), torch.tensor([True]), True),
        ({"a": [1, "x"]}, {"a": [1, "x"]}, True),
        ({"a": 1}, {"b": 1}, False),
        ((1, 2), (1, 2, 3), False),
        (torch.ones(1), 1.0, False),
        (None, None, True),
    ],
)
def test_two_values_are_the_same_to_the_last_bit_or_not(one: Any, other: Any, alike: bool) -> None:
    assert same(one, other) is alike
