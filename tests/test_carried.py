"""A state as JSON and tensors, and together again; random numbers that go on."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from builders import FakeComm, make_plan_for
from torch import nn

from dpexp.carried import UnsavableError, join, names_in, split
from dpexp.generators import generators, set_generators
from dpexp.masking import MaskedTargets
from dpexp.training import Training


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0.1 + 0.2,
        [1, (2.5, "a"), {}],
        {"betas": (0.9, 0.999), "is a": "tensor"},
        {3: 1, "3": 2},
        math.inf,
        (),
    ],
)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    plain = json.loads(json.dumps(split(value, "a", tensors), allow_nan=False))
    back = join(plain, tensors)
    assert (back, type(back), tensors) == (value, type(value), {})


def test_tensors_are_named_by_their_place() -> None:
    tensors: dict[str, torch.Tensor] = {}
    moment = torch.arange(3.0)
    plain = split({"state": [{"m": moment}, math.nan]}, "o", tensors)
    assert names_in(json.loads(json.dumps(plain))) == list(tensors) == ["o.state.0.m"]
    back = join(plain, tensors)
    assert back["state"][0]["m"] is moment and math.isnan(back["state"][1])


def test_what_is_neither_is_refused_with_its_place() -> None:
    with pytest.raises(UnsavableError, match=r"o\.a\.1 is a object"):
        split({"a": [1, object()]}, "o", {})


def test_random_numbers_go_on() -> None:
    plan, cpu = make_plan_for(), torch.device("cpu")

    def draw() -> tuple[Any, ...]:
        return torch.rand(3).tolist(), np.random.randn(3).tolist(), random.gauss(0, 1)

    draw()  # an odd number of normal ones: the generators keep the next
    kept = {name: state.clone() for name, state in generators(plan, cpu).items()}
    first = draw()
    set_generators(kept, plan, cpu)
    assert draw() == first


def test_schedule_scaler_and_counters_go_on() -> None:
    def made() -> Training:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=9)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        masked = MaskedTargets(FakeComm(), applies=True)
        return Training(nn.MSELoss(), model, optimizer, scaler, None, scheduler, masked)

    one, other = made(), made()
    state = one.state()
    state["skipped"], state["masked"] = 2, {"decided": True, "masked": False, "late": True}
    state["scheduler"]["last_epoch"], state["scaler"]["scale"] = 4, 2.0
    other.load(state)
    assert other.state() == state
    assert other.loss_scale == 2.0
    assert len(other.notes()) == 2
