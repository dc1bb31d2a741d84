"""From a schedule to batches on a device."""

from __future__ import annotations

import os
import random
import threading
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from dpexp.batches import (
    Inputs,
    fetch_all,
    leading_sizes,
    move,
    rows_in,
    seed_all,
    seed_of_rank,
    split,
)
from dpexp.datasets import Rows
from dpexp.errors import ConfigError
from dpexp.schedule import Indices, Schedule

Pair = namedtuple("Pair", "left right")

X, Y, Z = torch.zeros(4, 5), torch.ones(4, 2), torch.ones(4)
META = torch.device("meta")
SCHEDULE = Schedule(5, 2, epochs=1, steps=None, drop_last=False, shuffle=False, seed=0)


class Squares(Dataset[Any]):
    """Row i is the pair (i, i * i)."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if type(index) is not int:
            raise TypeError(f"an index must be an int, not {type(index).__name__}")
        return torch.tensor([float(index)]), index * index


class ManySquares(Squares):
    """The same, fetched many at a time."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Unsized(Dataset[Any]):
    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def whole(rows: Indices) -> Indices:
    return rows


def fetched(
    dataset: Any, choose: Callable[[Indices], Indices] = whole, workers: int = 0
) -> list[tuple[int, list[float], list[float]]]:
    batches = fetch_all(dataset, SCHEDULE, choose, workers, seed=0)
    return [(b.step, x.flatten().tolist(), y.flatten().tolist()) for b, (x, y) in batches]


DATASETS = [
    Squares(5),
    ManySquares(5),
    Rows(torch.arange(5.0).reshape(5, 1), torch.arange(5.0) ** 2),
]


@pytest.mark.parametrize("dataset", DATASETS, ids=lambda dataset: type(dataset).__name__)
def test_batches_follow_the_schedule_whatever_the_kind_of_dataset(dataset: Any) -> None:
    assert fetched(dataset) == [
        (0, [0.0, 1.0], [0.0, 1.0]),
        (1, [2.0, 3.0], [4.0, 9.0]),
        (2, [4.0], [16.0]),
    ]


def test_only_the_chosen_rows_are_fetched() -> None:
    assert fetched(Squares(5), choose=lambda rows: rows[-1:]) == [
        (0, [1.0], [1.0]),
        (1, [3.0], [9.0]),
        (2, [4.0], [16.0]),
    ]


@pytest.fixture
def loader_ends() -> Iterator[None]:
    """The loader's queue has a thread in this process, which ends a moment after the loader."""
    yield
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(5)


@pytest.mark.usefixtures("loader_ends")
@pytest.mark.parametrize("dataset", DATASETS, ids=lambda dataset: type(dataset).__name__)
def test_a_loader_process_gives_the_same_batches(dataset: Any) -> None:
    assert fetched(dataset, workers=1) == fetched(dataset)


@pytest.mark.usefixtures("loader_ends")
@pytest.mark.parametrize(("workers", "here"), [(0, True), (1, False)])
def test_rows_are_fetched_in_this_process_unless_there_are_loader_processes(
    workers: int, here: bool
) -> None:
    class Pids(Squares):
        def __getitem__(self, index: int) -> int:
            return os.getpid()

    batches = fetch_all(Pids(5), SCHEDULE, whole, workers, seed=0)
    pids = {pid for _, batch in batches for pid in batch.tolist()}
    assert (pids == {os.getpid()}) is here


def test_a_datasets_own_collate_fn_is_used() -> None:
    class Texts(Squares):
        @staticmethod
        def collate_fn(rows: list[Any]) -> str:
            return ",".join(str(square) for _, square in rows)

    assert [batch for _, batch in fetch_all(Texts(5), SCHEDULE, whole, 0, seed=0)] == [
        "0,1",
        "4,9",
        "16",
    ]


