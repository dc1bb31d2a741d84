"""The step loop, on one page."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from dpexp.batches import Inputs, Split
from dpexp.beacon import (
    BEGAN,
    CODES,
    DURING,
    PART,
    PHASE,
    PHASES,
    STEP,
    TICKS,
    WAITED,
    WIDTH,
    Cells,
    step_at,
)
from dpexp.device import peak_resident_bytes
from dpexp.loading import Batches
from dpexp.metrics import Scoring
from dpexp.parallel import Strategy
from dpexp.recorder import Recorder
from dpexp.records import RankResult
from dpexp.rows import Row
from dpexp.schedule import GlobalBatch
from dpexp.shapes import ShapeLog
from dpexp.timing import Clock
from dpexp.training import Training
from dpexp.transfer import Transfer

# How long a rank whose time is up waits for the launcher to look, and how often it asks.
SEEN_S, LOOK_S = 5.0, 0.02


class Progress:
    """Where the loop is: for the message when it fails, and for the launching process to look at.

    Args:
        cells: see :mod:`dpexp.beacon`; memory of its own when nobody looks.
    """

    def __init__(self, cells: Cells | None = None) -> None:
        self._watched = cells is not None
        self._cells: Cells = [0] * WIDTH if cells is None else cells
        self.partial: RankResult | None = None  # what there was to say when the steps ended early
        self.parity: dict[str, Any] | None = None  # the certificate, once there is one
        self.step = -1
        self.phase = "set-up"

    @property
    def phase(self) -> str:
        """One of beacon.PHASES."""
        return PHASES[self._cells[PHASE]]

    @phase.setter
    def phase(self, name: str) -> None:
        cells = self._cells
        cells[PHASE] = CODES[name]
        cells[TICKS] += 1

    @property
    def step(self) -> int:
        """The last one whose batch has come."""
        return self._cells[STEP]

    @step.setter
    def step(self, step: int) -> None:
        self._cells[STEP] = step

    @property
    def during(self) -> str:
        """What is going on when it is not the run's own steps: one of beacon.DURING."""
        return DURING[self._cells[PART]]

    @during.setter
    def during(self, what: str) -> None:
        self._cells[PART] = DURING.index(what)

    def begin(self) -> None:
        """The first step begins now."""
        self._cells[BEGAN] = int(time.time() * 1e6)

    @property
    def began_s(self) -> float:
        """When the first step began, in seconds of Unix time; 0 if it has not."""
        return self._cells[BEGAN] / 1e6

    def current_step(self) -> int | None:
        """The step at work; while a batch is waited for, the one it is for."""
        return step_at(self.step, self.phase)

    def wait_to_be_seen(self) -> None:
        """This rank's time is up: let the launcher look at all ranks before it ends them."""
        if not self._watched:
            return
        self._cells[WAITED] = 1
        for _ in range(int(SEEN_S / LOOK_S)):
            if not self._cells[WAITED]:
                return
            time.sleep(LOOK_S)


@dataclass(frozen=True)
class Work:
    """What the loop works with."""

    strategy: Strategy
    transfer: Transfer
    clock: Clock[Any]
    recorder: Recorder
    shapes: ShapeLog
    progress: Progress
    split: Split
    autocast: AbstractContextManager[Any]
    training: Training | None = None  # of task=train
    scoring: Scoring | None = None  # of task=evaluate; with neither, the model is only called
    # Called once, between two steps, with the inputs and the global rows of step `pause_after`;
    # without them before the first step if `pause_after` is below `first`.
    pause_after: int = -1
    pause: Callable[[Inputs | None, int], None] = lambda _inputs, _rows: None
    first: int = 0  # the step that the run begins, or goes on, with
    # Whether to meet after a step, and what is done after it where the ranks meet, given its
    # number and its epoch.
    due: Callable[[int], bool] = lambda _step: False
    between: Callable[[int, int], None] = lambda _step, _epoch: None


