"""Targets that a cross-entropy leaves out, on any number of ranks and in any number of pieces."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import FakeComm, make_context
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from dpexp.batches import Inputs
from dpexp.losses import IGNORED, make_loss
from dpexp.masking import MaskedTargets
from dpexp.parallel import Strategy, make_strategy
from dpexp.schedule import chunk_sizes
from dpexp.schema import StrategyName
from dpexp.training import Training

X = IGNORED
# Five rows of three tokens; 3, 1, 0, 2 and 3 of them count, 9 in all.
TARGETS = torch.tensor([[0, 1, 1], [X, X, 0], [X, X, X], [1, 0, X], [1, 1, 0]])
ROWS = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0))


def share_of(target: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """A rank's chunk of the rows; an idle one borrows chunk 0."""
    sizes = chunk_sizes(len(target), world_size)
    begin = sum(sizes[:rank])
    return target[begin : begin + sizes[rank]] if sizes[rank] else target[: sizes[0]]


def comm_of(target: torch.Tensor, rank: int, world_size: int) -> FakeComm:
    """A rank whose peers bring what they count of `target`."""
    sizes = chunk_sizes(len(target), world_size)
    peers = [r for r in range(world_size) if r != rank and sizes[r]]
    left_out = [share_of(target, peer, world_size) == X for peer in peers]
    counted = float(sum(int((~each).sum()) for each in left_out))
    masked = float(any(bool(each.any()) for each in left_out))
    return FakeComm(rank, world_size, peers_sum=[counted], peers_max=masked)


def counted(target: torch.Tensor, rank: int, world_size: int, *, applies: bool = True) -> Any:
    own = chunk_sizes(len(target), world_size)[rank]
    masked = MaskedTargets(comm_of(target, rank, world_size), applies=applies)
    return masked.counted(share_of(target, rank, world_size), own)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_every_rank_counts_the_targets_of_all(world_size: int) -> None:
    assert [counted(TARGETS, rank, world_size) for rank in range(world_size)] == [9.0] * world_size


def test_a_rank_without_masked_targets_of_its_own_counts_as_well() -> None:
    target = torch.tensor([0, 1, X, 1])
    assert [counted(target, rank, 2) for rank in (0, 1)] == [3.0, 3.0]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_where_nothing_is_masked_rows_weigh(world_size: int) -> None:
    target = torch.tensor([0, 1, 2, 0, 1])
    masked = [
        MaskedTargets(comm_of(target, rank, world_size), applies=True) for rank in range(world_size)
    ]
    for rank, each in enumerate(masked):
        own = share_of(target, rank, world_size)
        assert [each.counted(own, len(own)) for _ in range(3)] == [None] * 3
        assert each.notes() == ()


@pytest.mark.parametrize(
    "target",
    [None, "text", {"labels": TARGETS}, torch.full((3, 2), float(X))],
    ids=["none", "text", "dict", "floats"],
)
def test_what_holds_no_classes_is_not_masked(target: Any) -> None:
    masked = MaskedTargets(FakeComm(0, 2, peers_sum=[0.0]), applies=True)
    assert masked.counted(target, 3) is None
    assert masked.notes() == ()


def test_another_loss_meets_no_rank_and_counts_nothing() -> None:
    class Alone(FakeComm):
        def max(self, value: float) -> float:
            raise AssertionError("met")

        def sum(self, values: torch.Tensor) -> torch.Tensor:
            raise AssertionError("met")

    masked = MaskedTargets(Alone(0, 2), applies=False)
    assert masked.counted(TARGETS, 5) is None
    assert masked.notes() == ()


def test_the_ranks_meet_once_where_nothing_is_masked_and_each_step_where_something_is() -> None:
    class Counting(FakeComm):
        met: list[str]

        def max(self, value: float) -> float:
            self.met.append("max")
            return super().max(value)

        def sum(self, values: torch.Tensor) -> torch.Tensor:
            self.met.append("sum")
            return super().sum(values)

    for target, expected in ((TARGETS[:1], ["max"]), (TARGETS, ["max", "sum", "sum", "sum"])):
        comm = Counting(0, 2)
        comm.met = []
        masked = MaskedTargets(comm, applies=True)
        for _ in range(3):
            masked.counted(target, len(target))
        assert comm.met == expected


