"""What sizes went into and came out of a model, per replica, without changing the model.

A :class:`ShapeLog` counts distinct (module, replica, input shape, output shape). The model's own
shapes are noted by the strategies around each call, so they cost no hook; submodules get forward
hooks when ``shapes.depth`` asks for them.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dpexp.records import ShapeRecord

# Which replica the current thread works for: set around a replica's forward by the strategies.
current_replica: contextvars.ContextVar[int] = contextvars.ContextVar("replica", default=0)
# One for all logs, so that a log can be copied with the model that it watches.
_COUNTING = threading.Lock()


def shape_of(value: Any) -> Any:
    """The nested shape of tensors in tuples, lists, dicts and dataclasses, hashable.

    A tensor gives its sizes as a tuple of ints; a container gives (marker, entries), many texts
    their number; anything else gives the name of its type.
    """
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return ("{}", tuple((str(key), shape_of(entry)) for key, entry in value.items()))
    if isinstance(value, (tuple, list)):
        entries = tuple(shape_of(entry) for entry in value)
        alike = len(entries) > 3 and isinstance(entries[0], str) and len(set(entries)) == 1
        return ("()", (f"{len(entries)} x {entries[0]}",) if alike else entries)
    if hasattr(value, "__dataclass_fields__"):
        names = value.__dataclass_fields__
        return ("{}", tuple((name, shape_of(getattr(value, name))) for name in names))
    return type(value).__name__


def show(shape: Any) -> str:
    """A shape as text: ``[10, 5]``, ``([10, 5], [10, 3])``, ``{x: [10, 5], n: int}``."""
    if isinstance(shape, str):
        return shape
    if len(shape) == 2 and shape[0] == "{}":
        return "{" + ", ".join(f"{key}: {show(entry)}" for key, entry in shape[1]) + "}"
    if len(shape) == 2 and shape[0] == "()":
        return "(" + ", ".join(show(entry) for entry in shape[1]) + ")"
    return str(list(shape))


def show_size(shape: Any) -> str:
    """A shape as the exercise prints it: ``torch.Size([10, 5])``."""
    text = show(shape)
    return f"torch.Size({text})" if text.startswith("[") else text


def call_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The shape of a call's inputs: that of the only argument, else of all of them."""
    if len(args) == 1 and not kwargs:
        return shape_of(args[0])
    if kwargs and not args:
        return shape_of(kwargs)
    return shape_of((*args, *kwargs.values()))


class ShapeLog:
    """Counts call sites. Safe to use from the threads of several replicas."""

    def __init__(self, first_replica: int = 0) -> None:
        self.step = 0
        # Replica number 0 of this process is device `first_replica` of the whole run.
        self.first_replica = first_replica
        self._seen: dict[tuple[Any, ...], list[int]] = {}
        # Listeners: (step, replica, input shape, output shape) of each call of the model, and
        # (inputs, output, global rows) of each step.
        self.on_call: Callable[[int, int, Any, Any], None] | None = None
        self.on_batch: Callable[[Any, Any, int], None] | None = None
        self.off = False  # extra steps are no part of the run
        self.muted = False  # an idle rank's borrowed rows are nobody's shapes

    def note(self, replica: int, inputs: Any, outputs: Any, module: str = "") -> None:
        """Count one call. `inputs` and `outputs` are shapes from :func:`shape_of`."""
        if self.muted or self.off:
            return
        replica += self.first_replica
        key = (module, replica, inputs, outputs)
        with _COUNTING:
            entry = self._seen.get(key)
            if entry is None:
                self._seen[key] = [1, self.step, self.step]
            else:
                entry[0] += 1
                entry[2] = self.step
        if self.on_call is not None and module == "":
            self.on_call(self.step, replica, inputs, outputs)

    def records(self) -> tuple[ShapeRecord, ...]:
        """All distinct call sites, in the order of module, replica and first step."""
        rows = [
            ShapeRecord(module, replica, show(inputs), show(outputs), *counts)
            for (module, replica, inputs, outputs), counts in self._seen.items()
        ]
        return tuple(sorted(rows, key=lambda row: (row.module, row.replica, row.first_step)))


@contextmanager
def watch_submodules(model: nn.Module, depth: int, log: ShapeLog) -> Iterator[None]:
    """Note the shapes of submodules up to `depth` levels down while inside the block."""
    handles = []
    for name, module in model.named_modules():
        if name and name.count(".") < depth:

            def hook(
                _module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name
            ) -> None:
                log.note(current_replica.get(), call_shape(args, kwargs), shape_of(output), name)

            handles.append(module.register_forward_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