def run_steps(batches: Batches, work: Work) -> None:
    """Run every batch, in the grad mode of the caller.

    A step lasts from the end of the one before to its own end, so its phases add up to it and
    recording it is part of `other`. A flush lies between two steps and in neither.
    """
    strategy, recorder, progress, shapes = work.strategy, work.recorder, work.progress, work.shapes
    training, mark = work.training, work.clock.mark
    if work.pause_after < work.first:
        work.pause(None, 0)
    marks = [mark()]
    while True:
        progress.phase = "data"
        item = next(batches, None)
        if item is None:
            break
        batch, fetched = item
        progress.step = shapes.step = batch.step
        inputs = work.split(fetched)
        marks.append(mark())

        progress.phase = "transfer"
        inputs = work.transfer.place(inputs)
        marks.append(mark())

        global_rows = len(batch.indices)
        output, loss = forward_backward(inputs, global_rows, work, marks)

        progress.phase = "optimizer"
        rate = None
        if training is not None:
            rate = training.learning_rate
            training.update(strategy)
            marks.append(mark())
        else:
            marks.append(marks[-1])  # a phase that does not happen takes no time

        progress.phase = "other"
        rows = strategy.own_rows(global_rows)
        if work.scoring is not None:
            work.scoring.add(output, inputs.target, rows)
        if shapes.on_batch is not None:
            shapes.on_batch(inputs, output, global_rows)
        recorder.add(_row(batch, rows, marks, loss, rate, strategy))
        pausing = batch.step == work.pause_after
        kept = inputs if pausing else None
        del item, output, fetched, inputs, loss  # the next batch must not find this one in memory
        end = mark()
        marks.append(end)
        if pausing or recorder.flush_due() or work.due(batch.step):
            _meet(work, batch)
            if kept is not None:
                work.pause(kept, global_rows)
                kept = None
            if recorder.enough:
                break
            end = mark()
        marks = [end]
    _meet(work)


def _row(
    batch: GlobalBatch,
    rows: int,
    marks: list[Any],
    loss: torch.Tensor | None,
    rate: float | None,
    strategy: Strategy,
) -> Row:
    log = strategy.log
    return Row(
        batch.step,
        batch.epoch,
        len(batch.indices),
        rows,
        marks,
        tuple(strategy.parts),
        loss,
        rate,
        peak_resident_bytes(),
        () if log is None else tuple(log.noted),
    )


def _meet(work: Work, batch: GlobalBatch | None = None) -> None:
    """Write what was recorded. A point where device and ranks meet, in no step's time.

    Args:
        batch: of the step before, unless it was the last.
    """
    work.recorder.flush()
    work.strategy.agree()
    if batch is not None:
        work.between(batch.step, batch.epoch)


def forward_backward(
    inputs: Inputs, global_rows: int, work: Work, marks: list[Any], *, synchronise: bool = True
) -> tuple[Any, torch.Tensor | None]:
    """All micro-batches of a step, two marks for each.

    Args:
        synchronise: exchange gradients with the last one; False only to see what that costs.

    Returns:
        The last one's output, and the loss of this rank's rows, detached; None if not training.
    """
    strategy, training, progress, mark = (
        work.strategy,
        work.training,
        work.progress,
        work.clock.mark,
    )
    strategy.parts.clear()
    if strategy.log is not None:
        strategy.log.noted.clear()
    micro_batches = strategy.micro_batches(inputs, global_rows)
    left, total, output = len(micro_batches), None, None
    counted = None
    if training is not None and training.counts:
        counted = training.counted(inputs.target, strategy.own_rows(global_rows))
    for micro, rows in micro_batches:
        left -= 1
        progress.phase = "forward"
        loss = None
        with strategy.synchronised(synchronise and left == 0):
            with work.autocast:
                output = strategy.forward(micro, rows)
                if training is not None:
                    loss = training.share(
                        output, micro.target, rows, global_rows, counted, strategy
                    )
            marks.append(mark())
            if training is None or loss is None:
                marks.append(marks[-1])
                continue
            progress.phase = "backward"
            training.backward(loss)
            marks.append(mark())
        total = loss.detach() if total is None else total + loss.detach()
    return output, total
