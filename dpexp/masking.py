"""Targets that a cross-entropy leaves out of its mean.

torch's cross-entropy is the mean over the targets that are not IGNORED. Where ranks or
micro-batches leave out different numbers of them, weighting their means by rows would not give the
mean of the whole batch; the numbers have to be known.
"""

from __future__ import annotations

import math
from typing import Any, final

import torch

from dpexp.comm import Comm
from dpexp.losses import IGNORED, is_classes


@final
class MaskedTargets:
    """Counts the targets of each step that are not left out.

    Whether any are is decided at the first step, by all ranks together; only then do the ranks
    exchange a number in each step.

    Args:
        applies: the loss is a cross-entropy that dpexp computes, over parts of a batch.
    """

    def __init__(self, comm: Comm, *, applies: bool) -> None:
        self._comm = comm
        self.applies = applies
        self._decided = False
        self._masked = False
        self._late: torch.Tensor | None = None

    def counted(self, target: Any, rows: int) -> float | None:
        """How many targets of this step count, over all ranks; None: weigh by rows.

        A synchronisation point of the ranks at the first step, and at each one where targets are
        masked. NaN when none counts, as torch's mean is.
        """
        if not self.applies:
            return None
        left_out = target == IGNORED if is_classes(target) and rows else None
        if not self._decided:
            found = left_out is not None and bool(left_out.any())
            self._masked = self._comm.max(float(found)) > 0
            self._decided = True
        if not self._masked:
            if left_out is not None:
                late = left_out.any()
                self._late = late if self._late is None else self._late | late
            return None
        own = 0 if left_out is None else left_out.numel() - int(left_out.sum())
        total = self._comm.sum(torch.tensor([float(own)], dtype=torch.float64)).item()
        return total or math.nan

    def state(self) -> dict[str, bool]:
        """What was found in the steps so far. Waits for the device."""
        late = self._late is not None and bool(self._late)
        return {"decided": self._decided, "masked": self._masked, "late": late}

    def load(self, state: dict[str, bool]) -> None:
        """Go on from what :meth:`state` gave."""
        # Of ranks or micro-batches that were one before nothing is known yet.
        self._decided = state["decided"]
        self._masked = state["masked"]
        self._late = torch.tensor(True) if state["late"] else None

    def notes(self) -> tuple[str, ...]:
        """What a reader of the result may not expect."""
        if self._late is None or not bool(self._late):
            return ()
        return (
            f"some targets are {IGNORED} and left out of the loss, but none was in the first step: "
            "ranks and micro-batches were weighted by rows, which differs from a single device",
        )
