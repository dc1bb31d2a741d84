"""A model whose computation is a pause: known to the millisecond, and no load on the cores."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn


class Pause(torch.autograd.Function):
    """Gives its input back after a pause, and the gradient after one twice as long."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Paced(nn.Module):
    """Two layers with a pause between them, as long as there are rows.

    In backward the second layer's gradients are ready before the pause, the first one's after it.

    Args:
        width: of both layers.
        row_s: seconds of forward for each row; backward takes twice as long.
    """

    def __init__(self, width: int = 64, row_s: float = 0.0005) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self._row_s = row_s

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.first(rows)
        paused: torch.Tensor = Pause.apply(hidden, self._row_s * len(rows))  # type: ignore[no-untyped-call]
        result: torch.Tensor = self.second(paused)
        return result
