"""Batches as values: what of them the model gets, moving them, cutting them, their sizes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from dpexp.errors import ConfigError
from dpexp.schema_workload import BatchConfig


class Inputs(NamedTuple):
    """What a forward call gets, and what the loss compares with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any


def seed_all(seed: int) -> None:
    """Seed torch, numpy's legacy generator and random alike."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def seed_of_rank(seed: int, rank: int) -> int:
    """A seed for what a rank draws on its own (dropout, augmentation), unlike other ranks'."""
    return int(np.random.SeedSequence([seed, rank]).generate_state(1, np.uint64)[0] >> 1)


Split = Callable[[Any], Inputs]


def make_split(entries: BatchConfig, constants: dict[str, Any]) -> Split:
    """How inputs and target are taken out of a collated batch.

    With `inputs` and `target` on auto: a tensor is the only input. A tuple or list of two is
    (inputs, target), of more (input, …, target). A dict goes to the model as keywords, and there
    is no target. Inputs that are themselves a tuple, list or dict are spread over the model's
    arguments.

    Args:
        entries: ``batch`` of the config. An index or key names an entry of the batch; a key with
            dots goes down into nested ones (``image.pixels``).
        constants: keyword arguments of every call (``forward_kwargs``).

    Returns:
        A function of a batch. It raises ConfigError where the batch has no such entry.
    """
    inputs, target = entries.inputs, entries.target
    if inputs == "auto" and target == "auto":
        return lambda batch: _conventional(batch, constants)

    def chosen(batch: Any) -> Inputs:
        wanted, remaining = None, batch
        if target == "auto":
            wanted = _conventional(batch, {}).target
        elif target not in (None, "none"):
            wanted = _entry(batch, "batch.target", target)
            if inputs == "auto":
                remaining = _without(batch, target)
        if inputs != "auto":
            return _named(batch, inputs, constants)._replace(target=wanted)
        if target in (None, "none") and isinstance(remaining, (tuple, list)):
            return Inputs(tuple(remaining), constants, None)
        return _spread(remaining, constants)._replace(target=wanted)

    return chosen


def _conventional(batch: Any, constants: dict[str, Any]) -> Inputs:
    if isinstance(batch, torch.Tensor):
        return Inputs((batch,), constants, None)
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        *inputs, target = batch
        return _spread(inputs, constants)._replace(target=target)
    return _spread(batch, constants)


def _spread(value: Any, constants: dict[str, Any]) -> Inputs:
    """All of `value` as inputs: dicts as keywords, tuples and lists as positions."""
    if isinstance(value, (tuple, list)):
        if len(value) == 1 and isinstance(value[0], (dict, tuple, list)):
            return _spread(value[0], constants)
        return Inputs(tuple(value), constants, None)
    if isinstance(value, dict):
        return Inputs((), {**value, **constants}, None)
    if isinstance(value, torch.Tensor):
        return Inputs((value,), constants, None)
    raise ConfigError(
        "dataset",
        type(value).__name__,
        "a batch must be a tensor, a tuple, a list or a dict of tensors",
        fix="give the dataset a collate_fn that returns one of them",
    )


def _named(batch: Any, names: Any, constants: dict[str, Any]) -> Inputs:
    if isinstance(names, dict):
        keywords = {str(k): _entry(batch, "batch.inputs", name) for k, name in names.items()}
        return Inputs((), {**keywords, **constants}, None)
    if isinstance(names, list):
        return Inputs(tuple(_entry(batch, "batch.inputs", n) for n in names), constants, None)
    entry = _entry(batch, "batch.inputs", names)
    spread = isinstance(entry, (dict, tuple, list))
    return _spread(entry, constants) if spread else Inputs((entry,), constants, None)


def _entry(batch: Any, key: str, name: int | str) -> Any:
    """The entry of a batch that an index, a key or a path of them names."""
    if isinstance(batch, dict) and name in batch:
        return batch[name]
    value = batch
    for part in str(name).split("."):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, (tuple, list)) and _is_index(part, len(value)):
            value = value[int(part)]
        elif part in getattr(value, "_fields", ()):  # of a named tuple
            value = getattr(value, part)
        else:
            raise ConfigError(
                key,
                name,
                f"the dataset's batch has no such entry: it is {_describe(batch)}",
                fix=f"{key}=auto, or one of the entries",
            )
    return value


