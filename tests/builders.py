"""Small valid objects for unit tests; a test overrides what it is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dpexp.comm import Comm
from dpexp.parallel import Context
from dpexp.plan import HardwareFacts, RunPlan, make_plan
from dpexp.records import PhaseSummary, RankResult, RunResult, ShapeRecord, StepRecord
from dpexp.results import assemble
from dpexp.schema import (
    Backend,
    Config,
    LoaderConfig,
    ParallelConfig,
    Scaling,
    ShapesConfig,
    StrategyName,
    Task,
)
from dpexp.shapes import ShapeLog
from dpexp.sinks import Sink
from dpexp.timing import Clock

DDP_DEFAULTS: dict[str, Any] = {
    "backend": Backend.auto,
    "bucket_cap_mb": 25.0,
    "find_unused_parameters": False,
    "static_graph": False,
    "gradient_as_bucket_view": False,
    "broadcast_buffers": True,
}


def make_config(
    strategy: str = "none", parallel: dict[str, Any] | None = None, **overrides: Any
) -> Config:
    """The exercise's config. `parallel` overrides options of the strategy."""
    options = DDP_DEFAULTS if strategy == "ddp" else dict.fromkeys(DDP_DEFAULTS)
    base = Config(
        dataset={"_target_": "dpexp.datasets.random_rows", "rows": 100, "seed": 0},
        model={"_target_": "dpexp.models.linear", "in_features": 5, "out_features": 2},
        parallel=ParallelConfig(
            **{
                "strategy": StrategyName(strategy),
                "timeout_s": 300.0,
                **options,
                **(parallel or {}),
            }
        ),
        optimizer={"_target_": "torch.optim.SGD", "lr": 0.01},
        task=Task.forward,
        loss="auto",
        forward_kwargs={},
        seed=0,
        save_weights=False,
        device="auto",
        num_devices="auto",
        batch_size=30,
        scaling=Scaling.strong,
        epochs=1,
        steps=None,
        warmup_steps=1,
        drop_last=False,
        shuffle=True,
        loader=LoaderConfig(workers=0),
        shapes=ShapesConfig(depth=0, print=False),
    )
    return replace(base, **overrides)


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
        loss=None,
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


class FakeComm(Comm):
    """One rank of several, whose peers always bring the same values."""

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        peers_sum: Sequence[float] | None = None,
        peers_max: float = 0.0,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._peers_sum = peers_sum
        self._peers_max = peers_max

    def gather(self, value: Any) -> list[Any] | None:
        return [value] if self.rank == 0 else None

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        if self._peers_sum is None:
            return values
        return values + torch.tensor(self._peers_sum, dtype=values.dtype)

    def max(self, value: float) -> float:
        return max(value, self._peers_max)

    def close(self) -> None:
        return None


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
    strategy: str, num_devices: int, *, rank: int = 0, world_size: int = 1, device: str = "cpu"
) -> Context:
    """What a strategy is made with, on fakes."""
    return Context(
        plan=make_plan_for(strategy, num_devices),
        comm=FakeComm(rank, world_size),
        device=torch.device(device),
        clock=TickClock(),
        shapes=ShapeLog(first_replica=rank),
    )
