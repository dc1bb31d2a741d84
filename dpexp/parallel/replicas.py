"""What dp's real and virtual replicas have in common: idle ones, outputs, errors."""

from __future__ import annotations

from typing import Any, final

import torch

from dpexp.batches import leading_sizes
from dpexp.errors import ConfigError
from dpexp.shapes import show


@final
class ReplicaError(RuntimeError):
    """A replica's forward failed. The cause is in ``__cause__``."""

    def __init__(self, replica: int, input_shape: Any, cause: BaseException) -> None:
        self.replica = replica
        text = f"{type(cause).__name__}: {cause}"
        if isinstance(cause, StopIteration):
            text = (
                "StopIteration: parameters() is empty in a replica of nn.DataParallel, so "
                "next(self.parameters()) has nothing to give; take the device from an input"
            )
        super().__init__(f"in replica {replica} with input {show(input_shape)}: {text}")


def drop_idle(inputs: Any, kwargs: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Leave out the calls that got no row, when others did.

    Args:
        inputs: positional arguments per device, as scatter returns them.
        kwargs: keyword arguments per device.
    """
    inputs, kwargs = tuple(inputs), tuple(kwargs)
    tensors = [len(leading_sizes(call)) for call in zip(inputs, kwargs, strict=True)]
    if not tensors or tensors[0] == 0:
        return inputs, kwargs
    active = next((i for i, found in enumerate(tensors) if found < tensors[0]), len(tensors))
    return inputs[:active], kwargs[:active]


def check_gatherable(output: Any, path: str = "output") -> None:
    """Refuse, with its name and type, an output that torch's gather cannot put together.

    torch walks tensors, None, dicts, named tuples, tuples and lists; anything else raises
    "object is not iterable" there.
    """
    if output is None or isinstance(output, torch.Tensor):
        return
    if isinstance(output, dict):
        for key, entry in output.items():
            check_gatherable(entry, f"{path}[{key!r}]")
    elif isinstance(output, (tuple, list)):
        for index, entry in enumerate(output):
            check_gatherable(entry, f"{path}[{index}]")
    else:
        raise ConfigError(
            "parallel",
            "dp",
            f"nn.DataParallel cannot gather {path}, which is of type {type(output).__name__}",
            allowed="tensors and None, in dicts, tuples, named tuples and lists",
            fix="parallel=ddp, or let the model return tensors",
        )
