"""Iterable datasets: one stream of rows, cut into the same global batches on every rank.

Every rank, and every loader process of it, reads the whole stream and keeps its own rows. So each
row is used once whatever the number of ranks and processes, and a batch has the same rows under
every strategy. The price is that rows are made several times; a dataset with a length is cheaper.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from dpexp.batches import seed_all
from dpexp.collate import collate_of
from dpexp.comm import Comm
from dpexp.errors import ConfigError
from dpexp.loading import Batches, Choose, start_workers
from dpexp.schedule import GlobalBatch
from dpexp.schema_workload import LoaderConfig

KEPT = 4096  # steps whose fingerprints are remembered; loader processes are never so far apart


@dataclass(frozen=True)
class StreamPlan:
    """How a stream is cut; as in :class:`dpexp.schedule.Schedule`."""

    batch_rows: int
    epochs: int | None
    steps: int | None
    drop_last: bool
    seed: int
    first: int = 0  # the batches before are read, and left out


def fetch_stream(
    dataset: Any, plan: StreamPlan, choose: Choose, comm: Comm, loader: LoaderConfig, pin: bool
) -> Batches:
    """Every global batch of the stream with this rank's part of the data, in order.

    A synchronisation point of the ranks at each batch: they make sure that they all read the same
    stream, since else they would wait for each other for ever.

    Raises:
        ConfigError: the stream is empty, or the ranks do not read the same rows.
    """
    whole = _Stream(dataset, plan, choose)
    made = start_workers(whole, loader, plan.seed, pin) if loader.workers else iter(whole)
    seen: dict[int, int] = {}
    for step in count(plan.first):
        item = next(made, None)
        if isinstance(item, ConfigError):
            try:
                raise item
            finally:
                del item, made  # else the error's traceback would hold the loader processes
        _compare_processes(seen, item, dataset)
        _compare(comm, step, item, dataset)
        if item is None:
            if step == 0:
                raise _empty(dataset, plan)
            return
        batch, fetched = item.batch, item.fetched
        yield batch, fetched


class _Made(NamedTuple):
    """What a loader process hands over."""

    batch: GlobalBatch
    marks: dict[int, int]  # fingerprints by step, of this batch and of those of other processes
    fetched: Any


@final
class _Stream(IterableDataset[Any]):
    """Gives a :class:`_Made` for each global batch that is this process's turn."""

    def __init__(self, dataset: Any, plan: StreamPlan, choose: Choose) -> None:
        self._dataset, self._plan, self._choose = dataset, plan, choose
        self._collate = collate_of(dataset)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        # Some datasets split themselves over loader processes. Then rows would go missing here,
        # where every process has to see them all.
        torch_worker._worker_info = None
        state = _OwnRandom(self._plan.seed)
        marks: dict[int, int] = {}
        for batch, rows in self._global_batches(state):
            if batch.step < self._plan.first:
                continue
            marks[batch.step] = _fingerprint([rows[i] for i in _some(len(rows))])
            # torch takes the batches of the processes in turn, the first process's first.
            if (batch.step - self._plan.first) % workers == worker:
                own = self._choose(np.arange(len(rows)))
                try:
                    collated = self._collate([rows[index] for index in own.tolist()])
                except ConfigError as error:  # torch would rebuild it as a RuntimeError
                    yield error
                    return
                yield _Made(batch, marks, collated)
                marks = {}

    def _global_batches(self, state: _OwnRandom) -> Iterator[tuple[GlobalBatch, list[Any]]]:
        plan, step = self._plan, 0
        for epoch in count() if plan.epochs is None else range(plan.epochs):
            begin = step
            with state.used():
                if hasattr(self._dataset, "set_epoch"):
                    self._dataset.set_epoch(epoch)
                stream = iter(self._dataset)
            for start in count(0, plan.batch_rows):
                if step == plan.steps:
                    return
                with state.used():
                    rows = list(islice(stream, plan.batch_rows))
                if not rows or (plan.drop_last and len(rows) < plan.batch_rows):
                    break
                yield GlobalBatch(step, epoch, np.arange(start, start + len(rows))), rows
                step += 1
                if len(rows) < plan.batch_rows:
                    break
            if step == begin:
                return  # an empty epoch: the next ones would be as empty


