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
    """Collectives that the rank stands still for: FSDP's on gloo, the steps of nn.DataParallel.

    Args:
        ready, end, last_ready: as of :func:`of_buckets`.
    """
    whole = np.nan_to_num(end - ready)
    waiting = np.clip(np.nan_to_num(last_ready - ready), 0.0, whole)
    exposed = (whole - waiting).sum(axis=1)
    return Exposure(exposed, waiting.sum(axis=1), np.zeros(len(ready)), exposed)


def together(first: Exposure, second: Exposure) -> Exposure:
    """Two kinds of collectives of the same steps."""
    return Exposure(*(one + other for one, other in zip(first, second, strict=True)))


def covered(begin: Floats, end: Floats) -> Floats:
    """Seconds in which at least one of a step's intervals is open.

    Args:
        begin, end: shape [steps, intervals], in the order of their begins; NaN = none.

    Returns:
        Shape [steps].
    """
    total = np.zeros(len(begin))
    reached = np.full(len(begin), -np.inf)
    for column in range(begin.shape[1]):
        there = ~np.isnan(begin[:, column])
        start = np.maximum(begin[:, column], reached)
        total += np.where(there, np.maximum(end[:, column] - start, 0.0), 0.0)
        reached = np.where(there, np.maximum(reached, end[:, column]), reached)
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
