"""The step loop, on one page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dpexp.batches import split
from dpexp.device import peak_resident_bytes
from dpexp.losses import Loss
from dpexp.parallel import Strategy
from dpexp.recorder import Recorder, Row
from dpexp.schedule import GlobalBatch
from dpexp.shapes import ShapeLog
from dpexp.timing import Clock


@dataclass
class Progress:
    """Where the loop is, for the message when it fails."""

    step: int = -1
    phase: str = "data"


def run_steps(
    batches: Iterator[tuple[GlobalBatch, Any]],
    strategy: Strategy,
    clock: Clock[Any],
    recorder: Recorder,
    shapes: ShapeLog,
    progress: Progress,
    forward_kwargs: dict[str, Any],
    loss_of: Loss | None,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Run every batch. With an optimizer it trains; without, it only calls the model.

    A step lasts from the end of the one before to its own end, so its phases add up to it and
    recording it is part of `other`. A flush lies between two steps and in neither.
    """
    training = optimizer is not None and loss_of is not None
    mark = clock.mark
    with torch.set_grad_enabled(training):
        begin = mark()
        while True:
            progress.phase = "data"
            item = next(batches, None)
            if item is None:
                break
            batch, fetched = item
            progress.step = shapes.step = batch.step
            inputs = split(fetched, forward_kwargs)
            after_data = mark()

            progress.phase = "transfer"
            inputs = strategy.place(inputs)
            after_transfer = mark()

            progress.phase = "forward"
            global_rows = len(batch.indices)
            rows = strategy.own_rows(global_rows)
            output = strategy.forward(inputs, rows)
            loss = None
            if training:
                loss = loss_of(output, inputs.target)  # type: ignore[misc]
                loss = strategy.weigh(loss, rows, global_rows)
            after_forward = after_backward = after_optimizer = mark()

            if training:
                progress.phase = "backward"
                loss.backward()  # type: ignore[union-attr]
                after_backward = mark()

                progress.phase = "optimizer"
                optimizer.step()  # type: ignore[union-attr]
                optimizer.zero_grad(set_to_none=True)  # type: ignore[union-attr]
                after_optimizer = mark()

            progress.phase = "other"
            if shapes.on_batch is not None:
                shapes.on_batch(inputs, output, global_rows)
            del output, fetched, inputs
            marks = [
                begin,
                after_data,
                after_transfer,
                after_forward,
                after_backward,
                after_optimizer,
            ]
            recorder.add(
                Row(
                    batch.step,
                    batch.epoch,
                    global_rows,
                    rows,
                    marks,
                    tuple(strategy.parts),
                    None if loss is None else loss.detach(),
                    peak_resident_bytes(),
                )
            )
            begin = mark()
            marks.append(begin)

            if recorder.flush_due():
                recorder.flush()
                begin = mark()
    recorder.flush()
