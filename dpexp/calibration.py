"""What exchanging gradients costs, found by leaving it out.

After the warm-up, extra steps with and without the exchange take turns on one batch. Their
gradients are thrown away; weights, buffers and random numbers are as before afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
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
        Seconds of backward with and without the exchange, medians over the pairs; the median of
        their difference and its quartiles.
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
    """Buffers, random numbers and the shape log come out as they went in."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    own, numbers, legacy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    device = torch.cuda.get_rng_state() if work.strategy.device.type == "cuda" else None
    work.shapes.off = True
    try:
        yield
    finally:
        work.shapes.off = False
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        torch.set_rng_state(own)
        random.setstate(numbers)
        np.random.set_state(legacy)
        if device is not None:
            torch.cuda.set_rng_state(device)
