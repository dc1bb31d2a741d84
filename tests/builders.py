"""Small valid objects for unit tests; a test overrides what it is about."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from threading import Barrier
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from omegaconf import DictConfig, OmegaConf

from dpexp.clocks import ClockOffset
from dpexp.comm import Comm
from dpexp.compose import config_folder
from dpexp.config import load
from dpexp.parallel import Context
from dpexp.plan import HardwareFacts, RunPlan, make_plan
from dpexp.records import PhaseSummary, RankResult, RunResult, ShapeRecord, StepRecord
from dpexp.report.answers import best_of
from dpexp.report.content import Cell, Content
from dpexp.results import assemble
from dpexp.schema import NESTED, Config
from dpexp.shapes import ShapeLog
from dpexp.sinks import Sink
from dpexp.timing import Clock

Result = TypeVar("Result")


@cache
def _composed(strategy: str) -> DictConfig:
    whole = OmegaConf.load(config_folder() / "config.yaml")
    assert isinstance(whole, DictConfig)
    chosen = dict(next(iter(entry.items())) for entry in whole.defaults if entry != "_self_")
    for group, option in {**chosen, "parallel": strategy}.items():
        if not group.startswith("override "):
            whole[group] = OmegaConf.load(config_folder() / group / f"{option}.yaml")
    del whole["defaults"], whole["hydra"]
    return whole


def composed(strategy: str = "none", changes: dict[str, Any] | None = None) -> DictConfig:
    """The exercise's config as Hydra gives it, with dotted keys changed or added."""
    whole = copy.deepcopy(_composed(strategy))
    for key, value in (changes or {}).items():
        OmegaConf.update(whole, key, value, merge=False, force_add=True)
    return whole


def make_config(strategy: str = "none", **overrides: Any) -> Config:
    """The exercise's config, that of conf/.

    Args:
        overrides: typed values; of a node with keys (`parallel`, `loader`, …) a dict of those that
            change.
    """
    base = load(composed(strategy))
    changes = {
        key: replace(getattr(base, key), **value) if key in NESTED else value
        for key, value in overrides.items()
    }
    return replace(base, **changes)


def make_facts(cores: int = 4, **overrides: Any) -> HardwareFacts:
    """A machine without accelerators."""
    return replace(
        HardwareFacts(cores=cores, accelerator=None, num_accelerators=0),
        **overrides,
    )


def make_plan_for(
    strategy: str = "none",
    num_devices: int | str = 1,
    *,
    facts: HardwareFacts | None = None,
    **overrides: Any,
) -> RunPlan:
    """The plan of :func:`make_config` on :func:`make_facts`."""
    config = make_config(strategy, num_devices=num_devices, **overrides)
    return make_plan(config, facts or make_facts())


def make_record(step: int = 0, **overrides: Any) -> StepRecord:
    """A step of 20 ms over 30 rows on one device; its phases add up."""
    base = StepRecord(
        step=step,
        epoch=0,
        warmup=False,
        global_rows=30,
        rows=30,
        step_s=0.020,
        data_s=0.001,
        transfer_s=0.002,
        forward_s=0.005,
        backward_s=0.007,
        optimizer_s=0.003,
        other_s=0.002,
        scatter_s=None,
        replicate_s=None,
        parallel_apply_s=None,
        gather_s=None,
        comm_exposed_s=None,
        comm_overlapped_s=None,
        straggler_wait_s=None,
        comm_arrival_s=None,
        comm_bytes=None,
        bus_bytes_per_s=None,
        loss=None,
        learning_rate=None,
        peak_bytes=64 * 2**20,
        replica_rows=(30,),
    )
    return base._replace(**overrides)


def make_shape(**overrides: Any) -> ShapeRecord:
    """The exercise's only call site."""
    return replace(ShapeRecord("", 0, "[30, 5]", "[30, 2]", 3, 0, 2), **overrides)


def make_summary(mean_s: float, count: int = 3) -> PhaseSummary:
    """A phase that always took as long."""
    return PhaseSummary(mean_s, mean_s, mean_s, mean_s, mean_s, count)


