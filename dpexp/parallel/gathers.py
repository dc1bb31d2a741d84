"""FSDP's collectives, timed: the gathering of parameters and the scattering of gradients.

On gloo FSDP stands still for each of them, so the time of the call is what the step waits. On CUDA
they run on streams of their own, where the call's time would say nothing: they are not timed there.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from dpexp.parallel.collectives import CollectiveLog


def time_collectives(units: list[Any], log: CollectiveLog) -> None:
    """Let every sharded unit note its collectives.

    Args:
        units: modules after ``fully_shard``.
    """
    gather, scatter = TimedAllGather(log), TimedReduceScatter(log)
    for unit in units:
        if isinstance(unit, FSDPModule):
            unit.set_custom_all_gather(gather)
            unit.set_custom_reduce_scatter(scatter)


@final
class TimedAllGather(DefaultAllGather):
    """torch's own, between two marks."""

    def __init__(self, log: CollectiveLog) -> None:
        self._log = log

    def __call__(self, output_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        entry = self._log.begin("all_gather", output_tensor.nbytes)
        work = super().__call__(output_tensor, *args, **kwargs)
        self._log.done(entry)
        return work


@final
class TimedReduceScatter(DefaultReduceScatter):
    """torch's own, between two marks."""

    def __init__(self, log: CollectiveLog) -> None:
        self._log = log

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        entry = self._log.begin("reduce_scatter", input_tensor.nbytes)
        work = super().__call__(output_tensor, input_tensor, *args, **kwargs)
        self._log.done(entry)
        return work
