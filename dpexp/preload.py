"""A dataset that lies on the device as a whole, put there once before the first step."""

from __future__ import annotations

from typing import Any, final

import numpy as np
import torch

from dpexp.batches import holds_rows, leading_sizes, like, move
from dpexp.collate import collate
from dpexp.errors import ConfigError
from dpexp.loading import takes_arrays
from dpexp.schedule import Indices


def preload(dataset: Any, device: torch.device) -> Preloaded:
    """All rows of a map-style dataset on `device`.

    Random changes that the dataset makes to its rows are drawn once, not anew in each epoch.

    Raises:
        ConfigError: the dataset has a ``collate_fn`` of its own, or rows that do not stack.
    """
    rows = len(dataset)
    if takes_arrays(dataset) and hasattr(dataset, "__getitems__"):
        whole = dataset.collate_fn(dataset.__getitems__(np.arange(rows)))
    elif hasattr(dataset, "collate_fn"):
        raise _refusal(dataset, "its own collate_fn makes batches, which cannot be cut again")
    else:
        whole = collate([dataset[index] for index in range(rows)])
    if any(not shape or shape[0] != rows for shape in leading_sizes(whole)):
        raise _refusal(dataset, "not every tensor in it has the row as its first dimension")
    return Preloaded(move(whole, device), rows, device)


@final
class Preloaded:
    """Rows on a device; a batch is one gather per tensor, there."""

    def __init__(self, whole: Any, rows: int, device: torch.device) -> None:
        self._whole, self._rows, self._device = whole, rows, device

    def __len__(self) -> int:
        return self._rows

    def __getitems__(self, indices: Indices) -> Any:
        """The batch of these rows, on the device. Shapes: [len(indices), ...]."""
        where = torch.from_numpy(indices).to(self._device, non_blocking=True)
        return _select(self._whole, where, indices, self._rows)

    @staticmethod
    def collate_fn(batch: Any) -> Any:
        """The batch as it is."""
        return batch


def _select(value: Any, where: torch.Tensor, indices: Indices, rows: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value.index_select(0, where)
    if isinstance(value, dict):
        return {key: _select(entry, where, indices, rows) for key, entry in value.items()}
    if isinstance(value, (tuple, list)) and holds_rows(value, rows):
        return [value[index] for index in indices.tolist()]
    if isinstance(value, (tuple, list)):
        return like(value, [_select(entry, where, indices, rows) for entry in value])
    return value


def _refusal(dataset: Any, reason: str) -> ConfigError:
    return ConfigError(
        "loader.preload",
        "device",
        f"the dataset {type(dataset).__name__} cannot be put on the device as a whole: {reason}",
        fix="loader.preload=none",
    )
