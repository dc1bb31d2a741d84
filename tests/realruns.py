"""For tests with real processes: run a configuration once, and read what it left."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dpexp
from dpexp import server

NONE = ("parallel=none",)
SPREAD: dict[str, tuple[str, ...]] = {
    f"{strategy} on {count}": (f"parallel={strategy}", f"num_devices={count}")
    for strategy in ("dp", "ddp", "fsdp")
    for count in (1, 2, 3)
}
EVERY = {"none": NONE, **SPREAD}


class Runs:
    """Runs a configuration; asked for it again, gives the same run."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        server.start(several_ranks=True)
        self._factory = factory
        self._done: dict[tuple[str, ...], dpexp.Run] = {}

    def __call__(self, *overrides: str) -> dpexp.Run:
        """A run that must go well."""
        done = self.ended(*overrides)
        assert done.result.status == "ok", done.result.error and done.result.error.traceback
        return done

    def ended(self, *overrides: str) -> dpexp.Run:
        """A run that may fail."""
        if overrides not in self._done:
            folder = self._factory.mktemp("run")
            self._done[overrides] = dpexp.run(list(overrides), folder=folder)
        return self._done[overrides]

    def folder(self) -> Path:
        """An empty folder."""
        return self._factory.mktemp("files")


def model(name: str, **arguments: object) -> tuple[str, ...]:
    """Overrides that name a class of usermodels.py, or of another module with dots."""
    return ("model=custom", *_target("model", name, arguments))


def data(name: str, **arguments: object) -> tuple[str, ...]:
    """The same for a dataset."""
    return ("dataset=custom", *_target("dataset", name, arguments))


def _target(key: str, name: str, arguments: dict[str, object]) -> list[str]:
    whole = name if "." in name else f"usermodels.{name}"
    return [
        f"{key}._target_={whole}",
        *(f"+{key}.{argument}={value}" for argument, value in arguments.items()),
    ]


def weights(run: dpexp.Run) -> dict[str, torch.Tensor]:
    """The final state_dict, of a run with save_weights=true."""
    saved: dict[str, torch.Tensor] = torch.load(run.folder / "weights.pt", weights_only=True)
    return saved


def column(run: dpexp.Run, name: str, rank: int = 0) -> list[float]:
    """A column of the table of steps."""
    with (run.folder / f"steps.rank{rank}.csv").open(encoding="utf-8", newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file)]


def diary(path: Path) -> list[Any]:
    """What a user's class wrote as JSON lines into `<path>.<rank>`, over all ranks."""
    files = sorted(path.parent.glob(f"{path.name}.*"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def difference(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of two state dicts with the same names."""
    assert list(got) == list(expected)
    return max(
        (got[name].double() - tensor.double()).abs().max().item()
        for name, tensor in expected.items()
        if tensor.numel()
    )
