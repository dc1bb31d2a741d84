"""Iterable datasets: one stream, cut into the same global batches on every rank."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from builders import FakeComm, Ranks, make_config
from torch.utils.data import IterableDataset, get_worker_info

from dpexp.comm import Comm
from dpexp.errors import ConfigError
from dpexp.loading import Batches
from dpexp.schedule import Indices, chunk_of, chunk_sizes
from dpexp.streams import StreamPlan, fetch_stream

# As many loader processes as a test wants, also on a machine with two cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Count(IterableDataset[Any]):
    """The rows 0, 1, 2, … as tensors."""

    def __init__(self, rows: int = 10) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return (torch.tensor(float(row)) for row in range(self.rows))


class Epochs(Count):
    """Row r of epoch e is 100 * e + r."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return (torch.tensor(100.0 * self.epoch + row) for row in range(self.rows))


class Split(Count):
    """Splits itself over loader processes, as torch's documentation advises."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (torch.tensor(float(row)) for row in range(first, self.rows, step))


class Drawn(Count):
    """Each row is drawn from torch, numpy and random."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.rows):
            yield torch.tensor([torch.rand(()).item(), np.random.random(), random.random()])


class Once:
    """Not torch's kind of dataset; its iterator can be read only once."""

    def __init__(self, rows: int) -> None:
        self.left = iter(range(rows))

    def __iter__(self) -> Iterator[int]:
        return self.left


def whole(rows: Indices) -> Indices:
    return rows


def read(
    dataset: Any,
    *,
    comm: Comm | None = None,
    choose: Callable[[Indices], Indices] = whole,
    workers: int = 0,
    epochs: int | None = 1,
    steps: int | None = None,
    drop_last: bool = False,
    seed: int = 0,
    first: int = 0,
) -> Batches:
    plan = StreamPlan(4, epochs, steps, drop_last, seed, first)
    loader = make_config(loader={"workers": workers}).loader
    return fetch_stream(dataset, plan, choose, comm or FakeComm(), loader, pin=False)


def rows_of(batches: Batches) -> list[list[float]]:
    return [fetched.tolist() for _, fetched in batches]


@pytest.fixture(autouse=True)
def loader_ends() -> Iterator[None]:
    """The loader's queue has a thread in this process, which ends a moment after the loader."""
    yield
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(5)


def read_by_ranks(
    dataset: Any, world_size: int, workers: int = 0, **how: Any
) -> list[tuple[int, int, list[Any]]]:
    """(step, epoch, rows over all ranks) of each global batch; idle ranks borrow as under ddp."""
    ranks, joined = Ranks(world_size), {}
    for rank in range(world_size):

        def choose(rows: Indices, rank: int = rank) -> Indices:
            own = chunk_of(rows, rank, world_size)
            return own if len(own) else chunk_of(rows, 0, world_size)

        comm = ranks.comm(rank)
        for batch, fetched in read(dataset, comm=comm, choose=choose, workers=workers, **how):
            own = chunk_sizes(len(batch.indices), world_size)[rank]
            entry = joined.setdefault(batch.step, (batch.step, batch.epoch, []))
            assert entry[:2] == (batch.step, batch.epoch)
            entry[2].extend(fetched.tolist()[:own])
    return list(joined.values())


TEN = [(0, 0, [0.0, 1.0, 2.0, 3.0]), (1, 0, [4.0, 5.0, 6.0, 7.0]), (2, 0, [8.0, 9.0])]


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dataset", [Count(10), Split(10)], ids=["plain", "splits itself"])
def test_each_row_is_used_once_in_the_same_global_batches_the_last_one_short(
    dataset: Any, world_size: int, workers: int
) -> None:
    assert read_by_ranks(dataset, world_size, workers) == TEN


@pytest.mark.parametrize("workers", [0, 2])
def test_with_drop_last_the_short_batch_of_each_epoch_is_left_out(workers: int) -> None:
    found = read_by_ranks(Count(10), 2, workers, epochs=2, drop_last=True)
    assert [(step, epoch) for step, epoch, _ in found] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert [rows for _, _, rows in found] == [TEN[0][2], TEN[1][2]] * 2


@pytest.mark.parametrize("workers", [0, 3])
def test_a_dataset_is_told_the_epoch_and_each_begins_anew(workers: int) -> None:
    assert read_by_ranks(Epochs(6), 2, workers, epochs=2) == [
        (0, 0, [0.0, 1.0, 2.0, 3.0]),
        (1, 0, [4.0, 5.0]),
        (2, 1, [100.0, 101.0, 102.0, 103.0]),
        (3, 1, [104.0, 105.0]),
    ]


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("first", [1, 4])
def test_a_stream_that_begins_later_leaves_out_what_was_read_before(
    first: int, workers: int
) -> None:
    whole = read_by_ranks(Drawn(10), 2, epochs=2)
    assert read_by_ranks(Drawn(10), 2, workers, epochs=2, first=first) == whole[first:]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("epochs", "steps", "count"), [(1, 2, 2), (None, 7, 7), (2, 9, 6)])
def test_there_are_at_most_so_many_steps(
    workers: int, epochs: int | None, steps: int, count: int
) -> None:
    found = read_by_ranks(Count(10), 1, workers, epochs=epochs, steps=steps)
    assert [step for step, _, _ in found] == list(range(count))
    assert [epoch for _, epoch, _ in found] == [0, 0, 0, 1, 1, 1, 2][:count]


