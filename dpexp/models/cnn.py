"""A small convolutional network."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from dpexp.errors import ConfigError

POOLED = 4  # cells of the grid in each direction


def cnn(in_channels: int, channels: Sequence[int], classes: int) -> nn.Module:
    """3x3 convolutions with ReLU, means over a 4x4 grid of the image, a linear layer.

    [batch, in_channels, height, width] -> [batch, classes]; any height and width.
    """
    if not channels or min(*channels, in_channels, classes) < 1:
        raise ConfigError(
            "model.channels",
            list(channels),
            "needs one positive width per convolution",
            fix="model.channels=[16,32]",
        )
    layers: list[nn.Module] = []
    for before, after in zip([in_channels, *channels], channels, strict=False):
        layers += [nn.Conv2d(before, after, kernel_size=3, padding=1), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(POOLED), nn.Flatten()]
    layers += [nn.Linear(channels[-1] * POOLED**2, classes)]
    return nn.Sequential(*layers)
