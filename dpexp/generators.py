"""The states of a rank's random number generators, as tensors."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from dpexp.carried import Tensors
from dpexp.plan import RunPlan


def _accelerators(plan: RunPlan, device: torch.device) -> Iterator[tuple[str, Any]]:
    """The generators of this rank's devices, by name: functions that get and set their state."""
    if device.type == "cpu":
        return
    module = torch.get_device_module(device)
    if device.type == "mps":
        yield "mps", (module.get_rng_state, module.set_rng_state)
        return
    alone = plan.num_processes == 1
    first = plan.first_index if alone else int(device.index or 0)
    for index in range(first, first + (plan.num_devices if alone else 1)):
        yield (
            f"{device.type}{index - first}",
            (
                lambda index=index: module.get_rng_state(index),
                lambda state, index=index: module.set_rng_state(state, index),
            ),
        )


def generators(plan: RunPlan, device: torch.device) -> Tensors:
    """The states of all generators of this rank. 64-bit floats hold 32-bit words exactly."""
    _, words, position, has_gauss, gauss = np.random.get_state()
    version, python, python_gauss = random.getstate()
    found = {
        "cpu": torch.get_rng_state(),
        "numpy": torch.tensor(
            [*map(float, words), position, has_gauss, gauss], dtype=torch.float64
        ),
        "python": torch.tensor(
            [version, *python, torch.nan if python_gauss is None else python_gauss],
            dtype=torch.float64,
        ),
    }
    return found | {name: get() for name, (get, _) in _accelerators(plan, device)}


def _float64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def set_generators(states: Tensors, plan: RunPlan, device: torch.device) -> None:
    """Go on from what :func:`generators` gave."""
    torch.set_rng_state(states["cpu"])
    *words, position, has_gauss, gauss = states["numpy"].tolist()
    keys = np.array(words, dtype=np.uint32)
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), gauss))
    version, *python, last = states["python"].tolist()
    random.setstate((int(version), tuple(map(int, python)), None if math.isnan(last) else last))
    for name, (_, put) in _accelerators(plan, device):
        put(states[name])
