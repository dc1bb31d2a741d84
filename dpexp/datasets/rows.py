"""Rows held in memory, fetched a batch at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
from torch.utils.data import Dataset


@final
class Rows(Dataset[Any]):
    """Columns of equal length, held in memory.

    A batch is one gather per column instead of one Python call per row: torch's fetcher calls
    ``__getitems__`` when there is one, and ``collate_fn`` tells dpexp that the result is a batch
    already.

    Args:
        columns: tensors whose first dimension is the row. One column gives rows that are
            tensors, several give tuples.
    """

    def __init__(self, *columns: torch.Tensor) -> None:
        self._columns = columns
        # Inputs and targets, the usual case, which loading.py gathers without a call per batch.
        self.pair = columns if len(columns) == 2 else None
        # Mapped lazily from a file, a column would be read in the timed loop; see files.py.
        self._length = len(columns[0])

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        row = tuple(column[index] for column in self._columns)
        return row if len(row) > 1 else row[0]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """The batch of these rows. Shapes: [len(indices), ...] per column."""
        if isinstance(indices, np.ndarray):
            where = torch.from_numpy(indices)
        else:
            where = torch.tensor(indices, dtype=torch.int64)
        columns = [column.index_select(0, where) for column in self._columns]
        return tuple(columns) if len(columns) > 1 else columns[0]

    @staticmethod
    def collate_fn(batch: Any) -> Any:
        """The batch as it is: ``__getitems__`` has already put it together."""
        return batch
