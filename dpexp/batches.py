"""From a schedule to batches on a device: fetching, splitting into inputs and target, moving."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sized
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from dpexp.errors import ConfigError
from dpexp.schedule import GlobalBatch, Indices, Schedule


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


def rows_in(dataset: Any) -> int:
    """The number of rows.

    Raises:
        ConfigError: the dataset has no length, or no rows.
    """
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        raise ConfigError(
            "dataset",
            type(dataset).__name__,
            "has no length: only map-style datasets "
            "(__len__ and __getitem__) can be cut into a schedule of batches",
            fix="give it __len__, or take another dataset",
        )
    if len(dataset) == 0:
        raise ConfigError(
            "dataset",
            type(dataset).__name__,
            "the dataset is empty: it has 0 rows",
            fix="a dataset with at least one row (dataset.rows=100 for dataset=random)",
        )
    return len(dataset)


def fetch_all(
    dataset: Any, schedule: Schedule, choose: Callable[[Indices], Indices], workers: int, seed: int
) -> Iterator[tuple[GlobalBatch, Any]]:
    """Every global batch of the schedule with this rank's part of the data, in order.

    Args:
        dataset: map-style. One with ``collate_fn`` collates by itself (see ``datasets/rows.py``).
        choose: from the rows of a global batch to those that this rank fetches.
        workers: loader processes; they are started once, before the first batch, so before this
            process has threads that a fork would not copy.
        seed: of the loader processes' own random numbers.
    """
    collate = getattr(dataset, "collate_fn", default_collate)
    own = [choose(batch.indices) for batch in schedule] if workers else []
    if workers:
        loader = DataLoader(
            dataset,
            batch_sampler=_Listed(own),
            num_workers=workers,
            collate_fn=collate,
            generator=torch.Generator().manual_seed(seed),
            # A rank's own default is the fork server: each rank would start another one, which
            # imports torch again, and whose children nobody ends when the rank is killed.
            multiprocessing_context="fork",
        )
        return zip(schedule, loader, strict=True)
    return _fetch_here(dataset, schedule, choose, collate)


def _fetch_here(
    dataset: Any,
    schedule: Schedule,
    choose: Callable[[Indices], Indices],
    collate: Callable[[Any], Any],
) -> Iterator[tuple[GlobalBatch, Any]]:
    many = getattr(dataset, "__getitems__", None)
    arrays = _takes_arrays(dataset)
    for batch in schedule:
        rows = choose(batch.indices)
        if many is None:
            yield batch, collate([dataset[index] for index in rows.tolist()])
        else:
            items = many(rows if arrays else rows.tolist())
            if isinstance(items, list) and len(items) != len(rows):
                raise ConfigError(
                    "dataset",
                    type(dataset).__name__,
                    f"__getitems__ was asked for {len(rows)} rows and gave {len(items)}",
                    fix="return one item per index",
                )
            yield batch, collate(items)


def _takes_arrays(dataset: Any) -> bool:
    """Only our own in-memory rows are known to take an array of indices (saves a conversion)."""
    return type(dataset).__module__ == "dpexp.datasets.rows"


class _Listed:
    """A batch sampler over index lists that are known beforehand."""

    def __init__(self, batches: list[Indices]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        for rows in self._batches:
            yield rows.tolist()

    def __len__(self) -> int:
        return len(self._batches)


def split(batch: Any, constants: dict[str, Any]) -> Inputs:
    """Take inputs and target out of a collated batch.

    A tensor is the only input. A tuple or list of two is (inputs, target), of more (input, …,
    target). A dict goes to the model as keywords. Inputs that are themselves a tuple, list or
    dict are spread over the model's arguments.

    Args:
        constants: keyword arguments of every call (``forward_kwargs``).
    """
    if isinstance(batch, torch.Tensor):
        return Inputs((batch,), constants, None)
    if isinstance(batch, dict):
        return Inputs((), {**batch, **constants}, None)
    if isinstance(batch, (tuple, list)):
        if len(batch) == 1:
            return Inputs((batch[0],), constants, None)
        *inputs, target = batch
        if len(inputs) == 1 and isinstance(inputs[0], dict):
            return Inputs((), {**inputs[0], **constants}, target)
        if len(inputs) == 1 and isinstance(inputs[0], (tuple, list)):
            return Inputs(tuple(inputs[0]), constants, target)
        return Inputs(tuple(inputs), constants, target)
    raise ConfigError(
        "dataset",
        type(batch).__name__,
        "a batch must be a tensor, a tuple, a list or a dict of tensors",
        fix="give the dataset a collate_fn that returns one of them",
    )


def move(value: Any, device: torch.device) -> Any:
    """`value` with every tensor in it on `device`; containers keep their type."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        moved = copy.copy(value)  # of the same type, whatever its constructor takes
        moved.update((key, move(entry, device)) for key, entry in value.items())
        return moved
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(move(entry, device) for entry in value))
    if isinstance(value, (tuple, list)):
        return cast(Any, type(value))(move(entry, device) for entry in value)
    return value


def leading_sizes(value: Any) -> list[torch.Size]:
    """The shapes of all tensors in a nested value."""
    if isinstance(value, torch.Tensor):
        return [value.shape]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [shape for entry in value for shape in leading_sizes(entry)]
    return []
