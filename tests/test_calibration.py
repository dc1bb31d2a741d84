"""Extra steps with and without gradient exchange: what they find, and that they leave no trace."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from builders import FakeComm, ListSink, TickClock, make_plan_for
from fakeevents import Event, waits
from torch import nn

from dpexp.batches import Inputs, make_split
from dpexp.calibration import calibrate, why_not
from dpexp.loop import Progress, Work
from dpexp.losses import make_loss
from dpexp.masking import MaskedTargets
from dpexp.parallel import Context, make_strategy
from dpexp.parallel.collectives import CollectiveLog
from dpexp.pause import Pause
from dpexp.recorder import Recorder
from dpexp.schema import CommHook, StrategyName, Task
from dpexp.shapes import ShapeLog
from dpexp.timing import Clock, EventClock
from dpexp.training import Training
from dpexp.transfer import make_transfer

CPU = torch.device("cpu")


class Net(nn.Module):
    """With all that a step changes beside the weights: buffers, and three kinds of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.linear = nn.Linear(2, 1)
        self.sizes: list[int] = []  # of each call; a number would be put back

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(x))
        noise = torch.rand(()) + random.random() + np.random.rand()
        return self.linear(self.norm(x)) * noise  # type: ignore[no-any-return]


class MeetingComm(FakeComm):
    """Counts how often the ranks meet."""

    met = 0

    def max(self, value: float) -> float:
        self.met += 1
        return value


class Bench:
    """A model under `none`, whose exchange of gradients the test plays."""

    def __init__(
        self,
        pairs: int = 3,
        strategy: str = "none",
        clock: Clock[Any] | None = None,
        **config: Any,
    ) -> None:
        plan = make_plan_for(task=Task.train, **config)
        self.plan = replace(plan, calibration_pairs=pairs, strategy=StrategyName(strategy))
        self.ticks = TickClock()
        self.comm, self.clock, self.shapes = MeetingComm(), clock or self.ticks, ShapeLog()
        self.strategy = make_strategy(
            StrategyName.none, Context(plan, self.comm, CPU, self.clock, self.shapes)
        )
        self.model = Net()
        self.strategy.wrap(self.model)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.25)
        masked = MaskedTargets(self.comm, applies=False)
        self.training = Training(
            make_loss("mse", None), self.model, optimizer, None, None, None, masked
        )
        self.recorder = Recorder(plan, self.comm, self.clock, [ListSink()])
        self.work = Work(
            self.strategy,
            make_transfer(CPU, channels_last=False, pin=False),
            self.clock,
            self.recorder,
            self.shapes,
            Progress(),
            make_split(plan.config.batch, {}),
            nullcontext(),
            self.training,
        )
        self.inputs = Inputs((torch.randn(30, 2),), {}, torch.zeros(30, 1))

    def calibrate(self) -> dict[str, Any]:
        return calibrate(
            self.inputs, 30, self.work, self.training, self.model, self.plan, self.comm
        )


def play_exchange(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, ticks: dict[bool, list[float]]
) -> list[bool]:
    """Each backward with and without exchange takes so many seconds more; who came, in order."""
    now: list[bool] = []
    left = {kind: list(seconds) for kind, seconds in ticks.items()}

    @contextmanager
    def synchronised(last: bool) -> Iterator[None]:
        now.append(last)
        yield

    def in_backward(_gradient: torch.Tensor) -> None:
        bench.ticks.ticks += left[now[-1]].pop(0)  # type: ignore[assignment]

    monkeypatch.setattr(bench.strategy, "synchronised", synchronised)
    bench.model.linear.bias.register_hook(in_backward)
    return now


def test_the_difference_of_the_backward_passes_is_what_the_exchange_costs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(pairs=3)
    # A backward by itself takes a tick: 2, 4 and 3 s without, 8, 7 and 11 s with the exchange.
    play_exchange(bench, monkeypatch, {False: [1, 3, 2], True: [7, 6, 10]})
    got = bench.calibrate()
    assert got["pairs"] == 3
    assert got["backward_without_exchange_s"] == 3
    assert got["backward_with_exchange_s"] == 8
    assert got["exchange_s"] == 6  # of 6, 3 and 8
    assert got["exchange_quartiles_s"] == [4.5, 7]
    assert "all-reduce" in got["covers"]


def test_steps_without_and_with_exchange_take_turns_and_the_ranks_meet_before_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(pairs=2)
    now = play_exchange(bench, monkeypatch, {False: [0, 0], True: [0, 0]})
    bench.calibrate()
    assert now == [False, True, False, True]
    assert (bench.comm.met, len(bench.model.sizes), bench.ticks.settled) == (4, 4, 1)


def test_only_the_last_micro_batch_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(pairs=1, accumulate=2)
    now = play_exchange(bench, monkeypatch, {False: [1, 2, 4], True: [8]})
    got = bench.calibrate()
    assert now == [False, False, False, True]
    assert len(bench.model.sizes) == 4
    # Backward of both micro-batches: 1 + 1 and 1 + 2 ticks, then 1 + 4 and 1 + 8.
    assert (got["backward_without_exchange_s"], got["backward_with_exchange_s"]) == (5, 14)


