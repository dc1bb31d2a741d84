"""Metrics and losses of a user's, and the small data and models that make their values known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import usercode
import usermodels
from torch import nn
from torch.nn import functional
from torch.utils.data import IterableDataset

from dpexp.datasets import Rows


def eval5() -> Rows:
    """EVAL5: 5 rows whose class is 1, but 0 for row 0; what says 1 is wrong on that one only."""
    return Rows(torch.arange(5.0).reshape(5, 1), torch.tensor([0, 1, 1, 1, 1]))


class SaysOne(nn.Module):
    """Its logits are those of class 1, whatever the row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2)
        nn.init.zeros_(self.layer.weight)
        self.layer.bias.data = torch.tensor([0.0, 1.0])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows)


class Stream(IterableDataset[Any]):
    """The rows of a map-style dataset, one by one."""

    def __init__(self, of: str, values: list[float] | None = None) -> None:
        self.rows = {"eval5": eval5, "column": lambda: usercode.column(values or [])}[of]()

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[index] for index in range(len(self.rows)))


class MeanOutput(nn.Module):
    """Returns the mean of its rows as its own 0-dim value."""

    def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": rows.mean()}


def absolute(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A metric: one value per row."""
    return (output - target).abs()


def mean_absolute(output: torch.Tensor, target: torch.Tensor) -> float:
    """A metric: the mean as a plain number."""
    return (output - target).abs().mean().item()


class Largest:
    """A metric that is no mean: the largest output, with what it saw of the batches."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        assert output.shape == target.shape
        self.seen += output.flatten().tolist()

    def compute(self) -> float:
        return max(self.seen) + len(self.seen) / 1000


def mean_logits(output: Any, target: torch.Tensor) -> torch.Tensor:
    """A metric that reads a field of the model's own output class: one value per row."""
    assert len(output.logits) == len(target), (len(output.logits), len(target))
    return output.logits.flatten(1).mean(dim=1)


class Fielded(nn.Module):
    """Its output has the field `logits`, which are its rows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, rows: torch.Tensor) -> Any:
        return usermodels.KINDS[self.kind](loss=rows.mean(), logits=rows)


def small_mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss: a hundredth of the mean of squares."""
    return functional.mse_loss(output, target) / 100


def one_far_target() -> Rows:
    """4 rows x = 1 whose first target is near what a fresh layer gives, and the second far."""
    return Rows(torch.ones(4, 1), torch.tensor([[0.0, 20.0]]).repeat(4, 1))