def make_rank_result(rank: int = 0, **overrides: Any) -> RankResult:
    """A rank that did 4 steps of which 3 were measured."""
    base = RankResult(
        rank=rank,
        steps=4,
        measured_steps=3,
        rows_seen=100,
        measured_global_rows=70,
        wall_s=0.5,
        recording_s=0.01,
        timing={"step": make_summary(0.125), "data": make_summary(0.025)},
        peak_bytes=200 * 2**20,
        peak_device_bytes={},
        losses=(None, None),
        threads=4,
        device="cpu",
        pid=1234,
        shapes=(),
        notes=(),
        model={"parameters": 12},
    )
    return replace(base, **overrides)


def make_run_result(strategy: str = "none", num_devices: int = 1, **overrides: Any) -> RunResult:
    """The result of a run that went well."""
    plan = make_plan_for(strategy, num_devices)
    ranks = [make_rank_result(rank) for rank in range(plan.num_processes)]
    return replace(assemble(plan, {"cores": 4}, ranks), **overrides)


def make_run_data(
    strategy: str = "none",
    num_devices: int = 1,
    *,
    rate: float = 100.0,
    keys: dict[str, Any] | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """``run.json`` data of a run that did `rate` samples in a second.

    Args:
        keys: values of the config, by dotted key; None = that the run.json does not have it.
    """
    throughput = {"samples_per_s": rate, "samples_measured": rate, "wall_s": 1.0}
    run = make_run_result(strategy, num_devices, throughput=throughput).to_dict()
    for key, value in (keys or {}).items():
        *nodes, last = key.split(".")
        node = run["config"]
        for name in nodes:
            node = node[name]
        node[last] = value
        if value is None:
            del node[last]
    return {**run, **overrides}


def make_content(cells: Sequence[Cell], **changes: Any) -> Content:
    """The content of a report on `cells`, and on nothing else."""
    empty: dict[str, Any] = dict.fromkeys(
        (
            "breakdowns",
            "memory",
            "shapes",
            "failures",
            "parity",
            "warnings",
            "environment",
            "notes",
        ),
        (),
    )
    told = {"title": "Sweep x", "answers": ("an answer",), "command": "python -m dpexp -m a=1,2"}
    known = {"cells": tuple(cells), "status": "ok", "shapes_left": 0, "raw_environment": {}}
    best = best_of(cells, {name: {} for cell in cells for name in cell.folders})
    known["best"] = None if best is None else best.folder
    return Content(**{**empty, **told, **known, **changes})


class FakeComm(Comm):
    """One rank of several, whose peers always bring the same values."""

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        peers_sum: Sequence[float] | None = None,
        peers_max: float = -math.inf,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._peers_sum = peers_sum
        self._peers_max = peers_max

    def gather(self, value: Any) -> list[Any] | None:
        return [value] if self.rank == 0 else None

    def collect(self, values: torch.Tensor) -> torch.Tensor | None:
        return None if self.rank else torch.stack([values] * self.world_size)

    def highest(self, values: torch.Tensor) -> torch.Tensor:
        return values.clamp(min=self._peers_max)

    def clock(self) -> ClockOffset:
        return ClockOffset(0.0, 0.0)

    def sum_later(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        if self._peers_sum is None:
            return lambda: values
        total = values + torch.tensor(self._peers_sum, dtype=values.dtype)
        return lambda: total

    def max(self, value: float) -> float:
        return max(value, self._peers_max)

    def extent(self, values: Sequence[float]) -> tuple[list[float], list[float]]:
        return list(values), [max(value, self._peers_max) for value in values]

    def spread(self, tensors: Iterable[torch.Tensor]) -> None:
        return None

    def aside(self, timeout_s: float) -> None:
        return None

    def close(self) -> None:
        return None


class Ranks:
    """The ranks of a run, played one after the other in this process.

    A rank's n-th meeting sees what the ranks that were played before brought to their n-th.
    """

    def __init__(self, world_size: int) -> None:
        self.brought: list[list[Any]] = [[] for _ in range(world_size)]

    def comm(self, rank: int) -> Comm:
        """The communicator of one rank."""
        return _PlayedComm(self, rank)


class _PlayedComm(FakeComm):
    def __init__(self, ranks: Ranks, rank: int) -> None:
        super().__init__(rank, len(ranks.brought))
        self._ranks = ranks

    def gather(self, value: Any) -> list[Any] | None:
        met = self._meet(value)
        return met if self.rank == 0 else None

    def extent(self, values: Sequence[float]) -> tuple[list[float], list[float]]:
        met = self._meet(list(values))
        columns = list(zip(*met, strict=True))
        return [min(column) for column in columns], [max(column) for column in columns]

    def _meet(self, value: Any) -> list[Any]:
        own = self._ranks.brought[self.rank]
        own.append(value)
        return [each[len(own) - 1] for each in self._ranks.brought if len(each) >= len(own)]


def together(
    world_size: int,
    part: Callable[[Comm], Result],
    offsets_s: Sequence[float] | None = None,
    error_s: float = 0.0,
) -> list[Result]:
    """What each of several ranks comes to: threads that meet as processes would.

    Args:
        part: what a rank does with its communicator.
        offsets_s: how far ahead of rank 0's clock each one's is, as far as is known.
        error_s: how far off that may be.
    """
    meeting = _Meeting(world_size)
    offsets_s = offsets_s or [0.0] * world_size

    def play(rank: int) -> Result:
        try:
            return part(_MeetingComm(meeting, rank, ClockOffset(offsets_s[rank], error_s)))
        except BaseException:
            meeting.barrier.abort()  # nobody shall wait for this one
            raise

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(play, range(world_size)))


class _Meeting:
    def __init__(self, world_size: int) -> None:
        self.barrier = Barrier(world_size)
        self.brought: list[Any] = [None] * world_size


class _MeetingComm(FakeComm):
    def __init__(self, meeting: _Meeting, rank: int, offset: ClockOffset) -> None:
        super().__init__(rank, len(meeting.brought))
        self._meeting = meeting
        self._offset = offset

    def gather(self, value: Any) -> list[Any] | None:
        met = self._meet(value)
        return met if self.rank == 0 else None

    def collect(self, values: torch.Tensor) -> torch.Tensor | None:
        met = torch.stack(self._meet(values))
        return None if self.rank else met

    def highest(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._meet(values)).amax(dim=0)

    def clock(self) -> ClockOffset:
        return self._offset

    def sum_later(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        total = torch.stack(self._meet(values)).sum(dim=0)
        return lambda: total

    def max(self, value: float) -> float:
        return max(self._meet(value))

    def extent(self, values: Sequence[float]) -> tuple[list[float], list[float]]:
        columns = list(zip(*self._meet(list(values)), strict=True))
        return [min(column) for column in columns], [max(column) for column in columns]

    def _meet(self, value: Any) -> list[Any]:
        meeting = self._meeting
        meeting.brought[self.rank] = value
        meeting.barrier.wait(timeout=60)
        met = list(meeting.brought)
        meeting.barrier.wait(timeout=60)  # nobody brings the next before all have seen this
        return met


class TickClock(Clock[int]):
    """A clock whose every mark is a second after the one before."""

    def __init__(self) -> None:
        self.ticks = 0
        self.settled = 0

    def mark(self) -> int:
        self.ticks += 1
        return self.ticks

    def spans(self, rows: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
        return np.diff(np.array(rows, dtype=np.float64), axis=1)

    def seconds(self, marks: Sequence[int]) -> npt.NDArray[np.float64]:
        return np.array(marks, dtype=np.float64)

    def settle(self) -> None:
        self.settled += 1


class ListSink(Sink):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def write(self, records: Sequence[StepRecord]) -> None:
        self.records.extend(records)

    def close(self) -> None:
        return None


def make_context(
    strategy: str,
    num_devices: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    device: str = "cpu",
    **overrides: Any,
) -> Context:
    """What a strategy is made with, on fakes."""
    return Context(
        plan=make_plan_for(strategy, num_devices, **overrides),
        comm=FakeComm(rank, world_size),
        device=torch.device(device),
        clock=TickClock(),
        shapes=ShapeLog(first_replica=rank),
    )
