"""The step loop, on one page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from dpexp.batches import split
from dpexp.device import peak_resident_bytes
from dpexp.losses import Loss
from dpexp.parallel import Strategy
from dpexp.recorder import Recorder, Row
from dpexp.records import RankResult
from dpexp.schedule import GlobalBatch
from dpexp.shapes import ShapeLog
from dpexp.timing import Clock


@dataclass
class Progress:
    """Where the loop is, for the message when it fails."""

    step: int = -1
    phase: str = "data"
    partial: RankResult | None = None  # what there was to say when the steps ended early


@dataclass(frozen=True)
class Training:
    """What `task=train` adds to a step."""

    loss_of: Loss
    optimizer: torch.optim.Optimizer


@dataclass(frozen=True)
class Work:
    """What the loop works with."""

    strategy: Strategy
    clock: Clock[Any]
    recorder: Recorder
    shapes: ShapeLog
    progress: Progress
    training: Training | None  # None: the model is only called
    forward_kwargs: dict[str, Any] = field(default_factory=dict)


def run_steps(batches: Iterator[tuple[GlobalBatch, Any]], work: Work) -> None:
    """Run every batch, in the grad mode of the caller.

    A step lasts from the end of the one before to its own end, so its phases add up to it and
    recording it is part of `other`. A flush lies between two steps and in neither.
    """
    strategy, recorder, progress, shapes = work.strategy, work.recorder, work.progress, work.shapes
    training, mark = work.training, work.clock.mark
    marks = [mark()]
    while True:
        progress.phase = "data"
        item = next(batches, None)
        if item is None:
            break
        batch, fetched = item
        progress.step = shapes.step = batch.step
        inputs = split(fetched, work.forward_kwargs)
        marks.append(mark())

        progress.phase = "transfer"
        inputs = strategy.place(inputs)
        marks.append(mark())

        progress.phase = "forward"
        global_rows = len(batch.indices)
        rows = strategy.own_rows(global_rows)
        output = strategy.forward(inputs, rows)
        loss = None
        if training is not None:
            loss = strategy.weigh(training.loss_of(output, inputs.target), rows, global_rows)
        marks.append(mark())

        if training is not None and loss is not None:
            progress.phase = "backward"
            loss.backward()  # type: ignore[no-untyped-call]
            marks.append(mark())

            progress.phase = "optimizer"
            training.optimizer.step()
            training.optimizer.zero_grad(set_to_none=True)
            marks.append(mark())
        else:
            marks += [marks[-1], marks[-1]]  # phases that do not happen take no time

        progress.phase = "other"
        if shapes.on_batch is not None:
            shapes.on_batch(inputs, output, global_rows)
        kept = None if loss is None else loss.detach()
        parts = tuple(strategy.parts)
        peak = peak_resident_bytes()
        recorder.add(Row(batch.step, batch.epoch, global_rows, rows, marks, parts, kept, peak))
        del item, output, fetched, inputs, loss  # the next batch must not find this one in memory
        end = mark()
        marks.append(end)
        if recorder.flush_due():
            recorder.flush()
            end = mark()
        marks = [end]
    recorder.flush()
