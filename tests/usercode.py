"""What a user would write: models and datasets named through `_target_`, some of them broken."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed import HashStore
from torch.utils.data import Dataset

from dpexp import ConfigError
from dpexp.datasets import Rows
from dpexp.models import cnn


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
        if self.how == "stuck":
            sum(itertools.repeat(0, 10**12))  # minutes in C code, deaf to signals
        if self.how == "interrupt":
            raise KeyboardInterrupt


class FailingCnn(Failing):
    """The built-in network for digits, with the same ways to fail."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.layer = cnn(in_channels=1, channels=[16, 32], classes=10)


class Raising(nn.Module):
    """A module whose constructor raises."""

    def __init__(self, text: str = "no such thing") -> None:
        super().__init__()
        raise RuntimeError(text)


class Moody(nn.Module):
    """A linear layer whose constructor raises `text`, unless that is "fine"."""

    def __init__(self, text: str) -> None:
        super().__init__()
        if text != "fine":
            raise RuntimeError(text)
        self.layer = nn.Linear(5, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows)


class SecondTime(nn.Module):
    """A linear layer whose constructor fails the second time it is called, by a diary in `path`."""

    def __init__(self, path: str) -> None:
        super().__init__()
        with open(path, "a", encoding="utf-8") as diary:
            diary.write("built\n")
        if len(Path(path).read_text(encoding="utf-8").splitlines()) == 2:
            raise RuntimeError("the second time")
        self.layer = nn.Linear(5, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows)


class Slow(nn.Module):
    """A linear layer that takes `seconds` per call."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)
        self.seconds = seconds

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.layer(rows)


class Filling(nn.Module):
    """A linear layer whose forward leaves no room on the disk of `path`."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)
        self.path = path

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with Path(self.path).open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        return self.layer(rows)


class Hungry(nn.Module):
    """A linear layer whose output holds so much memory for each row."""

    def __init__(self, mib_per_row: int) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)
        self.mib_per_row = mib_per_row

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        held = torch.ones(len(rows), self.mib_per_row * 2**18)
        held[:, :2] = self.layer(rows)
        return held[:, :2]  # a view


class Ticking(Slow):
    """Slow, and appends a dot to `<path>.<rank>` when a call is over."""

    def __init__(self, seconds: float, path: str) -> None:
        super().__init__(seconds)
        self.path = path

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output = super().forward(rows)
        with Path(f"{self.path}.{own_rank()}").open("a", encoding="utf-8") as file:
            file.write(".")
        return output


class StoppedInAWrite(Ticking):
    """Rank 0 gets SIGTERM when its table has the rows of a flush and nothing else has them."""

    def __init__(self, seconds: float, path: str, after_steps: int) -> None:
        super().__init__(seconds, path)
        from dpexp.sinks.csv import CsvSink

        write = CsvSink.write

        def stopped(sink: CsvSink, records: Any) -> None:
            write(sink, records)
            if own_rank() == 0 and records[-1].step >= after_steps:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.1)  # its handler runs here, in Python code

        CsvSink.write = stopped  # type: ignore[method-assign]


class StoppedInAWait(Ticking):
    """It gets SIGTERM while it waits for other ranks at a flush, and then the wait fails."""

    def __init__(self, seconds: float, path: str, after_flushes: int) -> None:
        super().__init__(seconds, path)
        from dpexp.comm import LocalComm

        flushes = itertools.count()

        def failing(_comm: LocalComm, values: torch.Tensor) -> torch.Tensor:
            if next(flushes) < after_flushes:
                return values
            Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
            # In C++, so the signal's handler does not run before it has failed.
            HashStore().wait(["what nobody sets"], timedelta(seconds=1))
            raise AssertionError("it has not failed")

        LocalComm.highest = failing  # type: ignore[method-assign]


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


class Lin1AlsoLoss(Lin1):
    """LIN1 that returns a dict with its own loss and its output."""

    def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        output = self.layer(rows)
        return {"output": output, "loss": (output**2).mean()}


def column(values: list[float]) -> Rows:
    """Rows of one feature with these values, targets 0."""
    inputs = torch.tensor(values, dtype=torch.float32).reshape(-1, 1)
    return Rows(inputs, torch.zeros_like(inputs))


def inputs_only(values: list[float]) -> Rows:
    """Rows of one feature with these values and without targets."""
    return Rows(torch.tensor(values, dtype=torch.float32).reshape(-1, 1))


class Counting(nn.Module):
    """Counts its calls in a plain attribute and in a buffer; both are in the state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)
        self.calls = 0
        self.register_buffer("buf", torch.zeros(()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.buf += 1
        return self.layer(rows)

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


class Masked(nn.Module):
    """A linear layer behind a bool mask, which is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)
        self.register_buffer("mask", torch.tensor([True, False, True, True, False]))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows * self.mask)


