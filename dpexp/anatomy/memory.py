"""Bytes on each device, part by part. Computed; the activations are an estimate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dpexp.anatomy.data import DeviceMemory, Figure, ModelFacts
from dpexp.anatomy.trace import reason_of, tensors_in
from dpexp.anatomy.traffic import fsdp_units, shard_bytes
from dpexp.build import UserCodeError
from dpexp.errors import ConfigError
from dpexp.optimizers import build_optimizer
from dpexp.plan import RunPlan
from dpexp.schema import CommHook, StrategyName


@dataclass(frozen=True)
class State:
    """An optimizer's state after one step.

    Args:
        sizes: for each trainable parameter, (bytes, whether of the parameter's shape) of each
            tensor of its state.
        reason: why it is not known; "" = it is.
    """

    sizes: tuple[tuple[tuple[int, bool], ...], ...] = ()
    reason: str = ""


def optimizer_state(node: dict[str, Any], model: nn.Module, fake: Any) -> State:
    """What the optimizer keeps, found by one step over fake parameters.

    Args:
        model: holds fake parameters.
        fake: torch's mode that made them.

    Raises:
        ConfigError: as in a run.
    """
    try:
        with fake:
            optimizer = build_optimizer(node, model, zero=False)
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            for parameter in trained:
                parameter.grad = torch.empty_like(parameter)
            optimizer.step()
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  # the user's code may raise anything
        cause = error.__cause__ if isinstance(error, UserCodeError) else None
        return State(reason=reason_of(cause or error))
    finally:
        model.zero_grad(set_to_none=True)
    sizes = []
    for parameter in trained:
        found = tensors_in(optimizer.state.get(parameter, {}))
        sizes.append(tuple((t.nbytes, t.shape == parameter.shape) for t in found))
    return State(tuple(sizes))


def memory_of(
    model: nn.Module,
    facts: ModelFacts,
    plan: RunPlan,
    state: State | None,
    activations: Figure,
    inputs: tuple[int, int],
) -> tuple[DeviceMemory, ...]:
    """Bytes by part: of each device, under dp of the first and of each further one.

    Args:
        state: None when not training.
        activations: of one micro-batch on device 0.
        inputs: bytes of a batch on the first device, and on a further one.
    """
    if plan.strategy is StrategyName.fsdp:
        return (DeviceMemory("each device", _fsdp(model, plan, state, activations, inputs[0])),)
    training = state is not None
    gradients = facts.gradient_bytes if training else 0
    parts = {
        "parameters": Figure(facts.parameter_bytes),
        "buffers": Figure(facts.buffer_bytes),
        "gradients": Figure(gradients, "" if training else "none without training"),
        "optimizer state": _state(model, plan, state),
        "activations": activations,
        "batch": _batch(plan, inputs[0]),
    }
    if plan.strategy is StrategyName.ddp and training:
        parts |= _ddp_extra(plan, facts.gradient_bytes)
    if plan.strategy is not StrategyName.dp or plan.num_devices == 1:
        where = "the device" if plan.num_devices == 1 else "each device"
        return (DeviceMemory(where, parts),)
    later = "further devices: until they are added up on device 0"
    further = {
        "parameters": Figure(
            facts.parameter_bytes, "further devices: copies, thrown away after each step"
        ),
        "buffers": Figure(facts.buffer_bytes),
        "gradients": Figure(gradients, later if training else ""),
        "optimizer state": Figure(0),
        "activations": activations,
        "batch": Figure(inputs[1]),
    }
    return (DeviceMemory("device 0", parts), DeviceMemory("each further device", further))


def _fsdp(
    model: nn.Module, plan: RunPlan, state: State | None, activations: Figure, inputs: int
) -> dict[str, Figure]:
    ranks, options = plan.num_devices, plan.config.parallel
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    own = sum(shard_bytes(parameter, ranks) for parameter in model.parameters())
    gradients = sum(shard_bytes(parameter, ranks) for parameter in trained)
    note = f"1 of {ranks} parts"
    if state is None:
        gradients, grad_note = 0, "none without training"
    elif plan.config.accumulate > 1:
        gradients += sum(parameter.nbytes for parameter in trained)
        grad_note = f"{note}, and all of them until the last micro-batch"
    else:
        grad_note = note
    units = [sum(p.nbytes for p in tensors) for _, tensors in fsdp_units(model, options.wrap)]
    *inner, root = units
    if options.reshard_after_forward:
        gathered = root + sum(sorted(inner)[-2:])
        gathered_note = "the rest and two units: the one in use, the next on its way"
        gathered_note = gathered_note if inner else "the whole model"
    else:
        gathered, gathered_note = sum(units), "all units, from forward to backward"
    return {
        "parameters": Figure(own, note),
        "parameters gathered": Figure(gathered, gathered_note),
        "buffers": Figure(sum(buffer.nbytes for buffer in model.buffers())),
        "gradients": Figure(gradients, grad_note),
        "optimizer state": _state(model, plan, state),
        "activations": activations,
        "batch": _batch(plan, inputs),
    }


def _state(model: nn.Module, plan: RunPlan, state: State | None) -> Figure:
    """The optimizer's state on the device that has most of it."""
    if state is None:
        return Figure(0, "none without training")
    if state.reason:
        return Figure(None, state.reason)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ranks = plan.num_devices
    if plan.strategy is StrategyName.fsdp:
        total = 0
        for parameter, sizes in zip(trained, state.sizes, strict=True):
            share = shard_bytes(parameter, ranks) / max(parameter.nbytes, 1)
            total += sum(round(size * share) if alike else size for size, alike in sizes)
        return Figure(total, f"1 of {ranks} parts")
    totals = [sum(size for size, _ in sizes) for sizes in state.sizes]
    if not plan.config.parallel.zero:
        return Figure(sum(totals))
    return Figure(
        max(_greedy([p.numel() for p in trained], totals, ranks)),
        f"zero: of the rank with most of it; {sum(totals):,} B over all",
    )


def _greedy(numbers: Sequence[int], weights: Sequence[int], ranks: int) -> list[int]:
    """ZeroRedundancyOptimizer's assignment: largest first, to the rank with least so far."""
    filled, held = [0] * ranks, [0] * ranks
    for index in sorted(range(len(numbers)), key=lambda i: numbers[i], reverse=True):
        rank = filled.index(min(filled))
        filled[rank] += numbers[index]
        held[rank] += weights[index]
    return held


def _ddp_extra(plan: RunPlan, gradient_bytes: int) -> dict[str, Figure]:
    options = plan.config.parallel
    view = bool(options.gradient_as_bucket_view)
    note = "the gradients are views into them" if view else "copies of the gradients"
    extra = {"DDP buckets": Figure(0 if view else gradient_bytes, note)}
    if options.comm_hook is CommHook.powersgd:
        note = "the error that the next step corrects; its factors are not in it"
        extra["powersgd"] = Figure(gradient_bytes, note)
    return extra


def _batch(plan: RunPlan, inputs: int) -> Figure:
    whole = plan.strategy is StrategyName.dp and plan.num_devices > 1
    note = "device 0 has the whole batch" if whole else ""
    if plan.device_type == "cuda":
        note = "this one and the next, on its way"
        return Figure(2 * inputs, note)
    return Figure(inputs, note)
