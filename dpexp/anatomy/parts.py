"""The first and the last global batch, as each device gets them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast, final

from dpexp.batches import Inputs, Split, cut, make_split
from dpexp.collate import collate_of
from dpexp.comm import LocalComm
from dpexp.errors import ConfigError
from dpexp.feed import is_stream, make_schedule, rows_in
from dpexp.loading import fetch_here
from dpexp.parallel.dp import refuse_uncuttable
from dpexp.plan import RunPlan
from dpexp.schedule import (
    ENDLESS,
    EpochOrders,
    GlobalBatch,
    Indices,
    Schedule,
    chunk_of,
    chunk_sizes,
)
from dpexp.streams import StreamPlan, fetch_stream


@dataclass(frozen=True)
class Cut:
    """One global batch.

    Args:
        parts: inputs and target of each device with rows, in the order of the devices.
        whole: the batch that the only process holds; None where each device has a process.
    """

    step: int
    rows: int
    sizes: tuple[int, ...]  # rows of each device, idle ones included
    parts: tuple[Inputs, ...]
    whole: Inputs | None


@dataclass(frozen=True)
class Ends:
    """The two ends of the schedule; without length and last batch for a stream."""

    dataset_rows: int | None
    steps: int | None
    first: Cut
    last: Cut | None


def read_ends(dataset: Any, plan: RunPlan) -> Ends:
    """Fetch the rows of the first and the last batch and cut them as the run would.

    Raises:
        ConfigError: as in a run, and where a row cannot be read.
    """
    try:
        if is_stream(dataset):
            return Ends(None, None, _first_of_stream(dataset, plan), None)
        schedule = make_schedule(plan, rows_in(dataset))
        fetch = partial(_fetch, dataset, plan)
        first = fetch(batch_at(schedule, 0))
        if len(schedule) == ENDLESS:
            return Ends(len(dataset), None, first, None)
        return Ends(
            len(dataset), len(schedule), first, fetch(batch_at(schedule, len(schedule) - 1))
        )
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            "dataset",
            plan.config.dataset["_target_"],
            f"its rows cannot be read: {type(error).__name__}: {error}",
            fix="rows that can be fetched one by one",
        ) from error


def batch_at(schedule: Schedule, step: int) -> GlobalBatch:
    """The global batch of one step, without going through those before it."""
    epoch, place = divmod(step, schedule.batches_per_epoch())
    order = EpochOrders(schedule.num_rows, schedule.seed, schedule.shuffle).of(epoch)
    start = place * schedule.batch_rows
    return GlobalBatch(step, epoch, order[start : start + schedule.batch_rows])


def micro_sizes(rows: int, plan: RunPlan) -> tuple[int, ...]:
    """Rows of a process's micro-batches in a step of `rows` global rows, without empty ones."""
    most = chunk_sizes(rows, plan.num_processes)[0]
    return tuple(size for size in chunk_sizes(most, plan.config.accumulate) if size)


def micro_batch(batch: Cut, plan: RunPlan) -> Inputs:
    """The first micro-batch of device 0."""
    sizes = micro_sizes(batch.rows, plan)
    if batch.whole is None:
        return cut(batch.parts[0], batch.sizes[0], sizes)[0]
    own = cut(batch.whole, batch.rows, sizes)[0]
    return _over_devices(own, sizes[0], plan.num_devices)[0]


def _fetch(dataset: Any, plan: RunPlan, batch: GlobalBatch) -> Cut:
    split = make_split(plan.config.batch, plan.config.forward_kwargs)
    rows, devices = len(batch.indices), plan.num_devices
    if plan.num_processes == 1:
        return _of_one_process(
            split(_read(dataset, batch, lambda own: own)), batch.step, rows, plan
        )
    own = (
        _read(dataset, batch, partial(_chunk, device=device, devices=devices))
        for device, size in enumerate(chunk_sizes(rows, devices))
        if size
    )
    return Cut(batch.step, rows, chunk_sizes(rows, devices), tuple(map(split, own)), None)


def _of_one_process(whole: Inputs, step: int, rows: int, plan: RunPlan) -> Cut:
    parts = _over_devices(whole, rows, plan.num_devices)
    return Cut(step, rows, chunk_sizes(rows, plan.num_devices), tuple(parts), whole)


def _over_devices(inputs: Inputs, rows: int, devices: int) -> list[Inputs]:
    if devices == 1:
        return [inputs]  # as it is, whatever its first dimensions are
    refuse_uncuttable(inputs, rows)
    return cut(inputs, rows, [size for size in chunk_sizes(rows, devices) if size])


def _read(dataset: Any, batch: GlobalBatch, choose: Any) -> Any:
    # Only iterated there; a whole schedule is not needed for one batch.
    return next(fetch_here(dataset, cast(Schedule, [batch]), choose))[1]


def _chunk(rows: Indices, device: int, devices: int) -> Indices:
    return chunk_of(rows, device, devices)


def _first_of_stream(dataset: Any, plan: RunPlan) -> Cut:
    config = plan.config
    split: Split = make_split(config.batch, config.forward_kwargs)
    once = StreamPlan(plan.batch_rows, config.epochs, 1, config.drop_last, config.seed)
    loader = replace(config.loader, workers=0)
    pieces = _Pieces(dataset, plan.num_processes)
    batch, fetched = next(fetch_stream(pieces, once, lambda own: own, LocalComm(), loader, False))
    rows = len(batch.indices)
    if plan.num_processes == 1:
        return _of_one_process(split(fetched[0]), 0, rows, plan)
    return Cut(0, rows, chunk_sizes(rows, plan.num_devices), tuple(map(split, fetched)), None)


@final
class _Pieces:
    """A stream whose batches are collated device by device, so that it is read only once."""

    def __init__(self, stream: Any, processes: int) -> None:
        self._stream, self._processes = stream, processes

    def __iter__(self) -> Iterator[Any]:
        return iter(self._stream)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._stream, name)

    def collate_fn(self, rows: list[Any]) -> list[Any]:
        """One collated batch per process with rows."""
        collate, start, pieces = collate_of(self._stream), 0, []
        for size in chunk_sizes(len(rows), self._processes):
            if size:
                pieces.append(collate(rows[start : start + size]))
                start += size
        return pieces