def test_no_more_rows_are_read_than_the_steps_need() -> None:
    class Endless:
        read = 0

        def __iter__(self) -> Iterator[int]:
            while True:
                self.read += 1
                yield self.read

    dataset = Endless()
    assert rows_of(read(dataset, steps=2)) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert dataset.read == 8


def test_the_indices_of_a_batch_are_the_places_in_the_epoch() -> None:
    places = [batch.indices.tolist() for batch, _ in read(Count(6), epochs=2)]
    assert places == [[0, 1, 2, 3], [4, 5], [0, 1, 2, 3], [4, 5]]


def test_an_iterator_that_is_used_up_ends_the_run_with_its_epoch() -> None:
    assert rows_of(read(Once(6), epochs=None, steps=100)) == [[0, 1, 2, 3], [4, 5]]


def test_a_datasets_own_collate_fn_gets_this_ranks_rows() -> None:
    class Texts(Once):
        @staticmethod
        def collate_fn(rows: list[int]) -> torch.Tensor:
            return torch.tensor(sum(rows))

    found = read(Texts(6), choose=lambda rows: rows[1:])
    assert [fetched.item() for _, fetched in found] == [1 + 2 + 3, 5]


# Random numbers


def drawn(dataset: Any = None, **how: Any) -> list[list[list[float]]]:
    return rows_of(read(dataset or Drawn(6), epochs=2, **how))


def test_rows_are_drawn_the_same_whatever_a_rank_draws_in_between() -> None:
    alone, found = drawn(), []
    for _, fetched in read(Drawn(6), epochs=2):
        found.append(fetched.tolist())
        random.random(), np.random.random(3), torch.rand(5)
        torch.manual_seed(5)
    assert found == alone
    assert len({value for batch in alone for row in batch for value in row}) == 2 * 6 * 3


def test_reading_does_not_move_a_ranks_own_random_numbers() -> None:
    def own() -> tuple[float, float, float]:
        return torch.rand(()).item(), float(np.random.random()), random.random()

    def after(batches: Any) -> list[tuple[float, float, float]]:
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        return [own() for _ in batches]

    assert after(read(Drawn(10))) == after(range(3))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_loader_processes_draw_the_same_rows(workers: int) -> None:
    assert drawn(workers=workers, seed=3) == drawn(seed=3)


def test_another_seed_draws_other_rows() -> None:
    assert drawn(seed=1)[0][0] != drawn(seed=2)[0][0]


# Refusals


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_without_rows_is_refused(workers: int) -> None:
    with pytest.raises(ConfigError, match="its iterator gave no row") as caught:
        list(read(Count(0), workers=workers))
    assert (caught.value.key, caught.value.value) == ("dataset", "Count")


def test_a_stream_without_rows_is_refused_also_when_only_the_steps_would_end_it() -> None:
    with pytest.raises(ConfigError, match="its iterator gave no row"):
        list(read(Count(0), epochs=None, steps=5))


def test_fewer_rows_than_a_batch_with_drop_last_are_refused_with_the_size_of_a_batch() -> None:
    with pytest.raises(ConfigError, match="or fewer than a whole batch of 4") as caught:
        list(read(Count(3), drop_last=True))
    assert caught.value.fix.endswith("drop_last=false")


def read_apart(first: Any, second: Any) -> str:
    """What rank 1 says when it reads another dataset than rank 0."""
    ranks = Ranks(2)
    list(read(first, comm=ranks.comm(0)))
    with pytest.raises(
        ConfigError, match="dpexp splits an iterable dataset over the ranks"
    ) as caught:
        list(read(second, comm=ranks.comm(1)))
    assert caught.value.key == "dataset"
    return str(caught.value)


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (10, 9, "at step 2 one has 1 and another 2 of the global batch"),
        (10, 8, "at step 2 one has 0 and another 2 of the global batch, so 2 and more than 2"),
        (8, 10, "at step 2 one has 0 and another 2 of the global batch, so 2 and more than 2"),
        (10, 0, "at step 0 one has 0 and another 4 of the global batch"),
    ],
)
def test_ranks_whose_streams_end_apart_are_told_both_counts(
    first: int, second: int, text: str
) -> None:
    said = read_apart(Count(first), Count(second))
    assert "gives the ranks different numbers of rows" in said
    assert text in said


class Rows(Once):
    """Whole rows of any kind."""

    def __init__(self, *rows: Any) -> None:
        self.left = iter(rows)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.zeros(2), torch.ones(2)),
        (torch.zeros((), dtype=torch.bfloat16), torch.ones((), dtype=torch.bfloat16)),
        (np.zeros(2), np.ones(2)),
        ((torch.zeros(2), 3), (torch.zeros(2), 4)),
        ({"text": "a"}, {"text": "b"}),
        ({"a": 1}, {"b": 1}),
        (0.5, 0.25),
    ],
)
def test_ranks_that_read_different_rows_are_told_the_step(first: Any, second: Any) -> None:
    assert "gives the ranks different rows at step 0" in read_apart(Rows(first), Rows(second))


@pytest.mark.parametrize("workers", [0, 1])
def test_rows_that_make_no_batch_are_refused_from_a_loader_process_too(workers: int) -> None:
    text = ""
    try:
        list(read(Rows(torch.zeros(1), torch.zeros(2)), workers=workers))
    except ConfigError as error:
        text = str(error)
        error.__traceback__ = None  # it is a cycle that holds the loader processes
    assert "its rows cannot be put together to a batch" in text
