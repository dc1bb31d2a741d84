"""Models, losses and data of users, some of which do other maths on several devices than on one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset
from usercode import own_rank

from dpexp.datasets import Rows


class ScaledByRank(nn.Module):
    """Multiplies its output by a number that differs by rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows) * (1 + own_rank())


class BatchMean(nn.Module):
    """Takes the mean of the rows it gets from each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows - rows.mean(dim=0))


class RowNumber(nn.Module):
    """Looks at where in its batch a row lies."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows) * torch.arange(len(rows), device=rows.device)[:, None]


def hidden_sum(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A sum over the rows, which dpexp takes for a mean."""
    return ((output - target) ** 2).sum()


class Dropping(nn.Module):
    """Dropout in a module and BatchNorm; with `functional`, dropout that no module shows."""

    def __init__(self, hidden: bool = False) -> None:
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.drop, self.hidden = nn.Dropout(0.5), hidden

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        inside = self.drop(self.norm(self.layer(rows)))
        return self.head(functional.dropout(inside, 0.5) if self.hidden else inside)


class LostKeys(nn.Module):
    """Attention whose key has a bias: its true gradient is 0, and what is computed is rounding."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens)
        parts = self.query(hidden), self.key(hidden), self.value(hidden)
        return self.head(functional.scaled_dot_product_attention(*parts))


class Remembering(nn.Module):
    """Adds the number of its calls, kept in Python and in a buffer, to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(5, 2), 0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.count += 1
        return self.layer(rows) + 0.01 * self.calls + 0.01 * self.count


class OnlySharded(nn.Module):
    """Refuses more rows than a device of two would get, as one that runs out of memory does."""

    def __init__(self, most: int = 15) -> None:
        super().__init__()
        self.layer, self.most = nn.Linear(5, 2), most

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if len(rows) > self.most:
            raise torch.OutOfMemoryError(f"no memory for {len(rows)} rows")
        return self.layer(rows)


class Overwriting(nn.Module):
    """Writes into its input, and cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("there is only one of me")

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows.mul_(2))


class Augmented(Dataset[Any]):
    """Rows with noise from the generators that each rank seeds for itself."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn(5) + random.random() + np.random.rand()
        return torch.full((5,), index / 100) + 0.1 * noise.float(), torch.ones(2)


class Flow(IterableDataset[Any]):
    """A stream of 100 rows."""

    def __iter__(self) -> Any:
        for index in range(100):
            yield torch.full((5,), index / 100), torch.full((2,), index / 50)


class Texts(Dataset[Any]):
    """Dicts with a list of texts and numbers beside the rows."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, Any]:
        values = torch.arange(5.0) * index / 50
        return {"text": f"row {index}", "nested": {"values": values, "none": None}, "label": 1.0}


class TextModel(nn.Module):
    """Counts on one text per row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def forward(self, text: list[str], nested: dict[str, Any]) -> torch.Tensor:
        numbers = torch.tensor([float(each.split()[1]) for each in text])
        return self.layer(torch.cat([nested["values"], numbers[:, None] / 50], dim=1))[:, 0]


def steps_of_one(rows: int = 7) -> Rows:
    """Few rows, for batches smaller than the number of devices."""
    source = torch.Generator().manual_seed(3)
    return Rows(torch.randn(rows, 5, generator=source), torch.randn(rows, 2, generator=source))


class NoisySGD(torch.optim.SGD):
    """Adds noise to the weights, other noise on every rank."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(0.01 * torch.randn_like(parameter))
