"""From a dataset of any kind to the batches of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from builders import FakeComm, make_facts, make_plan_for
from torch.utils.data import Dataset, IterableDataset

from dpexp.datasets import Rows
from dpexp.errors import ConfigError
from dpexp.feed import Feed, is_stream, make_feed, make_schedule, pins, rows_in
from dpexp.schema import Task
from dpexp.schema_workload import Preload

CPU = torch.device("cpu")


class Map(Dataset[Any]):
    """The rows 0, 1, 2, …"""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> float:
        return float(index)


class Stream(IterableDataset[float]):
    """The same without a beginning to go back to; that it has a length does not matter."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[float]:
        return iter([0.0, 1.0, 2.0, 3.0, 4.0])


class Plain:
    """An iterable that knows nothing of torch."""

    def __iter__(self) -> Iterator[float]:
        return iter([0.0, 1.0, 2.0, 3.0, 4.0])


class Unsized(Dataset[Any]):
    """Rows without end."""

    def __getitem__(self, index: int) -> int:
        return index


def feed(dataset: Any, **overrides: Any) -> Feed:
    plan = make_plan_for(**{"batch_size": 2, "shuffle": False, **overrides})
    return make_feed(dataset, plan, lambda rows: rows, FakeComm(), CPU)


def rows_of(made: Feed) -> list[list[float]]:
    return [fetched.tolist() for _, fetched in made.batches]


FIVE = [[0.0, 1.0], [2.0, 3.0], [4.0]]


@pytest.mark.parametrize(
    ("dataset", "stream"),
    [
        (Map(5), False),
        (Rows(torch.zeros(5)), False),
        ([1, 2, 3], False),
        (Unsized(), False),
        (Stream(), True),
        (Plain(), True),
        (iter([1]), True),
    ],
)
def test_what_can_only_be_read_from_its_beginning_is_a_stream(dataset: Any, stream: bool) -> None:
    assert is_stream(dataset) is stream


@pytest.mark.parametrize(("dataset", "steps"), [(Map(5), 3), (Stream(), None), (Plain(), None)])
def test_rows_come_in_batches_and_only_a_length_tells_how_many(
    dataset: Any, steps: int | None
) -> None:
    made = feed(dataset, warmup_steps=0)
    assert (made.steps, made.notes) == (steps, ())
    assert rows_of(made) == FIVE


@pytest.mark.parametrize("dataset", [Map(5), Stream()], ids=["map", "stream"])
def test_the_config_says_how_rows_are_cut(dataset: Any) -> None:
    made = feed(dataset, epochs=None, steps=5, drop_last=True, warmup_steps=0)
    assert rows_of(made) == [FIVE[0], FIVE[1]] * 2 + [FIVE[0]]


def test_a_preloaded_dataset_gives_the_same_batches_on_the_device() -> None:
    plan = make_plan_for(batch_size=2, shuffle=False, loader={"preload": Preload.device})
    meta = torch.device("meta")
    made = make_feed(Map(5), plan, lambda rows: rows, FakeComm(), CPU)
    assert rows_of(made) == FIVE
    there = make_feed(Map(5), plan, lambda rows: rows, FakeComm(), meta)
    assert {fetched.device.type for _, fetched in there.batches} == {"meta"}


def test_a_stream_cannot_be_preloaded() -> None:
    with pytest.raises(ConfigError, match="Stream has no length") as caught:
        feed(Stream(), loader={"preload": Preload.device})
    assert (caught.value.key, caught.value.fix) == ("loader.preload", "loader.preload=none")


def test_shuffle_has_no_effect_on_a_stream_and_that_is_noted() -> None:
    made = feed(Stream(), shuffle=True)
    assert rows_of(made) == FIVE
    (note,) = made.notes
    assert "shuffle has no effect" in note


def test_more_steps_than_the_data_has_are_noted_with_both_numbers() -> None:
    (note,) = feed(Map(5), steps=7).notes
    assert note.startswith("steps=7 were asked for, but 1 epoch(s) of 5 rows have 3")


def test_an_evaluation_that_leaves_rows_out_is_noted() -> None:
    (note,) = feed(Map(5), task=Task.evaluate, steps=2).notes
    assert note.startswith("steps=2 leaves 1 of 5 rows out of the evaluation")
    assert feed(Map(5), task=Task.evaluate, steps=3).notes == ()
    assert feed(Map(5), task=Task.forward, steps=2).notes == ()


def test_that_all_steps_are_warm_up_is_noted() -> None:
    (note,) = feed(Map(5), warmup_steps=3).notes
    assert "all 3 steps are warm-up steps" in note
    assert note.endswith("epochs=null steps=20 repeats the data, or warmup_steps=0")
    assert feed(Map(5), warmup_steps=2).notes == ()


@pytest.mark.parametrize("dataset", [Unsized(), 3], ids=["no length", "int"])
def test_what_is_neither_of_the_two_kinds_is_refused_by_its_type(dataset: Any) -> None:
    with pytest.raises(ConfigError, match="has neither __len__ and __getitem__") as caught:
        rows_in(dataset)
    assert (caught.value.key, caught.value.value) == ("dataset", type(dataset).__name__)


def test_rows_are_counted_and_none_are_refused() -> None:
    assert rows_in(Map(7)) == 7
    with pytest.raises(ConfigError, match="it has 0 rows"):
        feed(Map(0))


def test_too_few_rows_for_a_whole_batch_are_refused_with_both_counts() -> None:
    plan = make_plan_for(batch_size=30, drop_last=True)
    with pytest.raises(ConfigError, match="the 20 rows make no whole batch of 30") as caught:
        make_schedule(plan, 20)
    assert caught.value.key == "drop_last"


CUDA = make_facts(accelerator="cuda", num_accelerators=1, nccl=True)


@pytest.mark.parametrize(
    ("device", "asked", "pinned"),
    [("cuda", None, True), ("cuda", False, False), ("cuda", True, True), ("cpu", None, False)],
)
def test_memory_is_pinned_on_cuda_unless_the_config_says_otherwise(
    device: str, asked: bool | None, pinned: bool
) -> None:
    plan = make_plan_for(facts=CUDA, device=device, loader={"pin_memory": asked})
    assert pins(plan) is pinned
