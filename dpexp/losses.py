"""From outputs and targets to the mean loss over rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from dpexp.errors import ConfigError

Loss = Callable[[Any, Any], torch.Tensor]
IGNORED = -100  # torch's cross_entropy leaves targets of this number out of its mean


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
    named: dict[str, Loss] = {
        "auto": _auto,
        "mse": _mse,
        "l1": _l1,
        "bce_with_logits": _bce_with_logits,
        "cross_entropy": _cross_entropy,
        "output": own_loss,
    }
    return named[loss]


def prediction(output: Any) -> Any:
    """What of a model's output is compared with the target.

    A tensor is it itself. Of a dict or an object with fields: `logits`, `output`, or the only
    tensor there is.

    Raises:
        ConfigError: none of these is there.
    """
    if isinstance(output, torch.Tensor):
        return output
    fields = output if isinstance(output, dict) else getattr(output, "__dict__", {})
    for name in ("logits", "output"):
        if isinstance(output, dict) and name in output:
            return output[name]
        if not isinstance(output, dict) and hasattr(output, name):
            return getattr(output, name)
    tensors = [value for value in fields.values() if isinstance(value, torch.Tensor)]
    if len(tensors) == 1:
        return tensors[0]
    held = f" with {', '.join(map(str, fields))}" if fields else ""
    raise ConfigError(
        "loss",
        type(output).__name__,
        f"the model's output is a {type(output).__name__}{held}; which part of it is meant?",
        allowed="a tensor, or an entry called logits or output",
        fix="loss={_target_: mymodule.my_loss}, a function of (output, target)",
    )


def class_scores(
    output: torch.Tensor, target: torch.Tensor, key: str = "loss", name: str = "cross_entropy"
) -> torch.Tensor:
    """The scores with the classes as dimension 1, as torch has them.

    Args:
        output: [rows, classes, ...] as in torch, or [rows, ..., classes] as language models give
            them.
        target: class numbers, [rows, ...].
        key: of the config, for messages: loss or metric; `name` is its value.

    Raises:
        ConfigError: the shapes fit neither, or both.
    """
    torch_way = output.dim() > 1 and (output.shape[0], *output.shape[2:]) == target.shape
    last = output.dim() > 1 and output.shape[:-1] == target.shape
    if output.dim() == 2 and torch_way:
        return output
    if torch_way == last:
        raise ConfigError(
            key,
            name,
            f"the model's output is {_what(output)}, the target {_what(target)}: the classes "
            + ("could be in dimension 1 or in the last one" if last else "are in neither place"),
            allowed="[rows, classes, ...] or [rows, ..., classes] for a target [rows, ...]",
            fix=f"{key}={{_target_: mymodule.mine}}, or {key}=output if the output is a loss",
        )
    return output.movedim(-1, 1) if last else output


def own_loss(output: Any, _target: Any) -> torch.Tensor:
    """The loss that the model returns: a 0-dim tensor, or the entry or field `loss`."""
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


def is_classes(target: Any) -> bool:
    """Whether a target holds class numbers."""
    return isinstance(target, torch.Tensor) and not (
        target.is_floating_point() or target.is_complex()
    )


def _auto(output: Any, target: Any) -> torch.Tensor:
    if target is None or has_own_loss(output):
        return own_loss(output, target)
    if is_classes(target):
        return _cross_entropy(output, target)
    return _mse(output, target)


def has_own_loss(output: Any) -> bool:
    """Whether the model's output brings its loss as an entry or a field."""
    if isinstance(output, torch.Tensor):  # asking a tensor for a field it lacks is slow
        return False
    entry = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    return isinstance(entry, torch.Tensor)


def _mse(output: Any, target: Any) -> torch.Tensor:
    return functional.mse_loss(*same_shape("loss", "mse", output, target))


def _l1(output: Any, target: Any) -> torch.Tensor:
    return functional.l1_loss(*same_shape("loss", "l1", output, target))


def _bce_with_logits(output: Any, target: Any) -> torch.Tensor:
    pair = same_shape("loss", "bce_with_logits", output, target)
    return functional.binary_cross_entropy_with_logits(*pair)


def _cross_entropy(output: Any, target: Any) -> torch.Tensor:
    return functional.cross_entropy(*scores_and_classes("loss", output, target))


def summed_cross_entropy(output: Any, target: Any) -> torch.Tensor:
    """The cross-entropy added up over the targets that count; 0-dim."""
    return functional.cross_entropy(*scores_and_classes("loss", output, target), reduction="sum")


def scores_and_classes(key: str, output: Any, target: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The arguments of torch's cross-entropy.

    Args:
        key: of the config, for messages: loss or metric.
        target: class numbers, or probabilities of the classes, torch's other form.
    """
    need_target(key, "cross_entropy", target)
    scores = _wide(prediction(output))
    if not is_classes(target):
        return same_shape(key, "cross_entropy", scores, target)
    return class_scores(scores, target, key), target.long()


def same_shape(key: str, name: str, output: Any, target: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Prediction and target, of one shape and type.

    torch would broadcast [30, 2] against [30] and average over pairs that mean nothing.

    Args:
        key: of the config, for messages: loss or metric.
    """
    need_target(key, name, target)
    value = _wide(prediction(output))
    if value.shape != target.shape:
        raise ConfigError(
            key,
            name,
            f"the model's output is {_what(value)}, the target {_what(target)}",
            allowed="equal shapes",
            fix=f"a model whose output has the target's shape, or {key}=output if it is a loss",
        )
    return value, target if target.dtype is value.dtype else target.to(value.dtype)


def _wide(value: torch.Tensor) -> torch.Tensor:
    """At least 32-bit floats: a target of 1001 is 1000 in the format of a bf16 output."""
    if value.dtype is torch.float32:
        return value
    return value.to(torch.promote_types(value.dtype, torch.float32))


def need_target(key: str, name: str, target: Any) -> None:
    """Refuse a loss or metric that compares with a target where there is none."""
    if not isinstance(target, torch.Tensor):
        found = "inputs only" if target is None else f"a {type(target).__name__} as target"
        raise ConfigError(
            key,
            name,
            f"needs a target, but the dataset gives {found}",
            fix="a dataset of (input, target) rows, or batch.target=<index or key>",
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
