"""The step loop on one device, with a clock whose every mark is a second after the one before."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from builders import FakeComm, ListSink, TickClock, make_plan_for
from fakeevents import Event, waits
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from dpexp import timing
from dpexp.batches import Inputs, make_split
from dpexp.loop import Progress, Work, run_steps
from dpexp.losses import make_loss
from dpexp.masking import MaskedTargets
from dpexp.metrics import make_scoring
from dpexp.parallel import Context, make_strategy
from dpexp.parallel.collectives import CollectiveLog
from dpexp.recorder import Recorder
from dpexp.records import PHASES, StepRecord
from dpexp.rows import Row
from dpexp.schedule import GlobalBatch
from dpexp.schema import StrategyName, Task
from dpexp.shapes import ShapeLog
from dpexp.timing import EventClock
from dpexp.training import Training
from dpexp.transfer import make_transfer

CPU = torch.device("cpu")


class Weight(nn.Module):
    """One weight of 1; fails at call `fails`."""

    def __init__(self, fails: int = -1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.calls, self.fails = 0, fails

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.fails:
            raise ValueError("boom")
        return self.weight * rows


class Bench:
    """Steps over batches of the rows 0, 1, 2, … with targets 0."""

    def __init__(self, task: Task = Task.train, model: nn.Module | None = None, **config: Any):
        plan = make_plan_for(task=task, warmup_steps=0, **config)
        self.model, self.sink = model or Weight(), ListSink()
        clock, self.shapes, comm = TickClock(), ShapeLog(), FakeComm()
        self.strategy = make_strategy(
            StrategyName.none, Context(plan, comm, CPU, clock, self.shapes)
        )
        self.strategy.wrap(self.model)
        training = None
        if task is Task.train:
            optimizer = torch.optim.SGD(self.model.parameters(), lr=0.25)
            scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
            loss = make_loss("mse", None)
            masked = MaskedTargets(comm, applies=False)
            training = Training(loss, self.model, optimizer, None, None, scheduler, masked)
        self.progress = Progress()
        self.scoring = make_scoring("l1", None, comm, 1) if task is Task.evaluate else None
        self.work = Work(
            self.strategy,
            make_transfer(CPU, channels_last=False, pin=False),
            clock,
            Recorder(plan, comm, clock, [self.sink]),
            self.shapes,
            self.progress,
            make_split(plan.config.batch, {}),
            nullcontext(),
            training,
            self.scoring,
        )

    def run(self, *rows: int) -> list[StepRecord]:
        with torch.set_grad_enabled(self.work.training is not None):
            run_steps(batches(*rows), self.work)
        return self.sink.records


def batches(*rows: int) -> Iterator[tuple[GlobalBatch, Any]]:
    for step, count in enumerate(rows):
        if count < 0:
            raise OSError("no such row")
        values = torch.arange(float(count))
        yield GlobalBatch(step, 0, np.arange(count)), (values, torch.zeros(count))


def phases(record: StepRecord) -> list[float]:
    return [getattr(record, f"{phase}_s") for phase in PHASES]


def test_a_step_that_only_calls_the_model_takes_no_time_for_the_rest() -> None:
    records = Bench(Task.forward).run(4, 4)
    assert [phases(record) for record in records] == [[1, 1, 1, 0, 0, 1]] * 2
    assert [(r.loss, r.learning_rate, r.rows) for r in records] == [(None, None, 4)] * 2


def test_a_training_step_has_all_phases() -> None:
    (record,) = Bench().run(4)
    assert phases(record) == [1, 1, 1, 1, 1, 1]
    assert record.loss == pytest.approx(3.5)  # 0, 1, 4 and 9 over 4 rows
    assert record.learning_rate == 0.25


def test_each_micro_batch_has_its_forward_and_backward() -> None:
    first, short = Bench(accumulate=3).run(6, 2)
    assert phases(first) == [1, 1, 3, 3, 1, 1]
    assert phases(short) == [1, 1, 2, 2, 1, 1]  # 2 rows make two micro-batches


@pytest.mark.parametrize("accumulate", [1, 2, 3, 4])
def test_loss_and_update_of_micro_batches_are_those_of_the_whole_batch(accumulate: int) -> None:
    # mean of w²x² over 0, 1, 2, 3, 4 is 6 w², its gradient 12 w; the rates are 1/4 and 1/8.
    bench = Bench(accumulate=accumulate)
    first, second = bench.run(5, 5)
    after = 1 - 0.25 * 12
    assert (first.loss, second.loss) == (pytest.approx(6.0), pytest.approx(6 * after**2))
    weight: Any = bench.model.weight
    assert weight.item() == pytest.approx(after - 0.125 * 12 * after)
    assert weight.grad is None


def test_the_recorded_rate_is_that_of_the_steps_own_update() -> None:
    assert [record.learning_rate for record in Bench().run(1, 1, 1)] == [0.25, 0.125, 0.0625]


def test_gradients_are_exchanged_with_the_last_micro_batch_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, seen = Bench(accumulate=3), []

    @contextmanager
    def around(last: bool) -> Iterator[None]:
        seen.append((last, bench.progress.phase))
        yield
        seen.append((last, bench.progress.phase))

    def synchronised(last: bool) -> AbstractContextManager[None]:
        return around(last)

    monkeypatch.setattr(bench.strategy, "synchronised", synchronised)
    bench.run(6)
    one = [(False, "forward"), (False, "backward")]
    assert seen == [*one, *one, (True, "forward"), (True, "backward")]


def test_between_two_steps_there_is_a_pause_that_no_step_has_in_its_time() -> None:
    bench, paused = Bench(), []

    def pause(inputs: Inputs, global_rows: int) -> None:
        paused.append((inputs.args[0].tolist(), global_rows, len(bench.sink.records)))
        bench.work.clock.mark()  # takes time
        bench.work.clock.mark()

    bench.work = replace(bench.work, pause_after=1, pause=pause)
    records = bench.run(2, 3, 4)
    # Once, with what step 1 had, after that step was written.
    assert paused == [([0.0, 1.0, 2.0], 3, 2)]
    assert [phases(record) for record in records] == [[1] * 6] * 3


def test_a_run_that_ends_before_its_pause_has_none() -> None:
    bench = Bench()
    bench.work = replace(bench.work, pause_after=2, pause=lambda *_: pytest.fail("paused"))
    assert len(bench.run(2, 2)) == 2


def test_a_row_has_the_collectives_of_its_own_step_only() -> None:
    bench = Bench()
    log = bench.strategy.log = CollectiveLog(bench.work.clock, 2, blocking=False)
    bench.model.weight.register_hook(  # type: ignore[union-attr, operator]
        lambda _gradient: log.done(log.begin("all_reduce", 4))
    )
    rows: list[Row] = []
    bench.work.recorder.add = rows.append  # type: ignore[method-assign]
    bench.run(2, 2)
    assert [len(row.collectives) for row in rows] == [1, 1]
    first, second = (row.collectives[0] for row in rows)
    assert first is not second
    assert rows[1].marks[3] < second.ready < second.end < rows[1].marks[4]  # in backward


def test_an_evaluation_counts_every_batch() -> None:
    bench = Bench(Task.evaluate)
    bench.run(4, 4, 1)  # the rows 0 to 3 twice, then 0
    assert bench.scoring is not None
    result = bench.scoring.result()
    assert result == {"name": "l1", "value": pytest.approx(12 / 9), "samples": 9}


def test_listeners_get_the_whole_batch_of_each_step() -> None:
    bench, seen = Bench(Task.forward), []

    def listen(inputs: Inputs, output: Any, global_rows: int) -> None:
        seen.append((bench.shapes.step, inputs.args[0].tolist(), output.tolist(), global_rows))

    bench.shapes.on_batch = listen
    bench.run(2, 1)
    assert seen == [(0, [0.0, 1.0], [0.0, 1.0], 2), (1, [0.0], [0.0], 1)]


@pytest.mark.parametrize(
    ("fails", "rows", "error", "where"),
    [
        (2, (3, 3), "boom", (1, 1, "forward")),
        (-1, (3, 3, -1), "no such row", (1, 2, "data")),
        (-1, (-1,), "no such row", (-1, 0, "data")),
    ],
)
def test_a_failure_finds_the_step_and_the_phase_it_happened_in(
    fails: int, rows: tuple[int, ...], error: str, where: tuple[int, int, str]
) -> None:
    bench = Bench(model=Weight(fails))
    with pytest.raises((ValueError, OSError), match=error):
        bench.run(*rows)
    progress = bench.progress
    assert (progress.step, progress.current_step(), progress.phase) == where


def test_before_the_loop_there_is_no_step() -> None:
    assert (Progress().phase, Progress().current_step()) == ("set-up", None)


def test_the_steps_before_a_failure_can_still_be_written() -> None:
    bench = Bench(model=Weight(fails=4))
    with pytest.raises(ValueError, match="boom"):
        bench.run(3, 3, 3, 3)
    bench.work.recorder.flush(together=False)
    assert [record.step for record in bench.sink.records] == [0, 1, 2]


def test_a_batch_is_let_go_of_before_the_next_one_is_fetched() -> None:
    bench, alive = Bench(), []

    def source() -> Iterator[tuple[GlobalBatch, Any]]:
        previous: Any = None
        for step in range(3):
            alive.append(previous is not None and previous() is not None)
            rows = torch.arange(2.0)
            previous = weakref.ref(rows)
            item = GlobalBatch(step, 0, np.arange(2)), (rows, torch.zeros(2))
            del rows
            yield item
            del item

    run_steps(source(), bench.work)
    assert alive == [False, False, False]


@pytest.mark.parametrize(
    ("until", "steps"),
    [
        ({"ci": 0.02, "max_s": 1e6}, 15),  # flushes after 1, 3, 7 and 15 steps; 7 cannot tell yet
        ({"ci": 0.02, "max_s": 18.0}, 3),  # steps of 6 s
        ({"ci": 0.02, "max_s": 18.5}, 7),
        ({"ci": None}, 100),
    ],
)
def test_steps_end_at_the_flush_after_which_they_are_enough(
    until: dict[str, Any], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "now_s", lambda: 0.0)  # so quick that a flush comes after twice
    bench, taken = Bench(until=until), []

    def noted() -> Iterator[tuple[GlobalBatch, Any]]:
        for batch in batches(*[4] * 100):
            taken.append(batch[0].step)
            yield batch

    run_steps(noted(), bench.work)
    assert [record.step for record in bench.sink.records] == list(range(steps))
    assert taken == list(range(steps))  # no batch is fetched for nothing
    assert bench.work.recorder.enough == (steps < 100)


def test_on_a_device_the_host_waits_for_it_in_a_flush_and_never_in_a_step(
    events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "now_s", lambda: 0.0)
    bench = Bench()
    work = replace(bench.work, clock=EventClock(torch.device("meta")))
    sink = ListSink()
    recorder = Recorder(
        make_plan_for(task=Task.train, warmup_steps=0), FakeComm(), work.clock, [sink]
    )
    waited: list[int] = []

    def looked(*_args: Any) -> None:
        waited.append(waits(events))

    bench.model.register_forward_hook(looked)
    run_steps(batches(*[4] * 10), replace(work, recorder=recorder))
    # Flushes after 1, 3 and 7 steps, and at the end: each waits for the last mark and an anchor.
    assert waited == [0, 2, 2, 4, 4, 4, 4, 6, 6, 6]
    assert waits(events) == 8
    assert [phases(record) for record in sink.records] == [pytest.approx([0.005] * 6)] * 10
