"""A step as the loop leaves it, and the seconds between its marks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dpexp.parallel.collectives import Collective
from dpexp.records import DP_PARTS
from dpexp.timing import Clock

Spans = npt.NDArray[np.float64]


@dataclass(slots=True)
class Row:
    """One step as the loop leaves it. Marks are opaque; see timing.py."""

    step: int
    epoch: int
    global_rows: int
    rows: int
    # Begin, then the ends of data, transfer, of forward and backward of each micro-batch, of
    # optimizer and other.
    marks: list[Any]
    parts: tuple[tuple[Any, Any], ...]  # dp: begin and end of each of DP_PARTS, per micro-batch
    loss: torch.Tensor | None  # 0-dim, as weighed by the strategy
    learning_rate: float | None
    peak_bytes: int
    collectives: tuple[Collective, ...] = ()


def phase_spans(rows: Sequence[Row], clock: Clock[Any], micro_batches: int) -> Spans:
    """Seconds of each phase, shape [rows, phases]; those of micro-batches added up."""
    if micro_batches == 1:
        return clock.spans([row.marks for row in rows])
    count = 2 * micro_batches + 5
    spans = clock.spans([_padded(row.marks, -2, count) for row in rows])
    middle = spans[:, 2:-2]
    both = [middle[:, 0::2].sum(axis=1), middle[:, 1::2].sum(axis=1)]
    return np.column_stack([spans[:, :2], *both, spans[:, -2:]])


def part_spans(rows: Sequence[Row], clock: Clock[Any], micro_batches: int) -> Spans | None:
    """Seconds of dp's four steps, shape [rows, 4]; None for strategies without them."""
    if not rows[0].parts:
        return None
    count = micro_batches * len(DP_PARTS)
    none = [(rows[0].marks[0], rows[0].marks[0])]
    pairs = [[*row.parts, *(none * (count - len(row.parts)))] for row in rows]
    flat = clock.spans([pair for each in pairs for pair in each])
    micro: Spans = flat.reshape(len(rows), micro_batches, len(DP_PARTS))
    added: Spans = micro.sum(axis=1)
    return added


def _padded(marks: list[Any], place: int, count: int) -> list[Any]:
    """`marks` with one repeated: a short step has fewer micro-batches, and those take no time.

    Args:
        place: index from the end, before which the repeated marks go.
    """
    lacking = count - len(marks)
    if not lacking:
        return marks
    return [*marks[:place], *([marks[place - 1]] * lacking), *marks[place:]]