def test_weights_gradients_buffers_and_counts_are_as_before() -> None:
    bench = Bench()
    bench.shapes.note(0, (30, 2), (30, 1))
    state = {name: tensor.clone() for name, tensor in bench.model.state_dict().items()}
    shapes = bench.shapes.records()
    bench.calibrate()
    after = bench.model.state_dict()
    assert list(after) == list(state)
    assert all(torch.equal(after[name], tensor) for name, tensor in state.items())
    assert bench.model.norm.num_batches_tracked == 0
    assert all(parameter.grad is None for parameter in bench.model.parameters())
    assert bench.shapes.records() == shapes
    assert not bench.shapes.off
    assert bench.recorder.steps == 0


def test_random_numbers_go_on_as_if_nothing_had_happened() -> None:
    def next_numbers(pairs: int | None) -> tuple[float, float, float]:
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        bench = Bench(pairs or 1)
        torch.manual_seed(6)
        if pairs:
            bench.calibrate()
        return torch.rand(()).item(), random.random(), float(np.random.rand())

    assert next_numbers(4) == next_numbers(None)


def test_after_a_failure_everything_is_put_back_too() -> None:
    bench = Bench()
    bench.inputs = Inputs((torch.randn(30, 2),), {}, torch.zeros(30, 7, 2))
    before = bench.model.norm.running_mean
    assert before is not None
    before = before.clone()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    with pytest.raises((RuntimeError, ValueError)):
        bench.calibrate()
    assert bench.model.norm.running_mean is not None
    assert torch.equal(bench.model.norm.running_mean, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert not bench.shapes.off


def test_collectives_of_extra_steps_are_not_those_of_the_next_one() -> None:
    bench = Bench()
    log = CollectiveLog(bench.clock, 2, blocking=False)
    bench.strategy.log = log

    def exchange(_gradient: torch.Tensor) -> None:
        log.done(log.begin("all_reduce", 4))

    bench.model.linear.bias.register_hook(exchange)
    bench.calibrate()
    assert log.noted == []


def test_under_fsdp_the_step_with_exchange_takes_along_the_gradients_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FSDP keeps them where they lie, and would not have them thrown away."""
    for strategy, forgotten in (("fsdp", 2), ("none", 4)):
        bench = Bench(2, strategy)
        forget, times = bench.training.forget, []
        monkeypatch.setattr(
            bench.training,
            "forget",
            lambda: (times.append(1), forget()),  # noqa: B023
        )
        covers = bench.calibrate()["covers"]
        assert len(times) == forgotten
        assert covers.startswith("the scattering") == (strategy == "fsdp")


def test_what_cannot_be_calibrated_says_why() -> None:
    assert why_not(make_plan_for("ddp", 2)) is None
    assert why_not(make_plan_for("fsdp", 2)) is None
    static = make_plan_for("ddp", 2, parallel={"static_graph": True})
    assert "static_graph" in (why_not(static) or "")
    powersgd = {"comm_hook": CommHook.powersgd, "powersgd_rank": 1, "powersgd_start": 2}
    assert "powersgd" in (why_not(make_plan_for("ddp", 2, parallel=powersgd)) or "")


def test_on_a_device_the_host_waits_once_after_all_pairs(
    events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each event comes 5 ms after the one before; a collective is two more within backward."""
    clock = EventClock(torch.device("meta"))
    bench = Bench(pairs=3, clock=clock)
    log = CollectiveLog(clock, 2, blocking=False)
    bench.strategy.log = log
    waited: list[int] = []
    exchanging = [False]

    @contextmanager
    def synchronised(last: bool) -> Iterator[None]:
        exchanging[0] = last
        waited.append(waits(events))
        yield

    def exchange(_gradient: torch.Tensor) -> None:
        if exchanging[0]:
            log.done(log.begin("all_reduce", 4))

    monkeypatch.setattr(bench.strategy, "synchronised", synchronised)
    bench.model.linear.bias.register_hook(exchange)
    got = bench.calibrate()
    assert got["backward_without_exchange_s"] == pytest.approx(0.005)
    assert got["backward_with_exchange_s"] == pytest.approx(0.015)
    assert got["exchange_s"] == pytest.approx(0.010)
    assert got["exchange_quartiles_s"] == pytest.approx([0.010, 0.010])
    assert waited == [0] * 6
    assert waits(events) == 2  # for the last mark, and for the anchor after it


@pytest.mark.parametrize("timed", [True, False])
def test_only_a_run_whose_collectives_are_timed_is_calibrated(timed: bool) -> None:
    """Else there is nothing to put the figure beside; the strategy's note says why."""
    bench = Bench(pairs=3)
    work: Any = SimpleNamespace(
        strategy=SimpleNamespace(
            log=CollectiveLog(bench.clock, 2, blocking=False) if timed else None
        )
    )
    built: Any = SimpleNamespace(training=bench.training)
    beside: Any = None
    found = Pause(work, built, bench.plan, FakeComm(), beside).calibration
    reason = "the run ended before its warm-up was over"
    assert found == ({"pairs": 0, "reason": reason} if timed else None)
