"""Disturbances on purpose (``inject``): so that one can see what is said of them."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from dpexp.loading import Batches
from dpexp.schema_measuring import InjectConfig
from dpexp.shapes import current_replica
from dpexp.timing import now_s

# A backward pass takes about twice as long as its forward pass.
STEP_OF_FORWARDS = 3.0
FOREVER_S = 7 * 24 * 3600.0


def collective_pause(inject: InjectConfig) -> Callable[[], None] | None:
    """What each collective has to wait for in addition; None = nothing."""
    delay_s = inject.collective_delay_s
    return partial(time.sleep, delay_s) if delay_s else None


def disturbed(batches: Batches, inject: InjectConfig, rank: int) -> Batches:
    """The same batches, later; at ``inject.at_step`` the rank may die or hang instead."""
    slow = inject.data_delay_s > 0 and inject.data_rank in (None, rank)
    if not slow and rank not in (inject.die_rank, inject.hang_rank):
        return batches
    return _disturbed(batches, inject, rank, inject.data_delay_s if slow else 0.0)


def _disturbed(batches: Batches, inject: InjectConfig, rank: int, delay_s: float) -> Batches:
    for batch, fetched in batches:
        if batch.step == inject.at_step and rank == inject.die_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        if batch.step == inject.at_step and rank == inject.hang_rank:
            time.sleep(FOREVER_S)
        if delay_s:
            time.sleep(delay_s)
        yield batch, fetched


def disturb_forward(
    model: nn.Module, inject: InjectConfig, rank: int, seed: int, *, training: bool
) -> None:
    """Let the model's forward take longer on one rank, or on one replica of dp.

    ``inject.slow_rank`` sleeps after its forward for (slow_factor - 1) times what forward took,
    and when training three times that, since a backward pass takes about twice as long as its
    forward pass: so the whole step's computation takes slow_factor times as long.
    """
    draws = random.Random(seed)
    begun = threading.local()  # replicas of dp call forward in threads
    passes = STEP_OF_FORWARDS if training else 1.0

    def here(wanted: int | None) -> bool:
        return wanted is not None and wanted == rank + current_replica.get()

    def before(_module: nn.Module, _args: Any) -> None:
        begun.at_s = now_s()

    def after(_module: nn.Module, _args: Any, _output: Any) -> None:
        if here(inject.slow_rank):
            time.sleep((inject.slow_factor - 1) * passes * (now_s() - begun.at_s))
        if here(inject.noisy_rank):
            time.sleep(draws.expovariate(1 / inject.noise_s))

    if inject.slow_rank is not None or inject.noisy_rank is not None:
        hide: Any = torch.compiler.disable  # a compiled model calls them as they are
        model.register_forward_pre_hook(hide(before))
        model.register_forward_hook(hide(after))
