"""Images and tokens made on the fly."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, default_collate

from dpexp.datasets import images, tokens
from dpexp.errors import ConfigError

HUGE = 10**9
IMAGES: dict[str, int] = {
    "rows": HUGE,
    "channels": 3,
    "height": 5,
    "width": 7,
    "classes": 4,
    "seed": 0,
}
TOKENS: dict[str, int] = {"rows": HUGE, "length": 6, "vocabulary": 11, "seed": 0}
MAKERS: list[tuple[Any, dict[str, int]]] = [(images, IMAGES), (tokens, TOKENS)]

both = pytest.mark.parametrize(("make", "arguments"), MAKERS, ids=["images", "tokens"])


def same(left: Any, right: Any) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def test_an_image_is_a_float_tensor_with_a_whole_number_as_its_class() -> None:
    image, label = images(**IMAGES)[3]
    assert (image.shape, image.dtype) == ((3, 5, 7), torch.float32)
    assert (label.shape, label.dtype) == ((), torch.int64)


def test_a_row_of_tokens_is_followed_by_the_same_row_one_token_later() -> None:
    before, after = tokens(**TOKENS)[3]
    assert (before.shape, before.dtype) == ((6,), torch.int64)
    assert (after.shape, after.dtype) == ((6,), torch.int64)
    assert torch.equal(before[1:], after[:-1])


def test_pixels_are_uniform_from_0_to_below_1_and_classes_are_all_there() -> None:
    pixels, labels = images(**IMAGES).__getitems__(range(2000))
    assert 0 <= pixels.min() < 0.01
    assert 0.99 < pixels.max() < 1
    # 210,000 pixels: the mean is off by 0.0006, the variance by 0.0002 (one standard deviation)
    assert pixels.mean().item() == pytest.approx(127.5 / 256, abs=0.004)
    assert pixels.var().item() == pytest.approx(1 / 12, abs=0.002)
    assert torch.bincount(labels, minlength=4).tolist() == pytest.approx([500] * 4, abs=100)


def test_tokens_are_uniform_over_the_vocabulary() -> None:
    before, _ = tokens(**TOKENS).__getitems__(range(2000))
    counts = torch.bincount(before.flatten(), minlength=11)
    assert counts.tolist() == pytest.approx([12000 / 11] * 11, rel=0.15)


@both
@given(index=st.integers(0, HUGE - 1), others=st.lists(st.integers(0, HUGE - 1), max_size=3))
def test_a_row_is_the_same_whatever_is_fetched_with_it(
    make: Any, arguments: dict[str, int], index: int, others: list[int]
) -> None:
    alone = make(**arguments)[index]
    batch = make(**arguments).__getitems__([*others, index])
    assert same(alone, [column[-1] for column in batch])


@both
def test_a_batch_is_what_collating_its_rows_gives(make: Any, arguments: dict[str, int]) -> None:
    dataset = make(**arguments)
    batch = dataset.collate_fn(dataset.__getitems__([7, 0, 7]))
    assert same(batch, default_collate([dataset[7], dataset[0], dataset[7]]))
    assert all(column.is_contiguous() for column in batch)


@both
def test_the_seed_and_the_place_decide(make: Any, arguments: dict[str, int]) -> None:
    first = make(**arguments)[0][0]
    assert not torch.equal(first, make(**arguments)[1][0])
    assert not torch.equal(first, make(**{**arguments, "seed": 1})[0][0])
    # with one list of numbers as its source this seed would begin like seed 0 of row 1
    assert not torch.equal(make(**arguments)[1][0], make(**{**arguments, "seed": 2**32})[0][0])


@both
def test_the_number_of_rows_changes_no_row(make: Any, arguments: dict[str, int]) -> None:
    assert same(make(**arguments)[9], make(**{**arguments, "rows": 10})[9])


@both
def test_nothing_is_held(make: Any, arguments: dict[str, int]) -> None:
    dataset = make(**arguments)
    assert len(dataset) == HUGE
    dataset[HUGE - 1]
    packed = pickle.dumps(dataset)
    assert len(packed) < 500
    assert same(pickle.loads(packed)[5], dataset[5])


@both
@pytest.mark.parametrize("index", [-1, HUGE])
def test_a_row_that_is_not_there_is_an_index_error(
    make: Any, arguments: dict[str, int], index: int
) -> None:
    with pytest.raises(IndexError):
        make(**arguments)[index]


@both
@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_takes_it(make: Any, arguments: dict[str, int], workers: int) -> None:
    dataset = make(**{**arguments, "rows": 5})
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=2, num_workers=workers, collate_fn=dataset.collate_fn
    )
    got = [torch.cat(columns) for columns in zip(*loader, strict=True)]
    assert same(got, dataset.__getitems__(range(5)))


def are_shared(batch: Any) -> list[bool]:
    return [column.is_shared() for column in batch]


@both
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_process_makes_batches_where_its_rank_can_read_them(
    make: Any, arguments: dict[str, int], workers: int
) -> None:
    dataset = make(**{**arguments, "rows": 5})
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=5, num_workers=workers, collate_fn=are_shared
    )
    assert list(loader) == [[workers > 0, workers > 0]]


@both
def test_no_rows_make_an_empty_batch(make: Any, arguments: dict[str, int]) -> None:
    assert [len(column) for column in make(**arguments).__getitems__([])] == [0, 0]


@pytest.mark.parametrize(
    ("make", "arguments", "key"),
    [(make, arguments, key) for make, arguments in MAKERS for key in arguments],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_argument_that_is_too_small_is_refused(
    make: Any, arguments: dict[str, int], key: str
) -> None:
    value = -1 if key == "seed" else 0
    with pytest.raises(ConfigError) as caught:
        make(**{**arguments, key: value})
    assert (caught.value.key, caught.value.value) == (f"dataset.{key}", value)