def _is_index(text: str, length: int) -> bool:
    return text.lstrip("-").isdigit() and -length <= int(text) < length


def _without(batch: Any, name: int | str) -> Any:
    """The batch without a top-level entry; one that lies deeper stays where it is."""
    if isinstance(batch, dict):
        return {key: value for key, value in batch.items() if key != name}
    if name in getattr(batch, "_fields", ()):
        name = batch._fields.index(name)
    if isinstance(batch, (tuple, list)) and _is_index(str(name), len(batch)):
        left = int(name) % len(batch)
        return tuple(value for index, value in enumerate(batch) if index != left)
    return batch


def _describe(batch: Any) -> str:
    if isinstance(batch, dict):
        return f"a dict with {', '.join(map(str, batch))}"
    if isinstance(batch, (tuple, list)):
        return f"a {type(batch).__name__} of {len(batch)} entries"
    return f"a {type(batch).__name__}"


def move(value: Any, device: torch.device) -> Any:
    """`value` with every tensor in it on `device`; containers keep their type."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), value)


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with every tensor in it changed; containers keep their type."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return like_dict(value, {k: map_tensors(change, v) for k, v in value.items()})
    if isinstance(value, (tuple, list)):
        return like(value, [map_tensors(change, entry) for entry in value])
    return value


def like(example: Any, entries: Sequence[Any]) -> Any:
    """`entries` in a container of the example's type: tuple, named tuple or list."""
    kind = cast(Any, type(example))
    return kind(*entries) if hasattr(example, "_fields") else kind(entries)


def like_dict(example: dict[Any, Any], entries: dict[Any, Any]) -> dict[Any, Any]:
    """`entries` in a dict of the example's type, whatever its constructor takes."""
    if type(example) is dict:
        return entries
    changed = copy.copy(example)
    for key, entry in entries.items():  # one by one: some libraries' dicts have no update()
        changed[key] = entry
    return changed


def cut(
    inputs: Inputs,
    rows: int,
    sizes: Sequence[int],
    longest: int = 0,
    constants: Container[str] = (),
) -> list[Inputs]:
    """Cut a batch of `rows` rows into micro-batches along the first dimension.

    Args:
        inputs: tensors, and lists of as many entries as rows (texts), are cut; all else is
            repeated.
        sizes: rows of each micro-batch. One of size 0 gets the first ones: what it computes
            weighs nothing, but every rank has to take part in every micro-batch.
        longest: how many rows a micro-batch of size 0 gets, if there are as many.
        constants: names of keywords that are no part of the batch.
    """
    pieces, start = [], 0
    for size in sizes:
        begin, end = (start, start + size) if size else (0, min(longest, rows))
        part = partial(_slice, rows=rows, begin=begin, end=end)
        keywords = {k: v if k in constants else part(v) for k, v in inputs.kwargs.items()}
        pieces.append(Inputs(tuple(map(part, inputs.args)), keywords, part(inputs.target)))
        start += size
    return pieces


def _slice(value: Any, rows: int, begin: int, end: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[begin:end] if value.dim() and len(value) == rows else value
    if isinstance(value, dict):
        return like_dict(value, {k: _slice(v, rows, begin, end) for k, v in value.items()})
    if isinstance(value, (tuple, list)):
        if holds_rows(value, rows):
            return value[begin:end]
        return like(value, [_slice(entry, rows, begin, end) for entry in value])
    return value


def holds_rows(entries: Sequence[Any], rows: int) -> bool:
    """Whether a list or tuple holds one entry per row, such as texts or images of many sizes.

    A pair of whole columns in a batch of two rows has two entries as well: there each tensor of a
    list, and one at least of a tuple (outputs with a scalar loss), has a row per row.
    """
    if len(entries) != rows or hasattr(entries, "_fields") or not entries:
        return False
    shapes = leading_sizes(entries)
    if not shapes:
        return not any(isinstance(entry, (dict, tuple, list)) for entry in entries)
    columns = [bool(shape) and shape[0] == rows for shape in shapes]
    return not (all(columns) if isinstance(entries, list) else any(columns))


def leading_sizes(value: Any) -> list[torch.Size]:
    """The shapes of all tensors in a nested value."""
    if isinstance(value, torch.Tensor):
        return [value.shape]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [shape for entry in value for shape in leading_sizes(entry)]
    return []