@final
class _OwnRandom:
    """Random numbers of the stream: the same on every rank, whatever a rank draws besides."""

    def __init__(self, seed: int) -> None:
        with _kept():
            seed_all(seed)
            self._state = _random_state()

    @contextmanager
    def used(self) -> Iterator[None]:
        with _kept():
            _set_random_state(self._state)
            yield
            self._state = _random_state()


def _random_state() -> tuple[Any, ...]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _set_random_state(state: tuple[Any, ...]) -> None:
    torch.set_rng_state(state[0])
    np.random.set_state(state[1])
    random.setstate(state[2])


@contextmanager
def _kept() -> Iterator[None]:
    state = _random_state()
    try:
        yield
    finally:
        _set_random_state(state)


def _fingerprint(row: Any) -> int:
    """A checksum of the numbers and texts in a row."""
    if isinstance(row, torch.Tensor):
        return zlib.crc32(
            row.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        )
    if isinstance(row, np.ndarray):
        return zlib.crc32(np.ascontiguousarray(row).tobytes())
    if isinstance(row, dict):
        return _fingerprint([*row.keys(), *row.values()])
    if isinstance(row, (tuple, list)):
        return zlib.crc32(b"".join(_fingerprint(entry).to_bytes(4, "big") for entry in row))
    if isinstance(row, (str, bytes, int, float)) or row is None:
        return zlib.crc32(repr(row).encode())
    return 0  # an object of the user's, whose text may hold its address


def _some(rows: int) -> list[int]:
    """The rows whose numbers are compared: all of them would cost as much as reading them."""
    return sorted({0, rows // 3, 2 * rows // 3, rows - 1})


def _compare_processes(seen: dict[int, int], item: _Made | None, dataset: Any) -> None:
    """Refuse a dataset of which the loader processes of this rank read different rows.

    Args:
        seen: fingerprints that other processes have handed over, by step; is added to.
    """
    for step, mark in item.marks.items() if item is not None else ():
        if seen.setdefault(step, mark) != mark:
            raise ConfigError(
                "dataset",
                type(dataset).__name__,
                f"gives the loader processes different rows at step {step}; dpexp splits an "
                "iterable dataset over them itself",
                fix="draw from a generator with a fixed seed, or loader.workers=0",
            )
    while len(seen) > KEPT:
        del seen[next(iter(seen))]


def _compare(comm: Comm, step: int, item: Any, dataset: Any) -> None:
    rows = 0.0 if item is None else float(len(item.batch.indices))
    mark = 0.0 if item is None else float(item.marks[item.batch.step])
    low, high = comm.extent([rows, mark])
    if low[0] != high[0]:
        problem = (
            f"gives the ranks different numbers of rows: at step {step} one has "
            f"{low[0]:.0f} and another {high[0]:.0f} of the global batch"
            + (f", so {step} and more than {step} batches" if low[0] == 0 else "")
        )
    elif low[1] != high[1]:
        problem = f"gives the ranks different rows at step {step}"
    else:
        return
    raise ConfigError(
        "dataset",
        type(dataset).__name__,
        f"{problem}; dpexp splits an iterable dataset over the ranks itself",
        fix="let it give every process the same rows, without looking at the rank",
    )


def _empty(dataset: Any, plan: StreamPlan) -> ConfigError:
    short = f", or fewer than a whole batch of {plan.batch_rows}" if plan.drop_last else ""
    return ConfigError(
        "dataset",
        type(dataset).__name__,
        f"the dataset is empty: its iterator gave no row{short}",
        fix="a dataset with at least one row" + (", or drop_last=false" if short else ""),
    )
