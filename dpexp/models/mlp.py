"""A multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from dpexp.errors import ConfigError


def mlp(widths: Sequence[int]) -> nn.Module:
    """Linear layers with ReLU between them: [batch, ...] flattened to widths[0] -> widths[-1]."""
    if len(widths) < 2 or min(widths) < 1:
        raise ConfigError(
            "model.widths",
            list(widths),
            "must name at least an input and an output width",
            fix="model.widths=[64,128,10]",
        )
    layers: list[nn.Module] = [nn.Flatten()]
    for index, (before, after) in enumerate(pairwise(widths)):
        if index:
            layers.append(nn.ReLU())
        layers.append(nn.Linear(before, after))
    return nn.Sequential(*layers)
