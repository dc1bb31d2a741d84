"""From rows to a batch."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpexp.collate import collate, collate_of
from dpexp.errors import ConfigError

Pair = namedtuple("Pair", "left right")


class Opaque:
    """Something that cannot be stacked."""


@pytest.mark.parametrize(
    ("rows", "batch"),
    [
        ([torch.tensor([1.0]), torch.tensor([2.0])], torch.tensor([[1.0], [2.0]])),
        ([np.zeros(2, np.int32), np.ones(2, np.int32)], torch.tensor([[0, 0], [1, 1]])),
        ([3, 4], torch.tensor([3, 4])),
        ([True, False], torch.tensor([True, False])),
        ([0.5, 1.5], torch.tensor([0.5, 1.5], dtype=torch.float64)),
    ],
    ids=["tensors", "arrays", "whole numbers", "truth values", "floats"],
)
def test_numbers_are_stacked(rows: list[Any], batch: torch.Tensor) -> None:
    assert torch.equal(collate(rows), batch.to(collate(rows).dtype))


@pytest.mark.parametrize(
    ("row", "dtype"),
    [
        (3, torch.int64),
        (0.5, torch.float64),
        (np.float32(0.5), torch.float32),
        (np.zeros(1, np.uint8), torch.uint8),
        (torch.zeros(1, dtype=torch.bfloat16), torch.bfloat16),
    ],
)
def test_the_number_format_is_torchs_own(row: Any, dtype: torch.dtype) -> None:
    assert collate([row, row]).dtype == dtype


def test_texts_and_bytes_stay_what_they_are_one_a_row() -> None:
    assert collate(["a", "bc"]) == ["a", "bc"]
    assert collate([b"a", b"bc"]) == [b"a", b"bc"]


def test_none_in_every_row_is_one_none() -> None:
    assert collate([None, None]) is None


def test_rows_of_any_depth_keep_their_structure() -> None:
    rows = [
        {"x": (torch.tensor([float(i)]), None), "name": f"row {i}", "box": Pair(i, [i, -i])}
        for i in range(2)
    ]
    batch = collate(rows)
    assert list(batch) == ["x", "name", "box"]
    assert torch.equal(batch["x"][0], torch.tensor([[0.0], [1.0]]))
    assert batch["x"][1] is None
    assert batch["name"] == ["row 0", "row 1"]
    assert type(batch["box"]) is Pair
    assert batch["box"].left.tolist() == [0, 1]
    assert [entry.tolist() for entry in batch["box"].right] == [[0, 1], [0, -1]]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([torch.zeros(2), torch.zeros(3)], "stack expects each tensor to be equal size"),
        ([np.zeros(2), np.zeros(3)], "stack expects each tensor to be equal size"),
        ([[1, 2], [1]], "equal size"),
        ([{"a": 1}, {"b": 1}], "a"),
        ([None, 1], "None in some rows and not in others"),
        ([1, None], "NoneType"),
        ([torch.zeros(1), None], ""),
        ([Opaque(), Opaque()], "Opaque"),
    ],
    ids=[
        "tensors of two sizes",
        "arrays of two sizes",
        "lists of two lengths",
        "dicts of other keys",
        "None first",
        "None later",
        "None after a tensor",
        "objects",
    ],
)
def test_rows_that_make_no_batch_are_refused_with_the_reason(rows: list[Any], reason: str) -> None:
    with pytest.raises(ConfigError, match="cannot be put together to a batch") as caught:
        collate(rows)
    assert (caught.value.key, caught.value.value) == ("dataset", type(rows[0]).__name__)
    assert reason in caught.value.problem
    assert "\n" not in str(caught.value)


def test_a_datasets_own_way_is_taken_where_it_has_one() -> None:
    class Own:
        @staticmethod
        def collate_fn(rows: list[Any]) -> int:
            return len(rows)

    assert collate_of(Own())([1, 2, 3]) == 3
    assert collate_of(Opaque()) is collate


@given(st.lists(st.tuples(st.integers(-5, 5), st.text(max_size=3)), min_size=1, max_size=6))
def test_a_batch_holds_its_rows_in_order(rows: list[tuple[int, str]]) -> None:
    numbers, texts = collate(rows)
    assert list(zip(numbers.tolist(), texts, strict=True)) == rows
