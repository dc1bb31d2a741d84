"""FSDP's collectives, timed: the gathering of parameters and the scattering of gradients.

On a CPU FSDP stands still for each of them, so the time of the call is what the step waits. On CUDA
they run on streams of their own; the marks before and after the call are events there. What a step
waits begins where the stream that computes needs one of them, so that is marked too.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from dpexp.parallel.collectives import Collective, CollectiveLog

# What is used of the inside of torch's FSDPParamGroup.
INSIDE = ("wait_for_unshard", "reshard", "finalize_backward")


def time_collectives(units: list[Any], log: CollectiveLog, *, streams: bool) -> None:
    """Let every sharded unit note its collectives.

    Args:
        units: modules after ``fully_shard``.
        streams: the collectives run on streams of their own, so note too where they are needed.
            Only where :func:`lacking` finds nothing.
    """
    scatter = TimedReduceScatter(log, keep=streams)
    for unit in units:
        if not isinstance(unit, FSDPModule):
            continue
        gather = TimedAllGather(log, keep=streams)
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(scatter)
        if streams:
            for group in _groups(unit) or ():
                _note_needs(group, log, gather.awaited, scatter.awaited)


def lacking(units: list[Any]) -> list[str]:
    """What the installed torch lacks that marking where collectives are needed would use."""
    sharded = [unit for unit in units if isinstance(unit, FSDPModule)]
    if any(_groups(unit) is None for unit in sharded):
        return ["_fsdp_param_groups"]
    groups = [group for unit in sharded for group in _groups(unit) or ()]
    return [name for name in INSIDE if not all(hasattr(group, name) for group in groups)]


def _groups(unit: FSDPModule) -> list[Any] | None:
    """The FSDPParamGroups of a unit; None if this torch keeps them elsewhere."""
    return getattr(unit._get_fsdp_state(), "_fsdp_param_groups", None)


def _note_needs(
    group: Any, log: CollectiveLog, gathered: list[Collective], scattered: list[Collective]
) -> None:
    """Mark the computing stream right before FSDP lets it wait for collectives.

    FSDP tells nobody, so three methods of the group are put behind functions. A mark is left only
    where something has been begun and not waited for.

    Args:
        gathered: this group's gathers that nobody has waited for yet; emptied here.
        scattered: likewise the scatterings of all groups.
    """
    wait_for_unshard, reshard = group.wait_for_unshard, group.reshard
    finalize_backward = group.finalize_backward

    def needed(*open_lists: list[Collective]) -> None:
        log.needed([entry for entries in open_lists for entry in entries])
        for entries in open_lists:
            entries.clear()

    def before_copy_out() -> None:
        needed(gathered)
        wait_for_unshard()

    def before_scattering() -> None:
        # What post_backward does next is to wait for the scatterings of the groups before, whose
        # inputs it frees. Until here it has added up gradients on the computing stream. After
        # forward, and in micro-batches without exchange, no scattering is open.
        needed(scattered)
        reshard()

    def before_last_wait() -> None:
        needed(gathered, scattered)  # a gather is left here only if backward went another way
        finalize_backward()

    group.wait_for_unshard, group.reshard = before_copy_out, before_scattering
    group.finalize_backward = before_last_wait


@final
class TimedAllGather(DefaultAllGather):
    """torch's own, between two marks."""

    def __init__(self, log: CollectiveLog, *, keep: bool) -> None:
        self._log, self._keep = log, keep
        self.awaited: list[Collective] = []  # begun, and not waited for yet; if they are kept

    def __call__(self, output_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        entry = self._log.begin("all_gather", output_tensor.nbytes)
        work = super().__call__(output_tensor, *args, **kwargs)
        self._log.done(entry)
        if self._keep:
            self.awaited.append(entry)
        return work


@final
class TimedReduceScatter(DefaultReduceScatter):
    """torch's own, between two marks."""

    def __init__(self, log: CollectiveLog, *, keep: bool) -> None:
        self._log, self._keep = log, keep
        self.awaited: list[Collective] = []  # begun, and not waited for yet; if they are kept

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        entry = self._log.begin("reduce_scatter", input_tensor.nbytes)
        work = super().__call__(output_tensor, input_tensor, *args, **kwargs)
        self._log.done(entry)
        if self._keep:
            self.awaited.append(entry)
        return work
