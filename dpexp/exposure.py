"""What of a step's communication it waited for, and what it hid. Pure numpy.

A collective begins when the last rank has reached it. Until then a rank that came earlier waits for
another rank, not for the network; so both are told apart.

All times are seconds of one clock. Arrays have a row per step and a column per collective; a step
with fewer collectives has NaN in the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Exposure(NamedTuple):
    """Of one rank. Each of shape [steps]."""

    exposed_s: Floats  # waited for the transport itself
    waiting_s: Floats  # waited for a rank that had not come yet
    overlapped_s: Floats  # under way, with all ranks there, while this rank computed
    bus_s: Floats  # under way with all ranks there: what a bandwidth is to be divided by


def of_buckets(ready: Floats, end: Floats, last_ready: Floats) -> Exposure:
    """Collectives that run while the rank goes on computing: DDP's buckets.

    The rank computes until its last bucket is ready; then it waits until all are done. Of that it
    waited for other ranks until the last of them had its last bucket ready.

    Args:
        ready: shape [steps, collectives]; when this rank had each ready.
        end: the same shape; when each was done on this rank.
        last_ready: the same shape; when the last of all ranks had each ready.
    """
    computed = _last(ready)
    total = np.maximum(np.nan_to_num(_last(end) - computed), 0.0)
    waiting = np.clip(np.nan_to_num(_last(last_ready) - computed), 0.0, total)
    exposed, under_way = total - waiting, covered(last_ready, end)
    return Exposure(exposed, waiting, np.maximum(under_way - exposed, 0.0), under_way)


def of_blocking(ready: Floats, end: Floats, last_ready: Floats) -> Exposure:
    """Collectives that the rank stands still for: FSDP's on a CPU, the steps of nn.DataParallel.

    Args:
        ready, end, last_ready: as of :func:`of_buckets`.
    """
    whole = np.nan_to_num(end - ready)
    waiting = np.clip(np.nan_to_num(last_ready - ready), 0.0, whole)
    exposed = (whole - waiting).sum(axis=1)
    return Exposure(exposed, waiting.sum(axis=1), np.zeros(len(ready)), exposed)


def of_awaited(ready: Floats, end: Floats, last_ready: Floats, needed: Floats) -> Exposure:
    """Collectives that run beside the computation until it needs them: FSDP's on streams.

    Args:
        ready, end, last_ready: as of :func:`of_buckets`, but in any order.
        needed: the same shape; where the rank's computation waits for each.
    """
    begin, stood = stalls(ready, end, needed)
    waiting = np.clip(np.nan_to_num(last_ready - begin), 0.0, stood)
    exposed, under_way = (stood - waiting).sum(axis=1), covered(last_ready, end)
    overlapped = np.maximum(under_way - exposed, 0.0)
    return Exposure(exposed, waiting.sum(axis=1), overlapped, under_way)


def stalls(ready: Floats, end: Floats, needed: Floats) -> tuple[Floats, Floats]:
    """How long the rank's computation stands still for each collective, each second once.

    It stands from where it needs a collective until that is done. What lies before the collective
    was ready is the rank's own doing; and of two that it waits for at once the second one costs
    only what comes after the first.

    Args:
        ready, end, needed: shape [steps, collectives]; NaN = none.

    Returns:
        When each stall begins, and its seconds; the same shape. Without a stall the seconds are 0.
    """
    begin = np.maximum(ready, needed)
    order = np.lexsort((end, needed), axis=1)  # NaN last
    done = np.fmax.accumulate(np.take_along_axis(end, order, axis=1), axis=1)
    before = np.column_stack([np.full(len(done), -np.inf), done[:, :-1]])
    in_order = np.take_along_axis(begin, order, axis=1)
    in_order = np.where(np.isnan(in_order), np.nan, np.fmax(in_order, before))
    np.put_along_axis(begin, order, in_order, axis=1)
    return begin, np.maximum(np.nan_to_num(end - begin), 0.0)


def nothing(steps: int) -> Exposure:
    """Of steps without a collective."""
    return Exposure(*(np.zeros(steps) for _ in Exposure._fields))


def together(*kinds: Exposure) -> Exposure:
    """Several kinds of collectives of the same steps."""
    return Exposure(*(sum(parts) for parts in zip(*kinds, strict=True)))


def covered(begin: Floats, end: Floats) -> Floats:
    """Seconds in which at least one of a step's intervals is open.

    Args:
        begin, end: shape [steps, intervals], in any order; NaN = none.

    Returns:
        Shape [steps].
    """
    _, seconds = stalls(begin, end, begin)
    total: Floats = seconds.sum(axis=1)
    return total


def bus_share(kind: str, world_size: int) -> float:
    """How many times its bytes a collective moves over each rank's link on a ring.

    Bytes are those of the whole buffer: what is reduced, or what is there after a gather. Source:
    the README of NCCL's tests on performance; Patarasuk and Yuan, "Bandwidth optimal all-reduce
    algorithms for clusters of workstations", 2009.
    """
    share = (world_size - 1) / world_size
    return 2 * share if kind == "all_reduce" else share


def _last(times: Floats) -> Floats:
    """The latest of each row; NaN where there is none."""
    latest: Floats = np.fmax.reduce(times, axis=1)
    return latest