class Frozen(nn.Module):
    """A linear layer without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2).requires_grad_(False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows)


class Nested(nn.Module):
    """A module whose own child is called `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(5, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.module(rows)


class Shifted(nn.Module):
    """LIN1 plus a number that comes as a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Lin1()

    def forward(self, rows: torch.Tensor, *, delta: float) -> torch.Tensor:
        return self.layer(rows) + delta


class Returning(nn.Module):
    """Returns `what`: a container torch can gather, or something it cannot."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)
        self.what = what

    def forward(self, rows: torch.Tensor) -> Any:
        output = self.layer(rows)
        if self.what == "number":
            return {"loss": output, "k": 3}
        if self.what == "dataclass":
            return TwoTensors(output, rows)
        return {"loss": output, "aux": None, "parts": [output, [rows]]}


@dataclass
class TwoTensors:
    """A plain dataclass, which torch's gather does not walk."""

    first: torch.Tensor
    second: torch.Tensor


class FirstParameterDevice(nn.Module):
    """Takes its device from its first parameter, of which a replica of DataParallel has none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows.to(next(self.parameters()).device))


class Hiding(nn.Module):
    """Keeps a layer in a plain list, where torch does not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)
        self.hidden = [nn.Linear(2, 2)]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.hidden[0](self.layer(rows))


class Local(nn.Module):
    """Holds a lambda and a class that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()

        class Scale:
            factor = 2.0

        self.layer = nn.Linear(5, 2)
        self.scale = Scale()
        self.activation = lambda value: value * self.scale.factor

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.activation(self.layer(rows))


class Strict(nn.Module):
    """A module with one argument, which may be misspelt."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layer = nn.Linear(5, hidden)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows)


class Tower(nn.Module):
    """Linear layers with these numbers of inputs and outputs, which may not fit each other."""

    def __init__(self, layers: list[list[int]]) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(*sizes) for sizes in layers))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.body(rows)


class BadAtStep(nn.Module):
    """LIN1 whose output is not finite from call `call` on."""

    def __init__(self, call: int, value: float = float("nan")) -> None:
        super().__init__()
        self.layer = Lin1()
        self.call, self.value, self.calls = call, value, 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output = self.layer(rows)
        if self.calls >= self.call:
            output = output * self.value
        self.calls += 1
        return output


class Diary(nn.Module):
    """Appends one JSON line per call to `<path>.<rank>`: what `what` asks for."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.path, self.what = path, what

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        entry = {
            "rows": lambda: rows.flatten().tolist(),
            "noise": lambda: torch.rand(4).tolist(),
            "variables": lambda: dict(os.environ),
            "folder": lambda: str(Path.cwd()),
            "threads": torch.get_num_threads,
        }[self.what]()
        with Path(f"{self.path}.{own_rank()}").open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        return self.layer(rows)


class NoisyRows(Dataset[Any]):
    """8 rows whose single feature is a number drawn by torch, numpy or random when fetched."""

    def __init__(self, source: str) -> None:
        self.source = source

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = {
            "torch": lambda: torch.rand(()).item(),
            "numpy": np.random.random,
            "random": random.random,
        }[self.source]
        return torch.tensor([draw()]), torch.zeros(1)


class Unsized(Dataset[Any]):
    """A dataset without a length."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(5)


class SigningRows(Dataset[Any]):
    """100 rows of 5 features; whoever fetches one leaves a file named like its process id."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        (Path(self.path) / str(os.getpid())).touch()
        return torch.zeros(5), torch.zeros(2)


class FailingRows(Dataset[Any]):
    """100 rows of 5 features; fetching row `bad` raises."""

    def __init__(self, bad: int = 50) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == self.bad:
            raise OSError(f"row {index} cannot be read")
        return torch.zeros(5), torch.zeros(2)


def not_a_module() -> int:
    """A target that gives something else than a module."""
    return 3


def mistaken() -> nn.Module:
    """A constructor that finds a mistake in its own arguments."""
    raise ConfigError("model.colour", "blue", "there is no such colour", fix="model.colour=red")


class Lopsided(nn.Module):
    """Has one layer more on each further rank."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(5, 5) for _ in range(own_rank() + 1)))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.body(rows)


class OddRows(Dataset[Any]):
    """Batches in which one tensor does not have the batch as its first dimension.

    `hidden`: a sequence [rows, 6, 3] and the state [2, rows, 8] of a GRU of two layers;
    `images`: two images of 4 and 6 channels.
    """

    def __init__(self, what: str) -> None:
        self.what = what

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((6, 3), float(index))

    def collate_fn(self, rows: list[torch.Tensor]) -> Any:
        if self.what == "hidden":
            return (torch.stack(rows), torch.zeros(2, len(rows), 8)), torch.zeros(len(rows))
        return [torch.zeros(4, 8, 8), torch.zeros(6, 8, 8)], torch.zeros(len(rows))


class Sums(nn.Module):
    """Adds up everything it gets."""

    def forward(self, *parts: torch.Tensor) -> torch.Tensor:
        return torch.stack([part.sum() for part in parts])


class MeanOfOutput(nn.Module):
    """A loss that looks at the output alone."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.mean()
