"""The classic exercise's printed lines: sizes inside and outside the model."""

from __future__ import annotations

import logging
import sys
from typing import Any, final

from dpexp.batches import Inputs
from dpexp.plan import RunPlan
from dpexp.shapes import ShapeLog, call_shape, shape_of, show_size

log = logging.getLogger(__name__)


@final
class TutorialPrinter:
    """Prints one line per active replica and one per batch, as the exercise does.

    Under ddp no process holds the whole batch: each rank prints its own "In Model" line as it
    comes, and rank 0's "Outside" line counts the rows of all ranks.
    """

    def __init__(self, plan: RunPlan, rank: int) -> None:
        self._plan = plan
        self._rank = rank

    def attach(self, shapes: ShapeLog) -> None:
        """Listen to the shapes of a run."""
        shapes.on_call = self._in_model
        if self._rank == 0:
            shapes.on_batch = self._outside
            log.info("%s", greeting(self._plan), extra={"file_only": True})

    def _in_model(self, _step: int, replica: int, inputs: Any, output: Any) -> None:
        tags = f" device={replica} rank={self._rank}"
        _say(f"\tIn Model: input size {show_size(inputs)} output size {show_size(output)}", tags)

    def _outside(self, inputs: Inputs, output: Any, global_rows: int) -> None:
        shapes = [call_shape(inputs.args, inputs.kwargs), shape_of(output)]
        if self._plan.num_processes > 1:
            shapes = [_with_rows(shape, global_rows) for shape in shapes]
        sizes = [show_size(shape) for shape in shapes]
        _say(f"Outside: input size {sizes[0]} output_size {sizes[1]}", f" rank={self._rank}")


def greeting(plan: RunPlan) -> str:
    """How many devices are used. Printed before the ranks start: theirs come in any order."""
    count, kind = plan.num_devices, plan.device_type
    if plan.emulated:
        kind = f"emulated on {kind}"
    elif plan.num_processes > 1:
        kind = f"{count} processes on {kind}"
    return f"Let's use {count} device{'s' if count > 1 else ''} ({kind})"


def _with_rows(shape: Any, rows: int) -> Any:
    """The shape of all ranks' parts together: the first dimension counts the global rows."""
    plain = isinstance(shape, tuple) and shape and isinstance(shape[0], int)
    return (rows, *shape[1:]) if plain else shape


def _say(line: str, tags: str) -> None:
    # One write a line, newline included: several ranks share the console.
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
    log.info("%s%s", line, tags, extra={"file_only": True})
