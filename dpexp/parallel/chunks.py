"""What the strategies with one process per device have in common: whose rows are whose."""

from __future__ import annotations

import torch

from dpexp.comm import Comm
from dpexp.schedule import Indices, chunk_of


def own_or_borrowed(rows: Indices, comm: Comm) -> Indices:
    """Of a global batch, the rows of this rank's chunk; those of chunk 0 where it is empty.

    A rank without rows still has to take part in the collectives of a step. The rows of chunk 0
    are sure to fit the model; what is computed on them weighs 0.
    """
    own = chunk_of(rows, comm.rank, comm.world_size)
    return own if len(own) else chunk_of(rows, 0, comm.world_size)


def weighted(loss: torch.Tensor, rows: int, global_rows: int, divisor: float) -> torch.Tensor:
    """A mean loss over own rows, made so that the ranks' gradients make up the global batch's.

    The single device's gradient is the sum of the ranks' mean gradients weighted by rows / global
    rows.

    Args:
        divisor: what the sum of the ranks' gradients is divided by: the world size under FSDP, and
            under DDP unless a hook of ours adds them up.
    """
    weight = rows * divisor / global_rows
    return loss if weight == 1.0 else loss * weight