def test_targets_masked_only_later_are_noted() -> None:
    masked = MaskedTargets(FakeComm(0, 2), applies=True)
    assert masked.counted(TARGETS[:1], 1) is None
    assert masked.notes() == ()
    assert masked.counted(TARGETS[1:], 4) is None
    assert masked.counted(TARGETS[:1], 1) is None
    (note,) = masked.notes()
    assert note.startswith("some targets are -100 and left out of the loss, but none was in the")


def test_borrowed_targets_are_neither_noted_nor_counted() -> None:
    masked = MaskedTargets(FakeComm(1, 2), applies=True)
    assert masked.counted(TARGETS, 0) is None
    assert masked.counted(TARGETS, 0) is None
    assert masked.notes() == ()
    among = MaskedTargets(FakeComm(1, 2, peers_sum=[7.0], peers_max=1.0), applies=True)
    assert among.counted(TARGETS, 0) == 7.0


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_where_all_are_masked_the_count_is_no_number(world_size: int) -> None:
    target = torch.full((5, 3), X)
    for rank in range(world_size):
        assert math.isnan(counted(target, rank, world_size))


# The loss and the gradient of a step


def strategy_of(comm: FakeComm, world_size: int, accumulate: int) -> Strategy:
    name = "ddp" if world_size > 1 else "none"
    context = make_context(name, world_size, accumulate=accumulate, batch_size=64)
    return make_strategy(StrategyName[name], replace(context, comm=comm))


def training_of(model: nn.Module, comm: FakeComm) -> Training:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masked = MaskedTargets(comm, applies=True)
    return Training(make_loss("auto", None), model, optimizer, None, None, None, masked)


def step(
    model: nn.Module, rows: torch.Tensor, target: torch.Tensor, world_size: int, accumulate: int
) -> float:
    """The step's loss; the model has its gradient. The mean over the ranks, as ddp makes it."""
    total = 0.0
    for rank in range(world_size):
        comm = comm_of(target, rank, world_size)
        strategy = strategy_of(comm, world_size, accumulate)
        training = training_of(model, comm)
        own = strategy.own_rows(len(target))
        inputs = Inputs((share_of(rows, rank, world_size),), {}, share_of(target, rank, world_size))
        count = training.counted(inputs.target, own)
        for micro, size in strategy.micro_batches(inputs, len(target)):
            output = model(*micro.args)
            loss = training.share(output, micro.target, size, len(target), count, strategy)
            training.backward(loss / world_size)
            total += loss.item() / world_size
    return total


def compare(rows: torch.Tensor, target: torch.Tensor, world_size: int, accumulate: int) -> None:
    torch.manual_seed(1)
    model = nn.Linear(4, 2)
    expected = functional.cross_entropy(model(rows).flatten(0, -2), target.flatten())
    expected.backward()
    gradient = model.weight.grad
    model.zero_grad()
    found = step(model, rows, target, world_size, accumulate)
    assert found == pytest.approx(expected.item(), abs=1e-6, nan_ok=True)
    torch.testing.assert_close(model.weight.grad, gradient, atol=1e-6, rtol=0, equal_nan=True)


@pytest.mark.parametrize("accumulate", [1, 2, 3, 5])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_a_step_is_the_mean_over_the_targets_that_count(world_size: int, accumulate: int) -> None:
    compare(ROWS, TARGETS, world_size, accumulate)


@given(
    st.lists(st.lists(st.sampled_from([0, 1, X]), min_size=3, max_size=3), min_size=1, max_size=6),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_any_mask_on_any_ranks(targets: list[list[int]], world_size: int, accumulate: int) -> None:
    target = torch.tensor(targets)
    if bool((target == X).all()):
        target[0, 0] = 0
    compare(ROWS.repeat(2, 1, 1)[: len(target)], target, world_size, accumulate)


@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 2), (2, 1), (3, 2)])
def test_where_none_counts_the_loss_is_no_number_as_torchs(
    world_size: int, accumulate: int
) -> None:
    model = nn.Linear(4, 2)
    assert math.isnan(step(model, ROWS, torch.full((5, 3), X), world_size, accumulate))


def test_a_loss_of_the_models_own_is_weighted_by_rows() -> None:
    comm = comm_of(TARGETS, 0, 2)
    strategy, training = strategy_of(comm, 2, 1), training_of(nn.Linear(4, 2), comm)
    output = SimpleNamespace(loss=torch.tensor(2.0), logits=torch.zeros(3, 3, 2))
    loss = training.share(output, TARGETS[:3], 3, 5, 9.0, strategy)
    assert loss.item() == pytest.approx(2.0 * 3 * 2 / 5)
