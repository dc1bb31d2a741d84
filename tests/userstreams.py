"""Datasets of a user's whose loader processes fail, and iterable ones."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from usercode import own_rank

Row = tuple[torch.Tensor, torch.Tensor]


def row_of(index: int, features: int = 1) -> Row:
    """The row of a stream or dataset: its number, and the target 0."""
    return torch.full((features,), float(index)), torch.zeros(1)


def sign(path: str) -> None:
    """Leave a file named like this process's id."""
    (Path(path) / str(os.getpid())).touch()


class Failing:
    """Ends or stops its loader process in the way `how`, on one rank, at row `at`."""

    def __init__(self, how: str, path: str, rank: int = 0, at: int = 55) -> None:
        self.how, self.path, self.rank, self.at = how, path, rank, at
        self.made_in = os.getpid()  # the rank; a loader process is another one

    def fetch(self, index: int) -> Row:
        sign(self.path)
        if os.getpid() != self.made_in and index == self.at and own_rank() == self.rank:
            self.fail()
        return row_of(index)

    def fail(self) -> None:
        if self.how != "linger":
            time.sleep(0.5)  # until the rank has used what there is and waits
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        if self.how == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.how == "_exit":
            os._exit(0)
        if self.how == "exit":
            sys.exit(3)
        if self.how == "linger":  # it has let go of its batches, but is there for another second
            threading.Thread(target=time.sleep, args=(1,)).start()
            sys.exit(0)
        if self.how == "hang":
            time.sleep(600)


class FailingLoader(Failing, Dataset[Any]):
    """60 rows of one feature."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Row:
        return self.fetch(index)


class FailingStream(IterableDataset[Any]):
    """The same as a stream, of which every loader process reads all rows."""

    def __init__(self, how: str, path: str, rank: int = 0, at: int = 55) -> None:
        self.rows = FailingLoader(how, path, rank, at)

    def __iter__(self) -> Iterator[Any]:
        return (self.rows.fetch(index) for index in range(60))


class Large(Dataset[Any]):
    """8 rows of 4 MB."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Row:
        sign(self.path)
        return row_of(index, features=2**20)


class Wide(torch.nn.Module):
    """[rows, features] -> their means [rows, 1], times a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows.mean(dim=1, keepdim=True))


class Slow(torch.nn.Module):
    """A linear layer that takes 0.2 s per call, so that batches wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        time.sleep(0.2)
        return self.layer(rows)


class Signing(Dataset[Any]):
    """12 rows; whoever fetches one leaves a file named like its process id."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Row:
        sign(self.path)
        return row_of(index)


class Numbers(IterableDataset[Any]):
    """The rows 0, 1, …; with `bad`, that one cannot be read."""

    def __init__(self, rows: int = 11, bad: int = -1) -> None:
        self.rows, self.bad = rows, bad

    def __iter__(self) -> Iterator[Row]:
        for index in self.mine():
            if index == self.bad:
                raise OSError(f"row {index} cannot be read")
            yield row_of(index)

    def mine(self) -> range:
        return range(self.rows)


class SplitByWorker(Numbers):
    """Splits itself over loader processes, as torch's documentation advises."""

    def mine(self) -> range:
        info = get_worker_info()
        return range(self.rows) if info is None else range(info.id, self.rows, info.num_workers)


class SplitByRank(Numbers):
    """Splits itself over the ranks, as for plain DDP."""

    def mine(self) -> range:
        return range(own_rank(), self.rows, int(os.environ.get("WORLD_SIZE", "1")))


class PlainIterable:
    """No class of torch's: it has only `__iter__`."""

    def __iter__(self) -> Iterator[Row]:
        return map(row_of, range(11))
