"""What a user trains whose runs are cut off: a model that draws random numbers in each step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Dropped(nn.Sequential):
    """Rows [rows, 5] -> [rows, 2], with dropout, statistics and a child that is called module."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(5, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(8, 2)


class Stateful(torch.optim.SGD):
    """Keeps an object that is no number with each parameter."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        for group in self.param_groups:
            group["history"] = object()


class Counting(torch.optim.SGD):
    """Has a state from its first step on, some of it of no parameter."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)

    def step(self, closure: Any = None) -> Any:
        count = self.state["all"].get("count", 0)
        self.state["all"]["count"] = count + 1
        return super().step(closure)


class Malicious:
    """Makes a folder when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.place),)
