"""The one schedule of global batches that every strategy follows. Pure numpy.

The order of the samples depends on the seed and the epoch alone, never on the strategy or the
number of devices, so a step under any strategy can be compared row for row with the step of a
single device. Nothing is padded or duplicated; rows are dropped only when `drop_last` says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
ENDLESS = 2**62


class GlobalBatch(NamedTuple):
    """The rows of one step over all devices. `indices`: shape [rows], dataset positions."""

    step: int
    epoch: int
    indices: Indices


@dataclass(frozen=True)
class Schedule:
    """Which rows make up which step.

    Args:
        num_rows: rows in the dataset.
        batch_rows: rows of a global batch; the last of an epoch may have fewer.
        epochs: passes over the dataset; None = as many as `steps` needs.
        steps: at most this many global batches; None = all of the epochs, and without those
            endless (``until.ci`` says when to stop).
        shuffle: a new order each epoch, drawn from (seed, epoch); False = 0, 1, 2, …
        first: the step to begin with, where those before are done.
    """

    num_rows: int
    batch_rows: int
    epochs: int | None
    steps: int | None
    drop_last: bool
    shuffle: bool
    seed: int
    first: int = 0

    def batches_per_epoch(self) -> int:
        """Global batches of one epoch: ceil(rows / batch), or floor with `drop_last`."""
        full, rest = divmod(self.num_rows, self.batch_rows)
        return full + (1 if rest and not self.drop_last else 0)

    def __len__(self) -> int:
        """Global batches of the whole run, those before `first` included."""
        if self.epochs is None:
            steps = ENDLESS if self.steps is None else self.steps
            return steps if self.batches_per_epoch() else 0
        total = self.batches_per_epoch() * self.epochs
        return total if self.steps is None else min(total, self.steps)

    def __iter__(self) -> Iterator[GlobalBatch]:
        total, per_epoch, rows = len(self), self.batches_per_epoch(), self.batch_rows
        orders = EpochOrders(self.num_rows, self.seed, self.shuffle)
        for epoch in range(self.first // max(per_epoch, 1), -(-total // max(per_epoch, 1))):
            order = orders.of(epoch)
            begin = max(epoch * per_epoch, self.first)
            start = (begin - epoch * per_epoch) * rows
            for step in range(begin, min((epoch + 1) * per_epoch, total)):
                end = start + rows
                yield GlobalBatch(step, epoch, order[start:end])
                start = end


@final
class EpochOrders:
    """The order of all rows in each epoch, from the seed and the epoch alone.

    Orders are drawn for a block of epochs at once, as many as make BLOCK_ROWS rows: for a small
    dataset, drawing each epoch's alone would cost as much as a small step. Block b draws from
    PCG64's sequence of the seed from position b * 2**64 on; the sequence has 2**128 numbers, so no
    two blocks share any (O'Neill, "PCG: A Family of Simple Fast Space-Efficient Statistically Good
    Algorithms for Random Number Generation", 2014).
    """

    BLOCK_ROWS = 8192

    def __init__(self, num_rows: int, seed: int, shuffle: bool) -> None:
        self._shuffle = shuffle
        self._rows = np.arange(num_rows, dtype=np.int64)
        self._epochs = max(1, self.BLOCK_ROWS // max(num_rows, 1))
        self._bits = np.random.PCG64(seed)
        self._begin = self._bits.state
        self._generator = np.random.Generator(self._bits)
        self._block = -1
        self._orders = np.empty((0, num_rows), dtype=np.int64)

    def of(self, epoch: int) -> Indices:
        """Shape [num_rows], a permutation of 0..num_rows-1."""
        if not self._shuffle:
            return self._rows
        block, place = divmod(epoch, self._epochs)
        if block != self._block:
            self._bits.state = self._begin
            self._bits.advance(block << 64)
            self._orders = self._generator.permuted(np.tile(self._rows, (self._epochs, 1)), axis=1)
            self._block = block
        order: Indices = self._orders[place]
        return order


def chunk_sizes(rows: int, num_devices: int) -> tuple[int, ...]:
    """Rows of each device, as torch.chunk cuts: size ceil(rows/devices), as many as needed.

    Always `num_devices` entries; a device without rows has 0. For example 9 rows on 4 devices
    are (3, 3, 3, 0).
    """
    size = -(-rows // num_devices) if rows else 0
    return tuple(max(0, min(size, rows - device * size)) for device in range(num_devices))


def chunk_of(indices: Indices, device: int, num_devices: int) -> Indices:
    """The rows of one device: chunk number `device` of the global batch, possibly empty."""
    size = -(-len(indices) // num_devices) if len(indices) else 0
    return indices[device * size : (device + 1) * size]
