"""Fetching the rows of a map-style dataset, in the rank or by loader processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import make_config
from torch.utils.data import Dataset, get_worker_info

from dpexp.datasets import Rows
from dpexp.errors import ConfigError
from dpexp.loading import Batches, fetch_by_workers, fetch_here
from dpexp.schedule import Indices, Schedule

SCHEDULE = Schedule(5, 2, epochs=1, steps=None, drop_last=False, shuffle=False, seed=0)
TWICE = Schedule(5, 2, epochs=2, steps=None, drop_last=False, shuffle=True, seed=7)


class Squares(Dataset[Any]):
    """Row i is the pair (i, i * i)."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Any:
        if type(index) is not int:
            raise TypeError(f"an index must be an int, not {type(index).__name__}")
        return torch.tensor([float(index)]), index * index


class ManySquares(Squares):
    """The same, fetched many at a time."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Worker(Squares):
    """Each row tells the process that made it, and a random number of it."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        number = -1 if info is None else info.id
        return {"pid": os.getpid(), "worker": number, "drawn": torch.rand(()).item()}


def whole(rows: Indices) -> Indices:
    return rows


def fetch(
    dataset: Any,
    *,
    workers: int = 0,
    schedule: Schedule = SCHEDULE,
    choose: Callable[[Indices], Indices] = whole,
    seed: int = 0,
    **loader: Any,
) -> Batches:
    if not workers:
        return fetch_here(dataset, schedule, choose)
    settings = make_config(loader={"workers": workers, **loader}).loader
    return fetch_by_workers(dataset, schedule, choose, settings, seed, pin=False)


def fetched(dataset: Any, **how: Any) -> list[tuple[int, list[float], list[float]]]:
    batches = fetch(dataset, **how)
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
@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("workers", [1, 2])
def test_loader_processes_give_the_same_batches_in_the_same_order(
    dataset: Any, persistent: bool, workers: int
) -> None:
    how = {"schedule": TWICE, "choose": lambda rows: rows[:1]}
    here = fetched(dataset, **how)
    assert len(here) == 6
    assert fetched(dataset, workers=workers, persistent_workers=persistent, **how) == here


def test_without_loader_processes_rows_are_fetched_in_this_process() -> None:
    pids = [batch["pid"].tolist() for _, batch in fetch(Worker(4))]
    assert pids == [[os.getpid()] * 2] * 2 + [[os.getpid()]]


@pytest.mark.usefixtures("loader_ends")
@pytest.mark.parametrize(("persistent", "processes"), [(True, 2), (False, 4)])
def test_loader_processes_are_started_once_or_again_in_each_epoch(
    persistent: bool, processes: int
) -> None:
    batches = fetch(Worker(5), workers=2, persistent_workers=persistent, schedule=TWICE)
    pids = {pid for _, batch in batches for pid in batch["pid"].tolist()}
    assert os.getpid() not in pids
    assert len(pids) == processes


@pytest.mark.usefixtures("loader_ends")
@pytest.mark.parametrize("persistent", [True, False])
def test_what_loader_processes_draw_depends_on_the_seed_alone(persistent: bool) -> None:
    def drawn(seed: int) -> list[float]:
        how = {"workers": 2, "persistent_workers": persistent, "schedule": TWICE, "seed": seed}
        return [x for _, batch in fetch(Worker(5), **how) for x in batch["drawn"].tolist()]

    first = drawn(3)
    assert len(set(first)) == 10  # two processes, two epochs: no number twice
    assert drawn(3) == first
    assert set(drawn(1000)).isdisjoint(first)


def test_a_datasets_own_collate_fn_is_used() -> None:
    class Texts(Squares):
        @staticmethod
        def collate_fn(rows: list[Any]) -> str:
            return ",".join(str(square) for _, square in rows)

    assert [batch for _, batch in fetch(Texts(5))] == ["0,1", "4,9", "16"]


@pytest.mark.usefixtures("loader_ends")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("persistent", [True, False])
def test_rows_that_make_no_batch_are_the_same_refusal_in_a_loader_process(
    workers: int, persistent: bool
) -> None:
    class Uneven(Squares):
        def __getitem__(self, index: int) -> Any:
            return torch.zeros(index + 1)

    text = ""
    try:
        list(fetch(Uneven(5), workers=workers, persistent_workers=persistent))
    except ConfigError as error:
        text = str(error)
        error.__traceback__ = None  # it is a cycle that holds the loader processes
    assert text.startswith("dataset='Tensor': its rows cannot be put together to a batch: ")


def test_getitems_that_gives_another_number_of_rows_is_refused_with_both() -> None:
    class Forgetful(ManySquares):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [self[index] for index in indices[1:]]

    with pytest.raises(ConfigError, match="asked for 2 rows and gave 1"):
        list(fetch(Forgetful(5)))


@pytest.mark.usefixtures("loader_ends")
def test_a_loader_process_that_does_not_answer_in_time_is_an_error() -> None:
    class Stuck(Squares):
        def __getitem__(self, index: int) -> Any:
            threading.Event().wait(1)

    with pytest.raises(RuntimeError, match=r"timed out after 0\.2 seconds"):
        list(fetch(Stuck(5), workers=1, timeout_s=0.2))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent_workers", [True, False])
def test_batches_that_begin_later_are_those_of_the_whole(
    workers: int, *, persistent_workers: bool
) -> None:
    later = replace(TWICE, first=2)  # in the middle of the first of two epochs of three batches

    def read(schedule: Schedule) -> list[tuple[int, list[float]]]:
        batches = fetch(
            Squares(5), workers=workers, schedule=schedule, persistent_workers=persistent_workers
        )
        return [(batch.step, fetched[1].tolist()) for batch, fetched in batches]

    assert read(later) == read(TWICE)[2:]
