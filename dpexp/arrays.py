"""Tensors of any kind as plain numbers on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dpexp.tolerance import SINGLE


def array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A tensor's numbers in a format that numpy has; complex ones as pairs, sparse ones filled."""
    plain = _dense(tensor.detach()).to("cpu")
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    if plain.dtype in (torch.bfloat16, torch.float16):
        plain = plain.float()
    return np.asarray(plain.numpy())


def largest_in(tensor: torch.Tensor) -> float:
    """The largest absolute value; 0 of an empty tensor, NaN where there is one."""
    whole = _dense(tensor.detach())
    return float(whole.abs().max()) if whole.numel() else 0.0


def roundoff(tensor: torch.Tensor) -> float:
    """The unit roundoff of the tensor's format, or of single precision where that is coarser."""
    kind = tensor.dtype
    known = kind.is_floating_point or kind.is_complex
    return max(SINGLE, torch.finfo(kind).eps / 2) if known else SINGLE


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """A sparse tensor (the gradient of nn.Embedding(sparse=True)) with its zeros."""
    return tensor if tensor.layout is torch.strided else tensor.to_dense()
