"""What is done to a model after it is built, before a strategy and an optimizer see it."""

from __future__ import annotations

import torch
from torch import nn

from dpexp.plan import RunPlan
from dpexp.schema import StrategyName
from dpexp.schema_workload import PrepareConfig
from dpexp.weights import load_weights


def prepare_model(model: nn.Module, plan: RunPlan) -> tuple[nn.Module, tuple[str, ...]]:
    """Initial weights, layout and kind of BatchNorm, as ``prepare`` in the config says.

    Returns:
        The model, and notes on what a reader may not expect.

    Raises:
        ConfigError: the file with the weights does not fit the model.
    """
    config = plan.config.prepare
    notes: tuple[str, ...] = ()
    if config.init_from is not None:
        notes = load_weights(model, config.init_from)
    if config.sync_batchnorm and plan.strategy is not StrategyName.none:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model, notes


def compile_model(model: nn.Module, config: PrepareConfig) -> None:
    """torch.compile in place, after the strategy has wrapped the model.

    In place, so that the names in the state_dict stay; DDP's own optimisation of compiled models
    (graphs split at gradient buckets) works all the same, since DDP calls the module inside.
    """
    if config.compile:
        model.compile(mode=config.compile_mode.value)
