"""What a user would write: models and datasets named through `_target_`, some of them broken."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from dpexp.datasets import Rows


def own_rank() -> int:
    """This process's rank, as a user reads it."""
    return int(os.environ.get("RANK", "0"))


class Failing(nn.Module):
    """A linear layer that fails in the way `how`, on one rank, at one call."""

    def __init__(self, how: str, rank: int = 1, call: int = 2, features: int = 5) -> None:
        super().__init__()
        self.layer = nn.Linear(features, 2)
        self.how, self.rank, self.call, self.calls = how, rank, call, 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if own_rank() == self.rank and self.calls == self.call:
            self.fail()
        self.calls += 1
        return self.layer(rows)

    def fail(self) -> None:
        if self.how == "raise":
            raise ValueError("boom")
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "_exit":
            os._exit(0)
        if self.how == "exit":
            sys.exit(0)
        if self.how == "memory":
            torch.empty(10**15)
        if self.how == "sleep":
            time.sleep(60)


class Raising(nn.Module):
    """A module whose constructor raises."""

    def __init__(self, text: str = "no such thing") -> None:
        super().__init__()
        raise RuntimeError(text)


class Slow(nn.Module):
    """A linear layer that takes `seconds` per call."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)
        self.seconds = seconds

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.layer(rows)


class Talking(nn.Module):
    """Logs on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)
        logging.getLogger("user").info("an info")
        logging.getLogger("user").warning("a warning")

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows)


class SleepingRows(Dataset[Any]):
    """100 rows; fetching one takes `seconds` on one rank (on all with rank=-1)."""

    def __init__(self, seconds: float, rank: int = -1, rows: int = 100) -> None:
        self.seconds, self.rank, self.rows = seconds, rank, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.rank in (-1, own_rank()):
            time.sleep(self.seconds)
        return torch.full((5,), float(index)), torch.zeros(2)


def ramp5() -> Rows:
    """RAMP5: x = 0, 1, 2, 3, 4 of shape [5, 1], targets 0."""
    return Rows(torch.arange(5.0).reshape(5, 1), torch.zeros(5, 1))


class Lin1(nn.Module):
    """LIN1: one weight of 1, no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.layer.weight, 1.0)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows)


class Lin1WithLoss(Lin1):
    """LIN1 that returns its own loss, the mean of squares, as a 0-dim tensor."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return (self.layer(rows) ** 2).mean()
