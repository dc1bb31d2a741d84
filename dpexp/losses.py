"""From outputs and targets to the mean loss over rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from dpexp.errors import ConfigError

Loss = Callable[[Any, Any], torch.Tensor]


def make_loss(loss: Any, custom: Loss | None) -> Loss:
    """The loss of a config.

    Args:
        loss: the config value: auto, mse, cross_entropy, output, or a node with a `_target_`.
        custom: the built object, when `loss` is a node.

    Returns:
        A function of (output, target) to the mean over the rows: 0-dim, or one entry per active
        replica when the model returns its own loss under dp.
    """
    if custom is not None:
        return lambda output, target: _scalar(custom(output, target), loss)
    return {"auto": _auto, "mse": _mse, "cross_entropy": _cross_entropy, "output": _output}[loss]


def _auto(output: Any, target: Any) -> torch.Tensor:
    if target is None:
        return _output(output, target)
    if isinstance(target, torch.Tensor) and not target.is_floating_point():
        return _cross_entropy(output, target)
    return _mse(output, target)


def _output(output: Any, _target: Any) -> torch.Tensor:
    value = output.get("loss") if isinstance(output, dict) else output
    value = getattr(value, "loss", value)
    if not isinstance(value, torch.Tensor) or value.dim() > 1:
        raise ConfigError(
            "loss",
            "output",
            f"there is no target and the model's output is not a loss: it is {_what(value)}",
            allowed="a 0-dim tensor, or a dict with the entry 'loss'",
            fix="a dataset of (input, target) rows, or a model that returns its loss",
        )
    return value


def _mse(output: Any, target: Any) -> torch.Tensor:
    _need_target("mse", target)
    if not isinstance(output, torch.Tensor) or output.shape != target.shape:
        # torch would broadcast [30, 2] against [30] and average over pairs that mean nothing.
        raise ConfigError(
            "loss",
            "mse",
            f"the model's output is {_what(output)}, the target {_what(target)}",
            allowed="equal shapes",
            fix="a model whose output has the target's shape",
        )
    return functional.mse_loss(output, target)


def _cross_entropy(output: Any, target: Any) -> torch.Tensor:
    _need_target("cross_entropy", target)
    return functional.cross_entropy(output, target)


def _need_target(name: str, target: Any) -> None:
    if target is None:
        raise ConfigError(
            "loss",
            name,
            "needs a target, but the dataset gives inputs only",
            fix="a dataset of (input, target) rows (dataset.targets=2 for dataset=random)",
        )


def _scalar(value: Any, loss: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.dim() > 0:
        raise ConfigError(
            "loss",
            loss,
            f"must give the mean over the rows as a 0-dim tensor, not {_what(value)}",
            fix="reduction: mean",
        )
    return value


def _what(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"of shape {list(value.shape)}"
    return f"a {type(value).__name__}"
