"""User code whose times, counts and randomness are known: for tests of what is measured."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from usercode import own_rank


class Remembers(nn.Module):
    """Its output depends on how often it was called and on generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)
        self.calls = 0
        self.register_buffer("in_place", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.torch_draws = torch.Generator().manual_seed(1)
        self.numpy_draws = np.random.default_rng(1)
        self.python_draws = random.Random(1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.in_place += 1
        self.replaced = self.replaced + 1
        drawn = float(torch.rand((), generator=self.torch_draws))
        drawn += float(self.numpy_draws.random()) + self.python_draws.random()
        scale = self.calls + self.in_place.item() + self.replaced.item() + drawn
        output: torch.Tensor = self.layer(rows) * scale * 0.1
        return output


class SlowAtFirst(nn.Module):
    """A linear layer whose first `slow` calls take `first_s` each, and all others `later_s`."""

    def __init__(self, first_s: float, later_s: float, slow: int = 1) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)
        self.first_s, self.later_s, self.slow = first_s, later_s, slow
        self.calls = 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        time.sleep(self.first_s if self.calls < self.slow else self.later_s)
        self.calls += 1
        return self.layer(rows)


class NowAndThenSlow(nn.Module):
    """A linear layer that takes `usual_s`, and at each tenth call `seldom_s`."""

    def __init__(self, usual_s: float, seldom_s: float) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)
        self.usual_s, self.seldom_s = usual_s, seldom_s
        self.calls = 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        time.sleep(self.usual_s if self.calls % 10 else self.seldom_s)
        return self.layer(rows)


class SlowPerRow(nn.Module):
    """A linear layer that takes `seconds` for each row."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)
        self.seconds = seconds

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds * len(rows))
        return self.layer(rows)


class Holds(nn.Module):
    """A linear layer that keeps so much memory."""

    def __init__(self, mib: int) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)
        self.held = bytearray(os.urandom(1) * (mib * 2**20))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows)


class CountsFiles(nn.Module):
    """A linear layer that appends the number of open files to `<path>.<rank>` at each call."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)
        self.path = path

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with Path(f"{self.path}.{own_rank()}").open("a", encoding="utf-8") as file:
            file.write(json.dumps(len(list(Path("/proc/self/fd").iterdir()))) + "\n")
        return self.layer(rows)


class NoCuda(nn.Module):
    """A linear layer after whose making nothing of torch.cuda that needs a device may be called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)
        for name in (
            "synchronize", "current_stream", "stream", "Stream", "Event", "set_device", "init",
            "memory_allocated", "max_memory_allocated", "reset_peak_memory_stats", "empty_cache",
            "get_rng_state", "set_rng_state", "current_device", "mem_get_info",
        ):  # fmt: skip
            setattr(torch.cuda, name, self._refuse(name))

    @staticmethod
    def _refuse(name: str) -> Any:
        def refuse(*_args: Any, **_kwargs: Any) -> Any:
            raise AssertionError(f"torch.cuda.{name} was called in a run on the CPU")

        return refuse

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows)


class SlowRows(Dataset[Any]):
    """`rows` rows of 5 numbers with targets; fetching one takes `seconds`."""

    def __init__(self, rows: int, seconds: float = 0.0) -> None:
        self.rows, self.seconds = rows, seconds

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self.seconds)
        return torch.full((5,), index / self.rows), torch.zeros(2)
