"""One device takes the whole batch: the reference that every other strategy must equal."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import nn

from dpexp.batches import Inputs
from dpexp.parallel.base import Strategy
from dpexp.schedule import Indices


@final
class SingleDevice(Strategy):
    """No parallelism."""

    def wrap(self, model: nn.Module) -> None:
        self._model = model

    def choose_rows(self, rows: Indices) -> Indices:
        return rows

    def own_rows(self, global_rows: int) -> int:
        return global_rows

    def forward(self, inputs: Inputs, rows: int) -> Any:
        return self._noted(self._model, inputs)

    def weigh(self, loss: torch.Tensor, rows: int, global_rows: int) -> torch.Tensor:
        loss = self._scalar(loss)
        return loss if rows == global_rows else loss * (rows / global_rows)
