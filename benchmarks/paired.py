"""Two configurations measured in turn inside the same processes: what differs between processes
(where their memory lies, what else the machine does) is then on both sides.

As a program it is one rank: ``python -m benchmarks.paired <json of an Order>``, by itself or under
torchrun. Rank 0 prints the figures.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import tempfile
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import final

import numpy
import torch

from benchmarks.common import run_checked
from benchmarks.turns import SIDES
from dpexp import compose, console, env
from dpexp.assembly import put_together
from dpexp.comm import Comm, connect
from dpexp.comm_recorder import CommRecorder
from dpexp.config import load
from dpexp.device import gather_facts, prepare
from dpexp.loop import Progress, Work, run_steps
from dpexp.pinning import shares, whole_first
from dpexp.plan import RunPlan, make_plan
from dpexp.precision import set_float32
from dpexp.recorder import Recorder
from dpexp.shapes import ShapeLog
from dpexp.sinks import CsvSink, ProgressSink, Sink, TensorBoardSink
from dpexp.timing import make_clock

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@dataclass(frozen=True)
class Order:
    """What a launch measures.

    Args:
        ours: overrides of the configuration in question.
        reference: of the one that it is compared with.
        block: steps that a side makes before the next one's turn.
        blocks: how often each side has its turn.
        warmup: blocks of each side before they count.
    """

    ours: tuple[str, ...]
    reference: tuple[str, ...]
    block: int
    blocks: int
    warmup: int = 2


def launch(order: Order, ranks: int) -> list[list[float]]:
    """Seconds of a step by turn and side, of the slowest rank, in processes of their own.

    Raises:
        RuntimeError: they failed.
    """
    launcher = () if ranks == 1 else (*TORCHRUN, str(ranks))
    command = [sys.executable, *launcher, "-m", "benchmarks.paired", json.dumps(asdict(order))]
    with tempfile.TemporaryDirectory() as name:
        printed = run_checked(command, Path(name))
    found: list[list[float]] = json.loads(printed.strip().splitlines()[-1])
    return found


@final
class Side:
    """One configuration with all that its steps need, as a run has it (worker.py)."""

    def __init__(self, plan: RunPlan, comm: Comm, device: torch.device, folder: Path) -> None:
        clock, shapes = make_clock(device), ShapeLog(first_replica=comm.rank)
        self._built = built = put_together(plan, comm, device, clock, shapes)
        folder.mkdir(exist_ok=True)
        self._sinks: list[Sink] = [CsvSink(folder / f"steps.rank{comm.rank}.csv", plan.num_devices)]
        if comm.rank == 0:
            self._sinks += [TensorBoardSink(folder), ProgressSink(plan.label, None)]
        strategy = built.strategy
        collectives = None if strategy.log is None else CommRecorder(comm, clock)
        self._recorder = Recorder(
            plan, comm, clock, self._sinks, strategy.loss_divisor, collectives
        )
        self._work = Work(
            strategy, built.transfer, clock, self._recorder, shapes, Progress(), built.split,
            built.autocast, built.training, built.scoring,
        )  # fmt: skip
        self._batches = built.transfer.ahead(built.feed.batches)

    def block(self, steps: int) -> float:
        """Make some steps. Seconds of each on this rank, the writing of records included."""
        self._recorder.resume()
        before_s = self._spent_s
        run_steps(islice(self._batches, steps), self._work)
        return (self._spent_s - before_s) / steps

    def close(self) -> None:
        """Let go of the strategy: before the process group is destroyed."""
        for sink in self._sinks:
            sink.close()
        self._built.strategy.close()

    @property
    def _spent_s(self) -> float:
        return self._recorder.wall_s + self._recorder.recording_s


def take_blocks(
    order: Order, plans: dict[str, RunPlan], comm: Comm, device: torch.device, folder: Path
) -> list[list[float]]:
    """This rank's seconds of a step by turn and side. In each turn the sides' order is drawn."""
    sides = {name: Side(plan, comm, device, folder / name) for name, plan in plans.items()}
    for side in sides.values():
        for _ in range(order.warmup):
            side.block(order.block)
    draw = random.Random(0)  # the same on every rank
    found = []
    for _ in range(order.blocks):
        names = draw.sample(SIDES, len(SIDES))
        taken = {name: sides[name].block(order.block) for name in names}
        found.append([taken[name] for name in SIDES])
    for side in sides.values():
        side.close()
    return found


def keep_to_own_cores(rank: int, ranks: int) -> None:
    """As `pin=true` does: else ranks change cores, which has nothing to do with either side."""
    if not hasattr(os, "sched_setaffinity"):
        return
    parts = shares(whole_first(tuple(os.sched_getaffinity(0))), ranks)
    if parts:
        os.sched_setaffinity(0, parts[rank])


def main() -> None:
    """One rank."""
    plain = json.loads(sys.argv[1])
    order = Order(**{**plain, "ours": tuple(plain["ours"]), "reference": tuple(plain["reference"])})
    compose.register()
    outer = env.outer_launcher()
    rank = 0 if outer is None else outer.rank
    if outer is not None:
        keep_to_own_cores(rank, outer.world_size)
    total = order.block * (order.blocks + order.warmup)
    shared = ("epochs=null", f"steps={total}", "warmup_steps=0")
    facts = gather_facts()
    ours, reference = (
        make_plan(load(compose.composed([*given, *shared])), facts)
        for given in (order.ours, order.reference)
    )
    device = prepare(ours, rank)
    set_float32(ours.config.precision, device)
    comm = connect(ours, rank)
    with tempfile.TemporaryDirectory() as name, torch.set_grad_enabled(True):
        plans = dict(zip(SIDES, (ours, reference, reference), strict=True))
        own = take_blocks(order, plans, comm, device, Path(name))
    gc.collect()  # the DDP objects must be gone before the process group is
    gathered = comm.gather(own)
    if gathered is not None:
        slowest = numpy.max(numpy.asarray(gathered), axis=0)
        print(json.dumps(slowest.tolist()))
    comm.close()
    if outer is not None:
        console.leave()  # an interpreter that unwinds after a process group is aborted now and then


if __name__ == "__main__":
    main()
