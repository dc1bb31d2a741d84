"""The strategy ddp without any process group: what it decides by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from builders import TickClock, make_context
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dpexp.batches import Inputs
from dpexp.parallel import ddp, make_strategy
from dpexp.parallel.collectives import Collective, CollectiveLog
from dpexp.parallel.ddp import DistributedDataParallel, MeasuredDDP
from dpexp.schedule import chunk_sizes
from dpexp.schema import StrategyName, Task


def on_rank(rank: int, world_size: int, device: str = "cpu") -> DistributedDataParallel:
    context = make_context("ddp", world_size, rank=rank, world_size=world_size, device=device)
    strategy = make_strategy(StrategyName.ddp, context)
    assert isinstance(strategy, DistributedDataParallel)
    return strategy


@pytest.mark.parametrize(
    ("world_size", "chosen", "own"),
    [
        (2, [[0, 1, 2, 3, 4], [5, 6, 7, 8]], [5, 4]),
        (4, [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 1, 2]], [3, 3, 3, 0]),
        (5, [[0, 1], [2, 3], [4, 5], [6, 7], [8]], [2, 2, 2, 2, 1]),
    ],
)
def test_each_rank_takes_its_chunk_and_an_idle_one_borrows_the_first(
    world_size: int, chosen: list[list[int]], own: list[int]
) -> None:
    ranks = [on_rank(rank, world_size) for rank in range(world_size)]
    assert [rank.choose_rows(np.arange(9)).tolist() for rank in ranks] == chosen
    assert [rank.own_rows(9) for rank in ranks] == own


def mean_over_ranks(values: Sequence[float], world_size: int) -> float:
    """What DDP makes of a number of each rank; a mean of squares of its rows here."""
    total, start = 0.0, 0
    for rank, rows in enumerate(chunk_sizes(len(values), world_size)):
        chunk = torch.tensor(values[start : start + rows] if rows else values[:1])
        start += rows
        weighed = on_rank(rank, world_size).weigh((chunk**2).mean(), rows, len(values))
        total += weighed.item()
    return total / world_size


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_the_mean_of_the_weighted_losses_of_five_rows_is_six(world_size: int) -> None:
    # 0, 1, 4, 9, 16: 30 over 5 rows; the plain mean of two ranks' means would be 7.0833
    assert mean_over_ranks([0.0, 1.0, 2.0, 3.0, 4.0], world_size) == pytest.approx(6.0, abs=1e-5)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_the_mean_of_the_weighted_gradients_of_five_rows_is_twelve(world_size: int) -> None:
    x, total = torch.arange(5.0), 0.0
    for rank in range(world_size):
        strategy = on_rank(rank, world_size)
        own = x[torch.from_numpy(strategy.choose_rows(np.arange(5)))]
        weight = torch.ones((), requires_grad=True)
        loss = strategy.weigh(((weight * own) ** 2).mean(), strategy.own_rows(5), 5)
        (gradient,) = torch.autograd.grad(loss, weight)
        total += gradient.item()
    assert total / world_size == pytest.approx(12.0, abs=1e-5)


def test_a_rank_without_rows_weighs_nothing_and_still_has_a_gradient() -> None:
    weight = torch.ones((), requires_grad=True)
    loss = on_rank(3, 4).weigh(weight * 5.0, 0, 9)
    loss.backward()
    assert (loss.item(), weight.grad) == (0.0, torch.tensor(0.0))


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Linear(5, 2).requires_grad_(False)])
def test_a_model_without_gradients_runs_unwrapped_and_its_shapes_are_the_ranks(
    model: nn.Module,
) -> None:
    strategy = on_rank(1, 2)
    strategy.wrap(model)
    output = strategy.forward(Inputs((torch.zeros(4, 5),), {}, None), 4)
    assert torch.equal(output, model(torch.zeros(4, 5)))
    assert [(row.replica, row.input_shape) for row in strategy.shapes.records()] == [(1, "[4, 5]")]


def test_the_borrowed_rows_of_an_idle_rank_are_nobodys_shapes() -> None:
    strategy = on_rank(3, 4)
    strategy.wrap(nn.ReLU())
    inputs = Inputs((torch.zeros(3, 5),), {}, None)
    strategy.forward(inputs, 0)
    assert strategy.shapes.records() == ()
    strategy.forward(inputs, 3)  # and in a later step it has rows of its own
    assert [row.count for row in strategy.shapes.records()] == [1]


class Wrapper(nn.Module):
    """Stands in for torch's wrapper, which needs a process group."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module, self.options = module, options


@pytest.mark.parametrize(("device", "ids"), [("cpu", None), ("meta", [torch.device("meta")])])
def test_torch_gets_the_options_of_the_config_and_no_device_ids_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, device: str, ids: Any
) -> None:
    monkeypatch.setattr(ddp, "MeasuredDDP", Wrapper)
    strategy = on_rank(0, 2, device)
    strategy.wrap(nn.Linear(5, 2))
    assert isinstance(strategy._model, Wrapper)
    assert strategy._model.options == {
        "device_ids": ids,
        "bucket_cap_mb": None,
        "find_unused_parameters": False,
        "static_graph": False,
        "gradient_as_bucket_view": False,
        "broadcast_buffers": True,
    }


class SmallDDP(MeasuredDDP):  # type: ignore[misc]
    """Without a process group; sending the buffers takes 5 s."""

    def __init__(self, module: nn.Module, clock: TickClock) -> None:
        nn.Module.__init__(self)
        self.modules_buffers = list(module.buffers())
        self.clock = clock


def test_the_buffers_before_forward_are_one_blocking_broadcast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = TickClock()

    def send(model: SmallDDP) -> None:
        model.clock.ticks += 5

    monkeypatch.setattr(TorchDDP, "_sync_buffers", send)
    wrapped = SmallDDP(nn.BatchNorm1d(3), clock)
    wrapped._sync_buffers()  # not timed
    assert clock.ticks == 5
    wrapped.log = CollectiveLog(clock, 2, blocking=False)
    wrapped._sync_buffers()
    # Two means and variances of 3 numbers, and a counter of 8 bytes. A broadcast on a ring passes
    # each byte over a link once.
    assert wrapped.log.noted == [Collective("broadcast", 32, 32.0, False, 6, 12, True)]


@pytest.mark.parametrize("timed", [True, False])
def test_the_wrapper_notes_into_the_log_of_the_strategy(
    monkeypatch: pytest.MonkeyPatch, timed: bool
) -> None:
    monkeypatch.setattr(ddp, "MeasuredDDP", Wrapper)
    monkeypatch.setattr(ddp, "add_comm_hook", lambda *_args: True)
    context = make_context("ddp", 2, world_size=2, task=Task.train, measure={"comm": timed})
    strategy = make_strategy(StrategyName.ddp, context)
    strategy.wrap(nn.Linear(5, 2))
    assert isinstance(strategy, DistributedDataParallel)
    assert (strategy.log is not None) == timed
    assert strategy._wrapped is not None
    assert strategy._wrapped.log is strategy.log


def test_closing_lets_go_of_the_wrapped_model() -> None:
    strategy = on_rank(0, 2)
    strategy.wrap(nn.ReLU())
    strategy.close()
    assert not hasattr(strategy, "_model")
