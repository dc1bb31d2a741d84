"""For tests of dissect(): what is dissected, and parts of what comes out."""

from __future__ import annotations

from typing import Any

from builders import make_plan_for

from dpexp.anatomy import Anatomy, dissect
from dpexp.anatomy.data import BatchShapes, DeviceMemory
from dpexp.schema import Task

ADAMW = {"_target_": "torch.optim.AdamW", "lr": 0.1}
MOMENTUM = {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9}
SEQUENCES = {"_target_": "specimens.Sequences"}


def train(strategy: str = "none", num_devices: int = 1, **overrides: Any) -> Anatomy:
    """A training run of the exercise, or of what `overrides` name."""
    return dissect(make_plan_for(strategy, num_devices, task=Task.train, **overrides))


def of(name: str, strategy: str = "none", num_devices: int = 1, **overrides: Any) -> Anatomy:
    """A forward run of a model of specimens.py."""
    arguments = overrides.pop("arguments", {})
    model = {"_target_": f"specimens.{name}", **arguments}
    return dissect(make_plan_for(strategy, num_devices, model=model, **overrides))


def values(memory: DeviceMemory) -> dict[str, int | None]:
    """Bytes by part."""
    return {name: part.value for name, part in memory.parts.items()}


def table(batch: BatchShapes | None) -> list[tuple[int, str, str, str]]:
    """Rows, inputs, target and output of each device."""
    assert batch is not None
    return [(each.rows, each.inputs, each.target, each.output) for each in batch.devices]


def random_rows(rows: int = 100) -> dict[str, Any]:
    """The exercise's dataset."""
    return {
        "_target_": "dpexp.datasets.random_rows",
        "rows": rows,
        "features": 5,
        "targets": 2,
        "seed": 0,
    }
