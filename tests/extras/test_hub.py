"""Datasets of Hugging Face's library, on folders that the tests make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from library import library
from torch.utils.data import default_collate

from dpexp.datasets import hf
from dpexp.errors import ConfigError

datasets = library("datasets")

COLUMNS = {
    "text": ["one", "two", "three"],
    "ids": [[1, 2], [3, 4], [5, 6]],
    "score": [0.5, 1.5, 2.5],
    "label": [0, 1, 1],
}


@pytest.fixture(autouse=True)
def no_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's progress bars would start a thread that stays."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)


@pytest.fixture
def one(tmp_path: Path) -> str:
    """A saved dataset without splits."""
    datasets.Dataset.from_dict(COLUMNS).save_to_disk(tmp_path / "one")
    return str(tmp_path / "one")


@pytest.fixture
def several(tmp_path: Path) -> str:
    """A saved dataset with a split of three rows and one of two."""
    train = datasets.Dataset.from_dict(COLUMNS)
    both = datasets.DatasetDict({"train": train, "test": train.select([0, 2])})
    both.save_to_disk(tmp_path / "several")
    return str(tmp_path / "several")


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder with a file of comma-separated values; the library's cache is the test's own."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "table"
    folder.mkdir()
    (folder / "train.csv").write_text("x,y\n1.5,0\n2.5,1\n", encoding="utf-8")
    return str(folder)


def refusal(path: str, split: str | None = None, columns: list[str] | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        hf(path, split, columns)
    return caught.value


def test_rows_are_dicts_of_tensors_and_strings(one: str) -> None:
    dataset = hf(one, None, None)
    assert len(dataset) == 3
    row = dataset[1]
    assert set(row) == set(COLUMNS)
    assert row["text"] == "two"
    assert torch.equal(row["ids"], torch.tensor([3, 4]))
    assert (row["score"].dtype, row["score"].item()) == (torch.float32, 1.5)
    assert (row["label"].dtype, row["label"].item()) == (torch.int64, 1)


def test_rows_can_be_put_together_to_a_batch(one: str) -> None:
    dataset = hf(one, None, None)
    batch = default_collate(dataset.__getitems__([2, 0]))
    assert batch["text"] == ["three", "one"]
    assert batch["ids"].tolist() == [[5, 6], [1, 2]]
    assert batch["label"].tolist() == [1, 0]


def test_only_the_named_columns_are_kept_in_their_order(one: str) -> None:
    assert list(hf(one, None, ["label", "ids"])[0]) == ["label", "ids"]


def test_a_split_is_taken(several: str) -> None:
    assert [len(hf(several, name, None)) for name in ("train", "test")] == [3, 2]
    assert hf(several, "test", ["text"])[1] == {"text": "three"}


def test_a_path_may_begin_with_the_home_folder(one: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(Path(one).parent))
    try:
        assert len(hf("~/one", None, None)) == 3
    finally:
        monkeypatch.undo()


def test_a_folder_of_files_is_loaded(table: str) -> None:
    dataset = hf(table, "train", ["x"])
    assert [row["x"].item() for row in dataset] == [1.5, 2.5]


@pytest.mark.parametrize("made", ["several", "table"])
def test_splits_of_which_none_is_chosen_are_listed(
    made: str, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(made)
    error = refusal(path)
    assert (error.key, error.value) == ("dataset.split", None)
    assert error.allowed == {"several": "train, test", "table": "train"}[made]
    assert error.fix == "dataset.split=train"


def test_a_split_that_is_not_there_is_refused_with_those_that_are(several: str) -> None:
    error = refusal(several, "validation")
    assert (error.key, error.value) == ("dataset.split", "validation")
    assert error.allowed == "train, test"


def test_a_split_that_files_do_not_have_is_refused(table: str) -> None:
    error = refusal(table, "validation")
    assert (error.key, error.value) == ("dataset.split", "validation")
    assert "train" in str(error)


def test_a_split_of_a_dataset_without_splits_is_refused(one: str) -> None:
    error = refusal(one, "train")
    assert (error.key, error.fix) == ("dataset.split", "dataset.split=null")


@pytest.mark.parametrize("columns", [["ids", "lable"], []])
def test_columns_that_are_not_there_are_refused_with_those_that_are(
    one: str, columns: list[str]
) -> None:
    error = refusal(one, None, columns)
    assert (error.key, error.value) == ("dataset.columns", columns)
    assert error.allowed == "text, ids, score, label"


def test_a_hub_that_cannot_be_reached_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach 'some/data' on the Hub\nMore about it")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    error = refusal("some/data", "train")
    assert (error.key, error.value) == ("dataset.path", "some/data")
    assert error.problem == "cannot be loaded: Couldn't reach 'some/data' on the Hub"
    assert "save_to_disk" in error.fix


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    error = refusal(str(tmp_path), "train")
    assert error.key == "dataset.path"
    assert "\n" not in str(error)


def test_a_damaged_folder_is_refused(one: str) -> None:
    (Path(one) / "state.json").write_text("{", encoding="utf-8")
    assert refusal(one).key == "dataset.path"


def test_a_stream_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = datasets.Dataset.from_dict(COLUMNS).to_iterable_dataset()
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: stream)
    rows = list(hf("some/data", "train", ["ids"]))
    assert [row["ids"].tolist() for row in rows] == COLUMNS["ids"]
