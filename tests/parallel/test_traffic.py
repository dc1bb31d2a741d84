"""What nn.DataParallel copies between its devices: bytes counted by hand, over virtual devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from builders import make_context
from torch import nn

from dpexp.batches import Inputs
from dpexp.parallel import Strategy, make_strategy
from dpexp.parallel.collectives import CollectiveLog
from dpexp.schema import StrategyName, Task

Noted = list[tuple[str, int, bool]]
Wrapped = Callable[..., tuple[Strategy, CollectiveLog]]


class Net(nn.Module):
    """8 numbers of parameters, 32 bytes; 5 of buffers, 20 bytes."""

    def __init__(self, *, train_weight: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.linear.weight.requires_grad = train_weight
        self.register_buffer("buf", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


@pytest.fixture
def wrapped() -> Iterator[Wrapped]:
    made: list[Strategy] = []

    def wrap(
        num_devices: int, model: nn.Module | None = None, **config: Any
    ) -> tuple[Strategy, CollectiveLog]:
        context = make_context("dp", num_devices, **{"task": Task.train, **config})
        strategy = make_strategy(StrategyName.dp, context)
        strategy.wrap(model or Net())
        made.append(strategy)
        assert strategy.log is not None
        return strategy, strategy.log

    yield wrap
    for strategy in made:
        strategy.close()


def step(strategy: Strategy, rows: int) -> None:
    output = strategy.forward(Inputs((torch.ones(rows, 3),), {}, None), rows)
    output.sum().backward()


def noted(log: CollectiveLog) -> Noted:
    return [(each.kind, each.num_bytes, each.in_backward) for each in log.noted]


def test_two_devices_copy_rows_model_outputs_and_gradients(wrapped: Wrapped) -> None:
    strategy, log = wrapped(2)
    step(strategy, 5)  # cut into 3 and 2 rows
    assert noted(log) == [
        ("scatter", 2 * 3 * 4, False),
        ("replicate", 32 + 20, False),
        ("gather", 2 * 2 * 4, False),
        ("reduce", 32, True),
    ]
    # From device to device there is no ring: what is copied passes the link once.
    assert [each.bus_bytes for each in log.noted] == [24, 52, 16, 32]


def test_devices_without_rows_get_no_copy_of_the_model(wrapped: Wrapped) -> None:
    strategy, log = wrapped(4)
    step(strategy, 5)  # cut into 2, 2 and 1 rows
    assert noted(log) == [
        ("scatter", 3 * 3 * 4, False),
        ("replicate", 2 * 52, False),
        ("gather", 3 * 2 * 4, False),
        ("reduce", 2 * 32, True),
    ]


def test_a_single_row_stays_on_the_first_device(wrapped: Wrapped) -> None:
    strategy, log = wrapped(2)
    step(strategy, 1)
    assert [num_bytes for _, num_bytes, _ in noted(log)] == [0] * len(log.noted)
    assert "reduce" not in [each.kind for each in log.noted]


def test_frozen_parameters_are_copied_and_send_no_gradient(wrapped: Wrapped) -> None:
    strategy, log = wrapped(2, Net(train_weight=False))
    step(strategy, 4)
    assert noted(log)[1] == ("replicate", 52, False)
    assert noted(log)[3] == ("reduce", 2 * 4, True)


def test_keywords_are_scattered_too(wrapped: Wrapped) -> None:
    class Scaled(Net):
        def forward(self, x: torch.Tensor, *, scale: torch.Tensor, times: int) -> torch.Tensor:
            return self.linear(x) * scale * times  # type: ignore[no-any-return]

    strategy, log = wrapped(2, Scaled())
    keywords = {"scale": torch.ones(4, 1, dtype=torch.float64), "times": 2}
    strategy.forward(Inputs((torch.ones(4, 3),), keywords, None), 4)
    assert noted(log)[0] == ("scatter", 2 * 3 * 4 + 2 * 8, False)


def test_each_copy_is_timed_by_the_marks_of_its_part(wrapped: Wrapped) -> None:
    strategy, log = wrapped(2)
    step(strategy, 4)
    scatter, replicate, _apply, gather = strategy.parts
    times = [(each.ready, each.end) for each in log.noted]
    assert times[:3] == [scatter, replicate, gather]
    ready, end = times[3]
    assert gather[1] < ready < end


def test_each_micro_batch_copies_anew(wrapped: Wrapped) -> None:
    strategy, log = wrapped(2)
    step(strategy, 4)
    step(strategy, 2)
    assert [each.num_bytes for each in log.noted] == [24, 52, 16, 32, 12, 52, 8, 32]


def test_an_injected_delay_is_part_of_each_copy_and_of_forwards_parts(
    wrapped: Wrapped, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    strategy, _ = wrapped(2, inject={"collective_delay_s": 0.25})
    step(strategy, 4)
    assert slept == [0.25] * 4  # scatter, replicate, gather, and the reduction in backward


@pytest.mark.parametrize(
    ("num_devices", "config"),
    [(1, {}), (2, {"task": Task.forward}), (2, {"measure": {"comm": False}})],
    ids=["one device", "not training", "not asked for"],
)
def test_nothing_is_noted(num_devices: int, config: dict[str, Any]) -> None:
    context = make_context("dp", num_devices, **{"task": Task.train, **config})
    strategy = make_strategy(StrategyName.dp, context)
    strategy.wrap(Net())
    assert strategy.log is None
    step(strategy, 4)
    strategy.close()
