"""The one schedule of global batches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpexp.schedule import EpochOrders, Schedule, chunk_of, chunk_sizes


def make_schedule(
    num_rows: int = 10,
    batch_rows: int = 4,
    epochs: int | None = 1,
    steps: int | None = None,
    drop_last: bool = False,
    shuffle: bool = False,
    seed: int = 0,
) -> Schedule:
    return Schedule(num_rows, batch_rows, epochs, steps, drop_last, shuffle, seed)


def rows_of(schedule: Schedule) -> list[list[int]]:
    return [batch.indices.tolist() for batch in schedule]


@pytest.mark.parametrize(
    ("rows", "devices", "sizes"),
    [
        (5, 4, (2, 2, 1, 0)),
        (9, 4, (3, 3, 3, 0)),
        (6, 4, (2, 2, 2, 0)),
        (10, 4, (3, 3, 3, 1)),
        (10, 8, (2, 2, 2, 2, 2, 0, 0, 0)),
        (17, 8, (3, 3, 3, 3, 3, 2, 0, 0)),
        (25, 8, (4, 4, 4, 4, 4, 4, 1, 0)),
        (36, 7, (6, 6, 6, 6, 6, 6, 0)),
        (3, 4, (1, 1, 1, 0)),
        (30, 3, (10, 10, 10)),
        (1, 1, (1,)),
        (0, 3, (0, 0, 0)),
    ],
)
def test_chunk_sizes_are_those_of_torch_chunk_with_a_zero_for_each_idle_device(
    rows: int, devices: int, sizes: tuple[int, ...]
) -> None:
    assert chunk_sizes(rows, devices) == sizes


@pytest.mark.parametrize(
    ("device", "rows"), [(0, [7, 3, 9]), (1, [1, 0, 2]), (2, [8, 4, 6]), (3, [])]
)
def test_nine_rows_on_four_devices_are_three_chunks_of_three(device: int, rows: list[int]) -> None:
    indices = np.array([7, 3, 9, 1, 0, 2, 8, 4, 6])
    assert chunk_of(indices, device, 4).tolist() == rows


def test_no_rows_give_every_device_an_empty_chunk() -> None:
    empty = np.empty(0, dtype=np.int64)
    assert [len(chunk_of(empty, device, 3)) for device in range(3)] == [0, 0, 0]


def test_without_shuffle_the_rows_come_in_their_own_order_and_the_last_batch_is_short() -> None:
    assert rows_of(make_schedule()) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_drop_last_leaves_out_the_short_batch() -> None:
    assert rows_of(make_schedule(drop_last=True)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_drop_last_keeps_a_last_batch_that_is_full() -> None:
    assert rows_of(make_schedule(num_rows=8, drop_last=True)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_steps_and_epochs_are_numbered_over_the_whole_run() -> None:
    batches = list(make_schedule(epochs=2))
    assert [(batch.step, batch.epoch) for batch in batches] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (3, 1),
        (4, 1),
        (5, 1),
    ]


@pytest.mark.parametrize(
    ("epochs", "steps", "drop_last", "length"),
    [
        (1, None, False, 3),
        (1, None, True, 2),
        (4, None, False, 12),
        (4, 5, False, 5),
        (1, 5, False, 3),  # the data ends before the cap
        (None, 7, False, 7),
        (None, 7, True, 7),
    ],
)
def test_length_is_the_number_of_batches(
    epochs: int | None, steps: int | None, drop_last: bool, length: int
) -> None:
    schedule = make_schedule(epochs=epochs, steps=steps, drop_last=drop_last)
    assert len(schedule) == length
    assert len(list(schedule)) == length


def test_null_epochs_repeat_the_data_until_the_steps_are_done() -> None:
    schedule = make_schedule(num_rows=3, batch_rows=2, epochs=None, steps=5)
    assert rows_of(schedule) == [[0, 1], [2], [0, 1], [2], [0, 1]]


@pytest.mark.parametrize(("epochs", "steps"), [(3, None), (None, 7)])
def test_nothing_is_left_when_drop_last_meets_a_batch_larger_than_the_data(
    epochs: int | None, steps: int | None
) -> None:
    schedule = make_schedule(num_rows=3, batch_rows=4, epochs=epochs, steps=steps, drop_last=True)
    assert len(schedule) == 0
    assert list(schedule) == []


def test_a_batch_larger_than_the_data_is_one_short_batch() -> None:
    assert rows_of(make_schedule(num_rows=3, batch_rows=100)) == [[0, 1, 2]]


@given(
    num_rows=st.integers(1, 60),
    batch_rows=st.integers(1, 70),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 2**63),
    shuffle=st.booleans(),
)
def test_every_row_comes_exactly_once_per_epoch(
    num_rows: int, batch_rows: int, epochs: int, seed: int, shuffle: bool
) -> None:
    schedule = make_schedule(num_rows, batch_rows, epochs, seed=seed, shuffle=shuffle)
    seen: dict[int, list[int]] = {epoch: [] for epoch in range(epochs)}
    for batch in schedule:
        assert 1 <= len(batch.indices) <= batch_rows
        seen[batch.epoch].extend(batch.indices.tolist())
    assert [sorted(rows) for rows in seen.values()] == [list(range(num_rows))] * epochs


@given(
    num_rows=st.integers(1, 60),
    batch_rows=st.integers(1, 70),
    seed=st.integers(0, 2**32),
)
def test_drop_last_drops_only_the_rows_of_the_short_batch(
    num_rows: int, batch_rows: int, seed: int
) -> None:
    whole = rows_of(make_schedule(num_rows, batch_rows, seed=seed, shuffle=True))
    kept = rows_of(make_schedule(num_rows, batch_rows, seed=seed, shuffle=True, drop_last=True))
    assert kept == [rows for rows in whole if len(rows) == batch_rows]


@given(rows=st.integers(0, 200), devices=st.integers(1, 20))
def test_the_chunks_of_all_ranks_put_together_are_the_global_batch(rows: int, devices: int) -> None:
    indices = np.arange(1000, 1000 + rows)
    chunks = [chunk_of(indices, device, devices).tolist() for device in range(devices)]
    assert [row for chunk in chunks for row in chunk] == indices.tolist()
    assert tuple(len(chunk) for chunk in chunks) == chunk_sizes(rows, devices)


@given(rows=st.integers(1, 200), devices=st.integers(1, 20))
def test_idle_devices_are_always_the_last_ones(rows: int, devices: int) -> None:
    sizes = chunk_sizes(rows, devices)
    assert len(sizes) == devices
    assert list(sizes) == sorted(sizes, reverse=True)


@given(
    num_rows=st.integers(1, 60),
    seed=st.integers(0, 2**32),
    one=st.integers(1, 70),
    other=st.integers(1, 70),
)
def test_the_order_does_not_depend_on_the_batch_size(
    num_rows: int, seed: int, one: int, other: int
) -> None:
    orders = [
        [
            row
            for rows in rows_of(make_schedule(num_rows, size, epochs=2, seed=seed, shuffle=True))
            for row in rows
        ]
        for size in (one, other)
    ]
    assert orders[0] == orders[1]


def test_the_order_of_an_epoch_is_the_same_for_the_same_seed() -> None:
    assert EpochOrders(50, 3, True).of(1).tolist() == EpochOrders(50, 3, True).of(1).tolist()


def test_the_order_of_an_epoch_does_not_depend_on_global_generators() -> None:
    np.random.seed(1)
    first = EpochOrders(50, 3, True).of(1).tolist()
    np.random.seed(2)
    assert EpochOrders(50, 3, True).of(1).tolist() == first


@pytest.mark.parametrize(("seed", "epoch"), [(3, 2), (4, 1), (1, 3)])
def test_another_seed_or_epoch_gives_another_order(seed: int, epoch: int) -> None:
    assert EpochOrders(50, seed, True).of(epoch).tolist() != EpochOrders(50, 3, True).of(1).tolist()


@pytest.mark.parametrize("first", [0, 1, 3, 4, 7, 11, 12])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_schedule_that_begins_later_has_the_same_batches(first: int, *, shuffle: bool) -> None:
    whole = Schedule(10, 3, 3, None, False, shuffle, 5)  # 4 batches an epoch, the last of one row
    later = Schedule(10, 3, 3, None, False, shuffle, 5, first)
    assert len(later) == len(whole) == 12
    assert [(b.step, b.epoch, b.indices.tolist()) for b in later] == [
        (b.step, b.epoch, b.indices.tolist()) for b in list(whole)[first:]
    ]
