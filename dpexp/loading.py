"""Fetching the rows of a map-style dataset: in the rank itself, or by loader processes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any, final

import torch
from torch.utils.data import DataLoader

from dpexp.collate import collate_of
from dpexp.errors import ConfigError
from dpexp.schedule import GlobalBatch, Indices, Schedule
from dpexp.schema_workload import LoaderConfig
from dpexp.timing import now_s

LOOK_S = 1.0  # how often loader processes are looked at while a batch is waited for
DYING_S = 1.5  # how long one may take to end after it has left a batch unreadable
_DONE = object()
Choose = Callable[[Indices], Indices]
Batches = Iterator[tuple[GlobalBatch, Any]]


def fetch_here(dataset: Any, schedule: Schedule, choose: Choose) -> Batches:
    """Every global batch of the schedule with this rank's part of the data, in order.

    Args:
        dataset: map-style. One with ``__getitems__`` gives many rows at once, and one with
            ``collate_fn`` collates by itself (see ``datasets/rows.py``).
        choose: from the rows of a global batch to those that this rank fetches.
    """
    collate = collate_of(dataset)
    many = getattr(dataset, "__getitems__", None)
    pair = getattr(dataset, "pair", None) if takes_arrays(dataset) else None
    if pair is not None:  # rows in memory: for a small batch each call would show in the step
        inputs, targets, wrap = pair[0].index_select, pair[1].index_select, torch.from_numpy
        for batch in schedule:
            where = wrap(choose(batch.indices))
            yield batch, (inputs(0, where), targets(0, where))
        return
    if many is not None and takes_arrays(dataset):  # its rows come as a batch
        for batch in schedule:
            yield batch, many(choose(batch.indices))
        return
    for batch in schedule:
        rows = choose(batch.indices)
        if many is None:
            yield batch, collate([dataset[index] for index in rows.tolist()])
        else:
            items = many(rows.tolist())
            rowwise = isinstance(items, list) or not hasattr(dataset, "collate_fn")
            if rowwise and not (isinstance(items, (list, tuple)) and len(items) == len(rows)):
                raise ConfigError(
                    "dataset",
                    type(dataset).__name__,
                    f"__getitems__ was asked for {len(rows)} rows and gave "
                    f"{len(items) if isinstance(items, (list, tuple)) else type(items).__name__}",
                    fix="return a list of one item per index, or whole batches and a collate_fn",
                )
            yield batch, collate(items)


def fetch_by_workers(
    dataset: Any, schedule: Schedule, choose: Choose, loader: LoaderConfig, seed: int, pin: bool
) -> Batches:
    """The same, by loader processes.

    They are started before the first batch, so before this process has threads that a fork would
    not copy; without `persistent_workers` again in each epoch, as torch does.

    Args:
        seed: of the loader processes' own random numbers.
        pin: into page-locked memory.
    """
    if loader.persistent_workers:
        own = _Chosen(schedule, choose)
        fetched = start_workers(dataset, loader, seed, pin, sampler=own)
        return zip(schedule, map(_opened, fetched), strict=True)
    return _by_epochs(dataset, schedule, choose, loader, seed, pin)


def _by_epochs(
    dataset: Any, schedule: Schedule, choose: Choose, loader: LoaderConfig, seed: int, pin: bool
) -> Batches:
    for epoch, grouped in groupby(schedule, key=lambda batch: batch.epoch):
        batches = list(grouped)
        own = _Chosen(batches, choose)
        fetched = start_workers(dataset, loader, seed + epoch, pin, sampler=own)
        yield from zip(batches, map(_opened, fetched), strict=True)


def start_workers(
    dataset: Any, loader: LoaderConfig, seed: int, pin: bool, sampler: Any = None
) -> Iterator[Any]:
    """Start loader processes and give what they make, in order.

    Args:
        sampler: lists of indices, each a batch; None for an iterable dataset of whole batches.
    """
    collate = _Sealing(collate_of(dataset)) if sampler is not None else _as_it_is
    options: dict[str, Any] = {"batch_sampler": sampler} if sampler else {"batch_size": None}
    started = iter(
        DataLoader(
            dataset,
            **options,
            num_workers=loader.workers,
            collate_fn=collate,
            prefetch_factor=loader.prefetch,
            pin_memory=pin,
            timeout=min(LOOK_S, loader.timeout_s),
            generator=torch.Generator().manual_seed(seed),
            # A rank's own default is the fork server: each rank would start another one, which
            # imports torch again, and whose children nobody ends when the rank is killed.
            multiprocessing_context="fork",
        )
    )
    return _watched(started, loader.timeout_s)


def _watched(started: Any, timeout_s: float) -> Iterator[Any]:
    """The batches of loader processes, as long as all of them live and none takes too long.

    torch looks for dead ones only when its time-out is over, and what a dying one leaves behind can
    come out as an error of a socket; so the wait is cut into short ones, and after any error the
    processes are looked at.

    Raises:
        RuntimeError: in torch's words, "DataLoader worker …" or "DataLoader timed out …".
    """
    began_s = now_s()
    while True:
        try:
            batch = next(started, _DONE)
        except (RuntimeError, OSError, EOFError) as error:
            timed_out = "DataLoader timed out" in str(error)
            if not (timed_out and now_s() - began_s < timeout_s):
                _raise_for_dead(started, error, wait=not timed_out)
                raise
            continue
        if batch is _DONE:
            return
        yield batch
        began_s = now_s()


def _raise_for_dead(started: Any, error: BaseException, *, wait: bool) -> None:
    """Name a loader process that has died, and how. Errors raised in a living one are its own."""
    if "Original Traceback" in str(error):
        return
    for process, wanted in zip(started._workers, started._workers_status, strict=True):
        if not wanted:  # it has come to the end of a stream
            continue
        process.join(DYING_S if wait else 0)
        code = process.exitcode
        if code is not None:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            text = f"DataLoader worker (pid {process.pid}) exited unexpectedly: {how}"
            raise RuntimeError(text) from error


def takes_arrays(dataset: Any) -> bool:
    """Only our own datasets are known to take an array of indices (saves a conversion)."""
    return type(dataset).__module__.startswith("dpexp.")


@final
class _Chosen:
    """A batch sampler: the indices of this rank's rows, batch by batch."""

    def __init__(self, batches: Iterable[GlobalBatch], choose: Choose) -> None:
        self._batches, self._choose = batches, choose

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._batches:
            yield self._choose(batch.indices).tolist()


@final
class _Sealing:
    """Collates, and hands over a refusal as a value: torch would rebuild it as a RuntimeError."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, rows: Any) -> Any:
        try:
            return self._collate(rows)
        except ConfigError as error:
            return error


def _opened(fetched: Any) -> Any:
    if isinstance(fetched, ConfigError):
        try:
            raise fetched
        finally:
            del fetched  # else its traceback would hold this frame, and so the loader processes
    return fetched


def _as_it_is(batch: Any) -> Any:
    return batch
