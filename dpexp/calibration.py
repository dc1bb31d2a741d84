"""What exchanging gradients costs, found by leaving it out.

After the warm-up, extra steps with and without the exchange take turns on one batch. Their
gradients are thrown away; weights, buffers, counters and random numbers are as before afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from dpexp.batches import Inputs
from dpexp.comm import Comm
from dpexp.loop import Work, forward_backward
from dpexp.plan import RunPlan
from dpexp.schema import CommHook, StrategyName
from dpexp.training import Training

# Attributes of a module that a forward can only replace, not write into.
PLAIN = (bool, int, float, complex, str, bytes, tuple, frozenset, type(None))


def why_not(plan: RunPlan) -> str | None:
    """Why this run cannot be calibrated; None if it can."""
    options = plan.config.parallel
    if options.static_graph:
        return "with parallel.static_graph torch does not allow steps without exchange"
    if options.comm_hook is CommHook.powersgd:
        return "powersgd carries its errors from step to step, so extra steps would change it"
    return None


def calibrate(
    inputs: Inputs,
    global_rows: int,
    work: Work,
    training: Training,
    model: nn.Module,
    plan: RunPlan,
    comm: Comm,
) -> dict[str, Any]:
    """Run `plan.calibration_pairs` pairs of extra steps on one batch. All ranks call it.

    The ranks meet before each, so that none begins one late. The step without exchange comes first
    in a pair: under FSDP the other one then takes along the gradients that it left.

    Returns:
        The rows of the batch over all devices; seconds of backward with and without the exchange,
        medians over the pairs; the median of their difference and its quartiles.
    """
    clock, strategy = work.clock, work.strategy
    rows: dict[bool, list[list[Any]]] = {False: [], True: []}
    with _restored(model, work):
        for _ in range(plan.calibration_pairs):
            for synchronise in (False, True):
                comm.max(0.0)
                marks = [clock.mark()]
                forward_backward(inputs, global_rows, work, marks, synchronise=synchronise)
                rows[synchronise].append(marks)
                if synchronise or plan.strategy is not StrategyName.fsdp:
                    training.forget()
    clock.settle()
    without, with_exchange = (
        clock.spans(rows[each])[:, 1::2].sum(axis=1) for each in (False, True)
    )
    difference = with_exchange - without
    if strategy.log is not None:
        strategy.log.noted.clear()
    return {
        "pairs": plan.calibration_pairs,
        "rows": global_rows,
        "backward_without_exchange_s": float(np.median(without)),
        "backward_with_exchange_s": float(np.median(with_exchange)),
        "exchange_s": float(np.median(difference)),
        "exchange_quartiles_s": [float(q) for q in np.percentile(difference, [25, 75])],
        "covers": "the scattering of gradients"
        if plan.strategy is StrategyName.fsdp
        else "the all-reduce of gradients, and waiting for other ranks in it",
    }


@contextmanager
def _restored(model: nn.Module, work: Work) -> Iterator[None]:
    """Buffers, plain attributes, random numbers and the shape log come out as they went in."""
    held = [_held(module) for module in model.modules()]
    own, numbers, legacy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    device = torch.cuda.get_rng_state() if work.strategy.device.type == "cuda" else None
    work.shapes.off = True
    try:
        yield
    finally:
        work.shapes.off = False
        for put_back in held:
            put_back()
        torch.set_rng_state(own)
        random.setstate(numbers)
        np.random.set_state(legacy)
        if device is not None:
            torch.cuda.set_rng_state(device)


def _held(module: nn.Module) -> Callable[[], None]:
    """What puts back a module's own buffers, and attributes that forward may count or draw with.

    Attributes of other kinds, a list of past outputs say, are left as they are.
    """
    # A forward may write into a buffer, or put another tensor in its place.
    buffers = {
        name: (buffer, buffer.detach().clone())
        for name, buffer in module._buffers.items()
        if buffer is not None
    }
    attributes = vars(module)
    plain = {name: value for name, value in attributes.items() if isinstance(value, PLAIN)}
    generators: list[Callable[[], Any]] = []
    for value in attributes.values():
        if isinstance(value, torch.Generator):
            generators.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            generators.append(partial(value.setstate, value.getstate()))
        elif isinstance(value, np.random.Generator):
            generators.append(
                partial(setattr, value.bit_generator, "state", value.bit_generator.state)
            )

    def put_back() -> None:
        for name, (buffer, before) in buffers.items():
            with torch.no_grad():
                buffer.copy_(before)
            module._buffers[name] = buffer
        attributes.update(plain)
        for generator in generators:
            generator()

    return put_back
