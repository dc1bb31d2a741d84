"""The number format of a step's arithmetic. Parameters and gradients stay 32-bit floats."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dpexp.schema import Precision

_DTYPES = {Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}


def set_float32(precision: Precision, device: torch.device) -> None:
    """Allow or forbid TensorFloat-32 in this process.

    fp32 forbids it for convolutions too, where torch allows it by default.
    """
    if device.type == "cuda":
        allowed = precision is Precision.tf32
        torch.set_float32_matmul_precision("high" if allowed else "highest")
        torch.backends.cudnn.allow_tf32 = allowed


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """The context of forward and loss; it can be entered again and again."""
    dtype = _DTYPES.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def make_scaler(precision: Precision, device: torch.device) -> torch.amp.GradScaler | None:
    """For fp16, whose small gradients would become 0: the scaler of the loss.

    Source: Micikevicius et al., "Mixed Precision Training", 2018, section 3.2.
    """
    return torch.amp.GradScaler(device.type) if precision is Precision.fp16 else None
