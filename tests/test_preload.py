"""A dataset that lies on the device as a whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from dpexp.datasets import Rows
from dpexp.errors import ConfigError
from dpexp.loading import fetch_here
from dpexp.preload import preload
from dpexp.schedule import Schedule

CPU = torch.device("cpu")


class Mixed(Dataset[Any]):
    """Rows of everything that a batch can hold."""

    def __init__(self, rows: int = 5) -> None:
        self.rows, self.asked = rows, 0

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        row = {"x": torch.full((2,), float(index)), "name": f"row {index}", "none": None}
        return row, index * index


class Texts(Mixed):
    """Two texts a row: as many as there are rows, when there are two."""

    def __getitem__(self, index: int) -> Any:
        return {"pair": [f"a{index}", f"b{index}"]}


def fetched(dataset: Any, indices: list[int]) -> Any:
    return dataset.collate_fn(dataset.__getitems__(np.array(indices, dtype=np.int64)))


def test_a_batch_is_the_one_that_the_dataset_itself_would_give() -> None:
    (x, y) = fetched(preload(Mixed(), CPU), [3, 0, 3])
    assert x["x"].tolist() == [[3.0, 3.0], [0.0, 0.0], [3.0, 3.0]]
    assert x["name"] == ["row 3", "row 0", "row 3"]
    assert x["none"] is None
    assert y.tolist() == [9, 0, 9]


def test_the_rows_of_a_built_in_dataset_are_taken_at_once() -> None:
    dataset = Rows(torch.arange(5.0).reshape(5, 1), torch.arange(5))
    x, y = fetched(preload(dataset, CPU), [4, 1])
    assert (x.tolist(), y.tolist()) == ([[4.0], [1.0]], [4, 1])


@pytest.mark.parametrize("dataset", [Mixed(), Rows(torch.arange(5.0))], ids=["own", "built in"])
def test_an_epoch_has_the_same_batches_as_without(dataset: Any) -> None:
    schedule = Schedule(5, 2, epochs=2, steps=None, drop_last=False, shuffle=True, seed=1)

    def shown(source: Any) -> list[str]:
        return [str(batch) for _, batch in fetch_here(source, schedule, lambda rows: rows[:1])]

    assert shown(preload(dataset, CPU)) == shown(dataset)


def test_each_row_is_read_once_and_before_the_first_batch() -> None:
    dataset = Mixed(5)
    loaded = preload(dataset, CPU)
    assert dataset.asked == 5
    fetched(loaded, [0, 1, 2])
    assert dataset.asked == 5
    assert len(loaded) == 5


def test_the_tensors_lie_on_the_device() -> None:
    x, y = fetched(preload(Rows(torch.zeros(3, 2), torch.zeros(3)), torch.device("meta")), [0])
    assert (x.device.type, y.device.type) == ("meta", "meta")


def test_as_many_texts_in_a_row_as_rows_stay_texts_of_their_rows() -> None:
    batch = fetched(preload(Texts(2), CPU), [1])
    assert [list(entry) for entry in batch["pair"]] == [["a1"], ["b1"]]


def test_a_dataset_that_makes_its_own_batches_is_refused() -> None:
    class Own(Mixed):
        @staticmethod
        def collate_fn(rows: list[Any]) -> Any:
            return rows

    with pytest.raises(ConfigError, match="its own collate_fn makes batches") as caught:
        preload(Own(), CPU)
    assert (caught.value.key, caught.value.fix) == ("loader.preload", "loader.preload=none")
    assert "the dataset Own cannot" in str(caught.value)


@pytest.mark.parametrize("odd", [torch.zeros(()), torch.zeros(4, 5)], ids=["0-dim", "turned"])
def test_a_tensor_that_does_not_begin_with_the_row_is_refused(odd: torch.Tensor) -> None:
    class Built(Mixed):
        """As if it were dpexp's own, whose batches are taken as they are."""

        __module__ = "dpexp.datasets.built"

        def __getitems__(self, indices: Any) -> Any:
            return torch.zeros(len(indices), 2), odd

        @staticmethod
        def collate_fn(batch: Any) -> Any:
            return batch

    with pytest.raises(ConfigError, match="the row as its first dimension"):
        preload(Built(5), CPU)


def test_rows_that_make_no_batch_are_refused_as_elsewhere() -> None:
    class Uneven(Mixed):
        def __getitem__(self, index: int) -> Any:
            return torch.zeros(index)

    with pytest.raises(ConfigError, match="cannot be put together to a batch"):
        preload(Uneven(), CPU)
