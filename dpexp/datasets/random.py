"""Random rows: the exercise's dataset."""

from __future__ import annotations

import torch

from dpexp.datasets.rows import Rows
from dpexp.errors import ConfigError


def random_rows(rows: int, features: int, targets: int, seed: int) -> Rows:
    """Normally distributed rows, the same for the same arguments.

    Args:
        rows: how many.
        features: numbers per row. Input batches have shape [batch, features].
        targets: numbers per target, shape [batch, targets]; 0 gives rows without targets.
        seed: of the generator.
    """
    for key, value, least in (
        ("rows", rows, 0),
        ("features", features, 1),
        ("targets", targets, 0),
    ):
        if value < least:
            raise ConfigError(f"dataset.{key}", value, "is too small", allowed=f"{least} or more")
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, features, generator=generator)
    if targets == 0:
        return Rows(inputs)
    return Rows(inputs, torch.randn(rows, targets, generator=generator))
