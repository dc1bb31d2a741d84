"""Disturbances on purpose: what sleeps, where and for how long, without sleeping."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from builders import make_config, make_context
from torch import nn

from dpexp import disturb
from dpexp.batches import Inputs
from dpexp.disturb import collective_pause, disturb_forward, disturbed
from dpexp.parallel import make_strategy
from dpexp.schedule import GlobalBatch
from dpexp.schema import StrategyName
from dpexp.schema_measuring import InjectConfig

Slept = list[float]


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> Slept:
    """How long was slept, in order."""
    times: Slept = []
    monkeypatch.setattr("time.sleep", times.append)
    return times


def inject(**keys: Any) -> InjectConfig:
    return make_config(inject=keys).inject


def batches(count: int) -> Any:
    return ((GlobalBatch(step, 0, np.arange(3)), f"data {step}") for step in range(count))


def steps(found: Any) -> list[int]:
    return [batch.step for batch, _ in found]


# Collectives


def test_without_a_delay_collectives_do_not_pause() -> None:
    assert collective_pause(inject()) is None


def test_each_collective_pauses_for_the_delay(slept: Slept) -> None:
    pause = collective_pause(inject(collective_delay_s=0.05))
    assert pause is not None
    pause()
    pause()
    assert slept == [0.05, 0.05]


# Batches


def test_undisturbed_batches_are_the_same_object() -> None:
    own = batches(1)
    assert disturbed(own, inject(), 0) is own
    assert disturbed(own, inject(data_delay_s=0.1, data_rank=1), 0) is own
    assert disturbed(own, inject(die_rank=1, hang_rank=2), 0) is own


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_waits_for_its_data(rank: int, slept: Slept) -> None:
    found = list(disturbed(batches(3), inject(data_delay_s=0.2), rank))
    assert [fetched for _, fetched in found] == ["data 0", "data 1", "data 2"]
    assert slept == [0.2] * 3


def test_only_the_chosen_rank_waits_for_its_data(slept: Slept) -> None:
    assert steps(disturbed(batches(2), inject(data_delay_s=0.2, data_rank=1), 1)) == [0, 1]
    assert slept == [0.2] * 2


def test_a_rank_kills_itself_when_it_fetches_the_step(
    slept: Slept, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *both: killed.append(both))
    found = disturbed(batches(5), inject(die_rank=1, at_step=2), 1)
    assert steps([next(found), next(found)]) == [0, 1]
    assert killed == []
    next(found)
    assert killed == [(os.getpid(), signal.SIGKILL)]
    assert steps(found) == [3, 4]
    assert (len(killed), slept) == (1, [])


def test_a_rank_hangs_when_it_fetches_the_step(slept: Slept) -> None:
    found = disturbed(batches(4), inject(hang_rank=0, at_step=1), 0)
    assert steps([next(found)]) == [0]
    assert slept == []
    next(found)
    assert slept == [disturb.FOREVER_S]
    list(found)
    assert len(slept) == 1


# The model


class Slow(nn.Module):
    """Its forward takes 2 s of a clock that the test holds."""

    def __init__(self, clock: list[float]) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock[0] += 2.0
        return x


Disturbed = Callable[..., Slow]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Disturbed:
    clock = [100.0]
    monkeypatch.setattr(disturb, "now_s", lambda: clock[0])

    def make(rank: int = 0, *, training: bool = False, seed: int = 0, **keys: Any) -> Slow:
        made = Slow(clock)
        disturb_forward(made, inject(**keys), rank, seed, training=training)
        return made

    return make


def test_an_undisturbed_model_has_no_hooks(model: Disturbed) -> None:
    made = model()
    assert not made._forward_hooks and not made._forward_pre_hooks


@pytest.mark.parametrize(
    ("training", "seconds"),
    [(False, 0.2 * 2.0), (True, 0.2 * 6.0)],
    ids=["forward", "train"],
)
def test_the_slow_rank_sleeps_for_its_share_of_forward_or_of_the_whole_step(
    training: bool, seconds: float, model: Disturbed, slept: Slept
) -> None:
    made = model(1, training=training, slow_rank=1, slow_factor=1.2)
    made(torch.ones(1))
    made(torch.ones(1))
    assert slept == pytest.approx([seconds] * 2)


def test_a_factor_of_one_slows_nothing(model: Disturbed, slept: Slept) -> None:
    model(0, slow_rank=0, slow_factor=1.0)(torch.ones(1))
    assert slept == [0]


def test_other_ranks_are_not_slow(model: Disturbed, slept: Slept) -> None:
    model(0, slow_rank=1, noisy_rank=1, noise_s=0.5)(torch.ones(1))
    assert slept == []


def test_a_noisy_rank_pauses_for_random_times_of_the_given_mean(
    model: Disturbed, slept: Slept
) -> None:
    made = model(0, noisy_rank=0, noise_s=0.05)
    for _ in range(2000):
        made(torch.ones(1))
    assert len(slept) == 2000
    assert sum(slept) / 2000 == pytest.approx(0.05, rel=0.1)  # 4.5 standard errors
    assert min(slept) >= 0 and len(set(slept)) == 2000
    # Exponential: the standard deviation is the mean.
    assert float(np.std(slept)) == pytest.approx(0.05, rel=0.2)


def test_the_noise_is_drawn_from_the_seed_and_from_nothing_else(
    model: Disturbed, slept: Slept
) -> None:
    before = torch.get_rng_state()
    for seed in (3, 3, 4):
        model(seed=seed, noisy_rank=0, noise_s=0.05)(torch.ones(1))
    assert slept[0] == slept[1] != slept[2]
    assert torch.equal(torch.get_rng_state(), before)


def test_under_dp_one_replica_is_slow(slept: Slept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disturb, "now_s", iter(range(100)).__next__)
    made = nn.Linear(1, 1)
    disturb_forward(made, inject(slow_rank=2, slow_factor=3.0), 0, 0, training=False)
    strategy = make_strategy(StrategyName.dp, make_context("dp", 3))
    strategy.wrap(made)
    strategy.forward(Inputs((torch.ones(6, 1),), {}, None), 6)
    strategy.close()
    (seconds,) = slept  # one of three replicas
    assert seconds >= 2.0  # twice what its forward took on a clock that ticks at each look


def test_the_hooks_change_nothing_of_what_the_model_gives(model: Disturbed, slept: Slept) -> None:
    x = torch.randn(4)
    assert torch.equal(model(0, slow_rank=0, noisy_rank=0, noise_s=0.1)(x), x)
