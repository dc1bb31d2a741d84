"""From a dataset of any kind to the batches of a run."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset

from dpexp.batches import seed_of_rank
from dpexp.comm import Comm
from dpexp.errors import ConfigError
from dpexp.loading import Batches, Choose, fetch_by_workers, fetch_here
from dpexp.plan import RunPlan
from dpexp.preload import preload
from dpexp.schedule import ENDLESS, Schedule
from dpexp.schema import Config, Task
from dpexp.schema_workload import Preload
from dpexp.streams import StreamPlan, fetch_stream


@dataclass(frozen=True)
class Feed:
    """A run's batches, in order."""

    batches: Batches
    steps: int | None  # how many there are; None: not known beforehand
    notes: tuple[str, ...]
    streamed: bool = False  # of an iterable dataset


def make_feed(
    dataset: Any,
    plan: RunPlan,
    choose: Choose,
    comm: Comm,
    device: torch.device,
    first: int = 0,
) -> Feed:
    """Every global batch of the run with this rank's part of the data.

    Args:
        dataset: map-style (``__len__`` and ``__getitem__``) or iterable.
        choose: from the rows of a global batch to those that this rank fetches.
        first: the step to begin with, where those before are done.

    Raises:
        ConfigError: there is no batch, or the loader's settings do not fit the dataset.
    """
    config, loader = plan.config, plan.config.loader
    pin = pins(plan)
    if is_stream(dataset):
        if loader.preload is Preload.device:
            raise ConfigError(
                "loader.preload",
                "device",
                f"the dataset {type(dataset).__name__} has no length, so it may not end",
                fix="loader.preload=none",
            )
        cut = StreamPlan(
            plan.batch_rows, config.epochs, config.steps, config.drop_last, config.seed, first
        )
        batches = fetch_stream(dataset, cut, choose, comm, loader, pin)
        return Feed(batches, None, _stream_notes(config), streamed=True)
    schedule = make_schedule(plan, rows_in(dataset), first)
    if loader.preload is Preload.device:
        dataset = preload(dataset, device)
    if loader.workers:
        # Processes that begin later must not draw what the first ones drew.
        seed = seed_of_rank(config.seed, comm.rank) + first
        batches = fetch_by_workers(dataset, schedule, choose, loader, seed, pin)
    else:
        batches = fetch_here(dataset, schedule, choose)
    steps = len(schedule)
    known = None if steps == ENDLESS else steps
    return Feed(batches, known, _schedule_notes(plan, schedule))


def pins(plan: RunPlan) -> bool:
    """Whether batches pass through page-locked memory."""
    asked = plan.config.loader.pin_memory
    return plan.device_type == "cuda" if asked is None else asked


def is_stream(dataset: Any) -> bool:
    """Whether the dataset can only be read from its beginning."""
    if isinstance(dataset, IterableDataset):
        return True
    return not hasattr(dataset, "__getitem__") and hasattr(dataset, "__iter__")


def rows_in(dataset: Any) -> int:
    """The number of rows of a map-style dataset.

    Raises:
        ConfigError: the dataset has no length, or no rows.
    """
    if not isinstance(dataset, Sized):
        raise ConfigError(
            "dataset",
            type(dataset).__name__,
            "has neither __len__ and __getitem__ (a map-style dataset) nor __iter__ (an iterable "
            "one)",
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


def make_schedule(plan: RunPlan, num_rows: int, first: int = 0) -> Schedule:
    """The run's schedule over a map-style dataset.

    Raises:
        ConfigError: not a single batch is left; the message names the counts.
    """
    config = plan.config
    schedule = Schedule(
        num_rows,
        plan.batch_rows,
        config.epochs,
        config.steps,
        config.drop_last,
        config.shuffle,
        config.seed,
        first,
    )
    if len(schedule) == 0:
        raise ConfigError(
            "drop_last",
            config.drop_last,
            f"nothing is left to do: the {num_rows} rows make no whole batch of {plan.batch_rows}",
            fix=f"drop_last=false, or batch_size={num_rows}",
        )
    return schedule


def _schedule_notes(plan: RunPlan, schedule: Schedule) -> tuple[str, ...]:
    config, notes = plan.config, []
    seen = len(schedule) * plan.batch_rows
    if config.task is Task.evaluate and seen < schedule.num_rows:
        notes.append(
            f"steps={config.steps} leaves {schedule.num_rows - seen} of {schedule.num_rows} rows "
            "out of the evaluation; steps=null takes all"
        )
    if config.steps is not None and len(schedule) < config.steps:
        notes.append(
            f"steps={config.steps} were asked for, but {config.epochs} epoch(s) of "
            f"{schedule.num_rows} rows have {len(schedule)}; epochs=null repeats the data"
        )
    left = len(schedule) - schedule.first
    if left <= 0:
        notes.append(f"all {len(schedule)} steps were done before: nothing was left to do")
    elif left <= config.warmup_steps:
        notes.append(
            f"all {left} steps are warm-up steps (warmup_steps={config.warmup_steps}), "
            "so there is no timing; epochs=null steps=20 repeats the data, or warmup_steps=0"
        )
    return tuple(notes)


def end_notes(config: Config, feed: Feed, steps: int, epochs: int) -> tuple[str, ...]:
    """What is known of a stream only at its end: that it had fewer rows than were asked for."""
    if not feed.streamed:
        return ()
    if config.steps is not None and steps < config.steps:
        return (f"steps={config.steps} were asked for, but the stream ended after {steps}",)
    if config.steps is None and config.epochs is not None and epochs < config.epochs:
        return (
            f"epochs={config.epochs} were asked for, but the dataset gave rows for {epochs} only: "
            "can it be iterated again?",
        )
    return ()


def _stream_notes(config: Config) -> tuple[str, ...]:
    if not config.shuffle:
        return ()
    return (
        "the dataset is iterable: its rows come in its own order, and shuffle has no effect on it",
    )
