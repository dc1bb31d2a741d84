"""The optimizer and the schedule of its learning rate."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler

from dpexp.build import build, explain_call
from dpexp.errors import ConfigError


def build_optimizer(node: dict[str, Any], model: nn.Module, *, zero: bool) -> torch.optim.Optimizer:
    """The optimizer over the model's trainable parameters.

    Args:
        zero: each rank keeps the state of a part of the parameters (ZeroRedundancyOptimizer).

    Raises:
        ConfigError: there is nothing to train, or see :func:`dpexp.build.build`.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ConfigError(
            "task",
            "train",
            f"the model ({type(model).__name__.removeprefix('FSDP')}) has no trainable parameter",
            fix="task=forward",
        )
    if node["_target_"].endswith(".LBFGS"):
        raise ConfigError(
            "optimizer._target_",
            node["_target_"],
            "calls the model several times in a step, which dpexp does not time",
            fix="optimizer=sgd",
        )
    make = build("optimizer", node, partial=True)
    try:
        if zero:
            return _sharded(make, node, trainable)
        return make(trainable)  # type: ignore[no-any-return]
    except ConfigError:
        raise
    except Exception as cause:
        error = explain_call("optimizer", node["_target_"], cause)
        if isinstance(cause, ValueError):  # torch's optimizers: "Invalid learning rate: -1"
            error = ConfigError("optimizer", node["_target_"], str(cause), fix="optimizer.lr=0.01")
        raise error from cause


def _sharded(
    make: Any, node: dict[str, Any], trainable: list[nn.Parameter]
) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if not (isinstance(make.func, type) and issubclass(make.func, torch.optim.Optimizer)):
        raise ConfigError(
            "parallel.zero",
            True,
            f"needs an optimizer class, and {node['_target_']} is something else",
            fix="optimizer=sgd, or parallel.zero=false",
        )
    return ZeroRedundancyOptimizer(trainable, optimizer_class=make.func, **make.keywords)


def build_lr_scheduler(
    value: Any, optimizer: torch.optim.Optimizer, steps: int | None
) -> LRScheduler | None:
    """What changes the learning rate after each step.

    Args:
        value: of the config: none, cosine, linear, or a node whose `_target_` takes the optimizer.
        steps: of the whole run, warm-up included; None for a stream without `steps`.

    Raises:
        ConfigError: the end of a named schedule is not known, or the target is no schedule.
    """
    if value == "none":
        return None
    if isinstance(value, str):
        if steps is None:
            raise ConfigError(
                "lr_scheduler",
                value,
                "must know the last step, and an iterable dataset has no length",
                fix="steps=1000",
            )
        if value == "cosine":
            return CosineAnnealingLR(optimizer, T_max=steps)
        return LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=steps)
    make = build("lr_scheduler", value, partial=True)
    try:
        scheduler = make(optimizer)
    except Exception as cause:
        raise explain_call("lr_scheduler", value["_target_"], cause) from cause
    plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    if plateau or not hasattr(scheduler, "step"):
        raise ConfigError(
            "lr_scheduler._target_",
            value["_target_"],
            "does not move by steps alone",
            allowed="a schedule whose step() takes no argument",
            fix="lr_scheduler=cosine",
        )
    return scheduler  # type: ignore[no-any-return]
