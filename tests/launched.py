"""For tests of how runs are started: a model that writes what its ranks see."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dpexp

DDP2 = ("parallel=ddp", "num_devices=2")


def ok(*overrides: str, folder: Path) -> dpexp.Run:
    """A run that has to go well."""
    run = dpexp.run(list(overrides), folder=folder)
    assert run.result.status == "ok", run.result.error and run.result.error.traceback
    return run


def records(work: Path) -> list[dict[str, Any]]:
    """The results below outputs/, in the order of their folders."""
    paths = sorted(work.glob("outputs/runs/*/*/run.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def diary(path: Path, what: str) -> tuple[str, ...]:
    """A model of one feature that writes `what` at each call."""
    name = "model._target_=usercode.Diary"
    return ("model=custom", name, f"+model.path={path}", f"+model.what={what}")


def entries(path: Path, rank: int) -> list[Any]:
    """What it wrote in a rank."""
    lines = Path(f"{path}.{rank}").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def column(*values: int) -> tuple[str, ...]:
    """A dataset of one feature."""
    listed = ",".join(map(str, values))
    return ("dataset=custom", "dataset._target_=usercode.column", f"+dataset.values=[{listed}]")
