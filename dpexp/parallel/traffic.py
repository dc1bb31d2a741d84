"""What nn.DataParallel copies between its devices: how many bytes, and the reduction's time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dpexp.batches import map_tensors
from dpexp.parallel.collectives import Collective, CollectiveLog


def scattered_bytes(scattered: tuple[Any, Any]) -> int:
    """Of the inputs, what leaves the first device. Of arguments and keywords per replica."""
    inputs, kwargs = scattered
    return _bytes((inputs[1:], kwargs[1:]))


def model_bytes(model: nn.Module) -> tuple[int, int]:
    """Of parameters and buffers, which each further device gets; of the gradients that it sends."""
    whole = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    return whole, sum(p.nbytes for p in model.parameters() if p.requires_grad)


def gathered_bytes(outputs: Sequence[Any]) -> int:
    """Of the outputs, what comes from other devices than the first."""
    return _bytes(list(outputs[1:]))


def time_reduction(copies: Sequence[nn.Module], gradient_bytes: int, log: CollectiveLog) -> None:
    """Note when backward adds up the gradients of the copies.

    All copies come from one node of the autograd graph, whose backward is the reduction: torch's
    ReduceAddCoalesced on CUDA, that of virtual.py on a CPU.
    """
    node = _broadcast_node(copies)
    if node is None or len(copies) < 2:
        return
    begun: list[Collective] = []

    def before(_gradients: Any) -> None:
        begun.append(log.begin("reduce", (len(copies) - 1) * gradient_bytes))

    def after(_inputs: Any, _outputs: Any) -> None:
        log.done(begun.pop())

    node.register_prehook(before)
    node.register_hook(after)


def _broadcast_node(copies: Sequence[nn.Module]) -> Any:
    for module in copies[-1].modules():
        for copied in getattr(module, "_former_parameters", {}).values():
            if copied is not None and copied.grad_fn is not None:
                return copied.grad_fn
    return None


def _bytes(value: Any) -> int:
    total = 0

    def add(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total += tensor.nbytes
        return tensor

    map_tensors(add, value)
    return total
