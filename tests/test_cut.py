"""Cutting a batch into micro-batches."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from builders import make_context
from hypothesis import example, given
from hypothesis import strategies as st

from dpexp.batches import Inputs, cut
from dpexp.parallel import Strategy, make_strategy
from dpexp.schema import StrategyName, Task

Pair = namedtuple("Pair", "left right")
FIVE = torch.arange(5.0)


def args_of(pieces: list[Inputs]) -> list[Any]:
    return [piece.args[0] for piece in pieces]


def cut_one(value: Any, sizes: tuple[int, ...], rows: int = 5) -> list[Any]:
    return args_of(cut(Inputs((value,), {}, None), rows, sizes))


def test_tensors_are_cut_along_the_first_dimension() -> None:
    pieces = cut_one(FIVE.reshape(5, 1), (2, 2, 1))
    assert [piece.tolist() for piece in pieces] == [[[0.0], [1.0]], [[2.0], [3.0]], [[4.0]]]


def test_a_piece_is_a_view_of_the_batch() -> None:
    assert cut_one(FIVE, (2, 3))[1].data_ptr() == FIVE[2:].data_ptr()


@pytest.mark.parametrize(
    "value",
    [torch.zeros(()), torch.zeros(4, 5), 3, 0.5, None, "text", ["a", "b"], ("a",) * 4],
    ids=["0-dim", "other rows", "number", "float", "none", "text", "short list", "short tuple"],
)
def test_what_is_not_one_entry_per_row_is_repeated(value: Any) -> None:
    for piece in cut_one(value, (2, 3)):
        assert piece is value or piece == value


@pytest.mark.parametrize(
    "entries",
    [list("abcde"), tuple("abcde"), [1, 2, 3, 4, 5], [None, 1, "b", 2.5, True]],
    ids=["texts", "tuple of texts", "numbers", "mixed"],
)
def test_one_plain_entry_per_row_is_cut(entries: Any) -> None:
    assert cut_one(entries, (2, 2, 1)) == [entries[:2], entries[2:4], entries[4:]]


def test_containers_of_any_depth_keep_their_structure_and_type() -> None:
    value = {"x": (FIVE, None), "pair": Pair(FIVE, list("abcde")), "n": 7}
    first, second = cut_one(value, (3, 2))
    assert list(first) == ["x", "pair", "n"]
    assert type(first["pair"]) is Pair
    assert (first["x"][0].tolist(), second["x"][0].tolist()) == ([0.0, 1.0, 2.0], [3.0, 4.0])
    assert (first["pair"].right, second["pair"].right) == (["a", "b", "c"], ["d", "e"])
    assert (first["x"][1], second["n"]) == (None, 7)


def test_as_many_tensors_in_a_list_as_rows_are_columns_not_rows() -> None:
    columns = [torch.arange(2), torch.arange(2) + 10]
    first, second = cut_one(columns, (1, 1), rows=2)
    assert [column.tolist() for column in first] == [[0], [10]]
    assert [column.tolist() for column in second] == [[1], [11]]


def test_keywords_and_target_are_cut_too() -> None:
    pieces = cut(Inputs((), {"x": FIVE, "flag": True}, FIVE), 5, (3, 2))
    assert [piece.kwargs["x"].tolist() for piece in pieces] == [[0.0, 1.0, 2.0], [3.0, 4.0]]
    assert [piece.target.tolist() for piece in pieces] == [[0.0, 1.0, 2.0], [3.0, 4.0]]
    assert [piece.kwargs["flag"] for piece in pieces] == [True, True]


def test_a_micro_batch_of_no_rows_gets_those_of_the_first_one() -> None:
    pieces = args_of(cut(Inputs((FIVE,), {}, None), 5, (2, 2, 1, 0), longest=2))
    assert [piece.tolist() for piece in pieces] == [[0.0, 1.0], [2.0, 3.0], [4.0], [0.0, 1.0]]


def test_with_no_row_of_its_own_every_micro_batch_is_borrowed() -> None:
    pieces = args_of(cut(Inputs((FIVE,), {}, None), 5, (0, 0), longest=3))
    assert [piece.tolist() for piece in pieces] == [[0.0, 1.0, 2.0]] * 2


def test_constants_of_the_call_are_not_cut() -> None:
    inputs = Inputs((FIVE,), {"sizes": [1, 2, 3, 4, 5], "names": list("abcde")}, None)
    first, second = cut(inputs, 5, (2, 3), constants={"sizes"})
    assert first.kwargs == {"sizes": [1, 2, 3, 4, 5], "names": ["a", "b"]}
    assert second.kwargs == {"sizes": [1, 2, 3, 4, 5], "names": ["c", "d", "e"]}


def test_the_batch_itself_is_not_changed() -> None:
    value = {"x": FIVE, "names": list("abcde")}
    cut_one(value, (2, 3))
    assert (len(value["x"]), len(value["names"])) == (5, 5)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 3))
def test_the_pieces_put_together_are_the_batch(sizes: list[int], width: int) -> None:
    rows = sum(sizes)
    table, names = torch.arange(rows * width).reshape(rows, width), [str(i) for i in range(rows)]
    pieces = cut(Inputs((table,), {"names": names}, {"y": table[:, 0]}), rows, sizes)
    assert [len(piece.args[0]) for piece in pieces] == sizes
    assert torch.equal(torch.cat([piece.args[0] for piece in pieces]), table)
    assert torch.equal(torch.cat([piece.target["y"] for piece in pieces]), table[:, 0])
    assert [name for piece in pieces for name in piece.kwargs["names"]] == names


# The strategies' micro-batches


def on_rank(strategy: str, rank: int, world_size: int, accumulate: int) -> Strategy:
    devices = world_size if strategy in ("ddp", "fsdp") else 2
    context = make_context(
        strategy,
        1 if strategy == "none" else devices,
        rank=rank,
        world_size=world_size,
        accumulate=accumulate,
        task=Task.train,
        batch_size=64,
    )
    return make_strategy(StrategyName(strategy), context)


def micro(strategy: Strategy, global_rows: int) -> list[tuple[list[int], int]]:
    """Places in the global batch, and own rows, of each micro-batch."""
    rows = torch.from_numpy(strategy.choose_rows(np.arange(global_rows)))
    pieces = strategy.micro_batches(Inputs((rows,), {}, None), global_rows)
    return [(inputs.args[0].tolist(), own) for inputs, own in pieces]


@pytest.mark.parametrize("strategy", ["none", "ddp"])
def test_without_accumulation_a_step_is_one_micro_batch_as_it_is(strategy: str) -> None:
    inputs = Inputs((FIVE,), {}, None)
    ((piece, own),) = on_rank(strategy, 0, 1, 1).micro_batches(inputs, 5)
    assert (piece is inputs, own) == (True, 5)


def test_a_single_process_cuts_the_whole_batch() -> None:
    assert micro(on_rank("none", 0, 1, 3), 7) == [([0, 1, 2], 3), ([3, 4, 5], 3), ([6], 1)]
    assert micro(on_rank("none", 0, 1, 3), 2) == [([0], 1), ([1], 1)]  # not an empty third one


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_every_rank_has_as_many_micro_batches_as_the_first(strategy: str) -> None:
    # 9 rows on 4 ranks are 3, 3, 3 and 0; in 2 micro-batches 2 + 1, and the idle rank borrows.
    ranks = [micro(on_rank(strategy, rank, 4, 2), 9) for rank in range(4)]
    assert ranks[:3] == [
        [([0, 1], 2), ([2], 1)],
        [([3, 4], 2), ([5], 1)],
        [([6, 7], 2), ([8], 1)],
    ]
    assert [own for _, own in ranks[3]] == [0, 0]


def test_a_rank_with_fewer_rows_borrows_for_its_last_micro_batches() -> None:
    # 7 rows on 2 ranks are 4 and 3; in 4 micro-batches of one row each, the last one borrowed.
    assert micro(on_rank("ddp", 0, 2, 4), 7) == [([0], 1), ([1], 1), ([2], 1), ([3], 1)]
    assert micro(on_rank("ddp", 1, 2, 4), 7) == [([4], 1), ([5], 1), ([6], 1), ([4], 0)]


def test_an_idle_ranks_micro_batches_are_no_larger_than_the_others() -> None:
    assert [len(rows) for rows, _ in micro(on_rank("ddp", 3, 4, 2), 9)] == [2, 2]


@example(13, 2, 6)  # 7 rows in micro-batches of 2, but 6 rows in micro-batches of 1
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 6))
def test_each_row_of_a_step_counts_once(rows: int, world_size: int, accumulate: int) -> None:
    counts, found = set(), []
    for rank in range(world_size):
        pieces = micro(on_rank("ddp", rank, world_size, accumulate), rows)
        counts.add(len(pieces))
        found += [row for places, own in pieces for row in places[:own]]
        assert all(places for places, _ in pieces)  # no forward without rows
    assert len(counts) == 1
    assert found == list(range(rows))


@pytest.mark.parametrize("accumulate", [1, 2, 3, 5])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", ["none", "ddp", "fsdp"])
def test_the_weighted_losses_of_all_micro_batches_are_the_mean_over_the_step(
    strategy: str, world_size: int, accumulate: int
) -> None:
    # 0, 1, 4, 9, 16: 30 over 5 rows.
    world_size = 1 if strategy == "none" else world_size
    total = 0.0
    for rank in range(world_size):
        own = on_rank(strategy, rank, world_size, accumulate)
        rows = torch.from_numpy(own.choose_rows(np.arange(5))).float()
        for inputs, count in own.micro_batches(Inputs((rows,), {}, None), 5):
            total += own.weigh((inputs.args[0] ** 2).mean(), count, 5).item()
    assert total / world_size == pytest.approx(6.0, abs=1e-5)


def test_a_scalar_argument_beside_as_many_rows_as_arguments_is_not_taken_for_a_row() -> None:
    x, scale = torch.arange(4.0).reshape(2, 2), torch.tensor(3.0)
    first, second = cut(Inputs((x, scale), {}, None), 2, (1, 1))
    assert (first.args[0].tolist(), first.args[1].item()) == ([[0.0, 1.0]], 3.0)
    assert (second.args[0].tolist(), second.args[1].item()) == ([[2.0, 3.0]], 3.0)