@pytest.mark.parametrize(
    ("batch", "args", "kwargs", "target"),
    [
        (X, (X,), {}, None),
        ([X], (X,), {}, None),
        ((X, Y), (X,), {}, Y),
        ([X, Y], (X,), {}, Y),
        ((X, Z, Y), (X, Z), {}, Y),
        (((X, Z), Y), (X, Z), {}, Y),
        (([X, Z], Y), (X, Z), {}, Y),
        (({"a": X, "b": Z}, Y), (), {"a": X, "b": Z}, Y),
        ({"a": X, "b": Z}, (), {"a": X, "b": Z}, None),
        ((X, {"boxes": Y}), (X,), {}, {"boxes": Y}),
        (Pair(X, Y), (X,), {}, Y),
    ],
    ids=[
        "tensor",
        "list of one",
        "tuple",
        "list",
        "three",
        "tuple in tuple",
        "list in tuple",
        "dict in tuple",
        "dict",
        "dict as target",
        "named tuple",
    ],
)
def test_a_batch_is_split_into_inputs_and_target(
    batch: Any, args: Any, kwargs: Any, target: Any
) -> None:
    assert split(batch, {}) == Inputs(args, kwargs, target)


@pytest.mark.parametrize("batch", [X, (X, Y), ({"a": X}, Y), {"a": X}])
def test_constant_keywords_join_every_call(batch: Any) -> None:
    assert split(batch, {"delta": 3}).kwargs["delta"] == 3


def test_a_constant_keyword_wins_and_the_batch_itself_is_not_changed() -> None:
    batch = {"a": X}
    assert split(batch, {"a": 1}).kwargs == {"a": 1}
    assert batch["a"] is X


@pytest.mark.parametrize("batch", ["text", 3, None])
def test_a_batch_of_another_kind_is_refused_by_its_type(batch: Any) -> None:
    with pytest.raises(ConfigError, match=type(batch).__name__):
        split(batch, {})


@pytest.mark.parametrize(
    "value",
    [
        X,
        (X, Y),
        [X, [Y]],
        {"a": X},
        Pair(X, {"b": Y}),
        OrderedDict(a=X),
        {"n": 3, "t": "text", "none": None},
    ],
    ids=lambda value: type(value).__name__,
)
def test_moving_keeps_the_structure_and_the_types_of_containers(value: Any) -> None:
    moved = move(value, META)
    assert type(moved) is type(value)
    assert leading_sizes(moved) == leading_sizes(value)


def test_every_tensor_is_moved_and_nothing_else() -> None:
    moved = move({"x": (X, [Y]), "n": 3, "t": "text"}, META)
    assert (moved["x"][0].device, moved["x"][1][0].device) == (META, META)
    assert (moved["n"], moved["t"]) == (3, "text")


def test_the_shapes_of_all_tensors_in_a_nested_value() -> None:
    nested = (X, {"a": [Y, 3], "b": Pair(None, Z)}, "text")
    assert [list(shape) for shape in leading_sizes(nested)] == [[4, 5], [4, 2], [4]]


def test_rows_are_counted() -> None:
    assert rows_in(Squares(7)) == 7


@pytest.mark.parametrize("dataset", [Unsized(), Stream(), 3], ids=["unsized", "iterable", "int"])
def test_a_dataset_without_a_length_is_refused_by_its_type(dataset: Any) -> None:
    with pytest.raises(ConfigError, match="has no length") as caught:
        rows_in(dataset)
    assert (caught.value.key, caught.value.value) == ("dataset", type(dataset).__name__)


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ConfigError, match="it has 0 rows"):
        rows_in(Squares(0))


def drawn() -> tuple[float, float, float]:
    return torch.rand(()).item(), float(np.random.random()), random.random()


@pytest.mark.parametrize("seed", [0, 2**32 + 5, 2**63 - 1])
def test_one_seed_fixes_torch_numpy_and_random(seed: int) -> None:
    seed_all(seed)
    first = drawn()
    seed_all(seed)
    assert drawn() == first
    seed_all(seed - 1 if seed else 1)
    assert all(new != old for new, old in zip(drawn(), first, strict=True))


def test_ranks_draw_from_seeds_of_their_own_that_depend_on_the_seed() -> None:
    seeds = [seed_of_rank(seed, rank) for seed in (0, 1, 2) for rank in range(8)]
    assert len(set(seeds)) == 24
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of_rank(1, 3) == seed_of_rank(1, 3)
