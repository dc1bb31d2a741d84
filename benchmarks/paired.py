"""Two configurations measured in turn inside the same processes: what differs between processes
(what else the machine does, how fast their cores are) is then on both sides. What differs between
two models of a process, where their memory lies, is drawn anew for each turn; and as the machine is
not as fast in one second as in the next, the sides take turns every few steps.

As a program it is one rank: ``python -m benchmarks.paired <json of an Order>``, by itself or under
torchrun. Rank 0 prints the figures.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import numpy
import torch

from benchmarks.common import run_checked
from benchmarks.turns import SIDES, STRETCH
from dpexp import compose, console, env, recorder
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
        stretches: of each side in a turn. Half as many come before and do not count.
        turns: each has models and records of its own.
    """

    ours: tuple[str, ...]
    reference: tuple[str, ...]
    stretches: int
    turns: int


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
    """One configuration with all that its steps need, as a run has it (worker.py).

    Its steps are made by dpexp's own loop, in a thread: so it can be held between two steps while
    another side goes on. Only one thread works at a time.
    """

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
        self._left = 0
        self._closing = False
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        # How many threads torch computes with is a setting of each thread.
        threads = (torch.get_num_threads(),)
        # A daemon: where one side fails, the others wait for a turn that does not come.
        self._thread = threading.Thread(target=self._run, args=threads, daemon=True)
        self._thread.start()
        self._done.acquire()

    def stretch(self) -> None:
        """Make STRETCH steps."""
        self._left = STRETCH
        self._go.release()
        self._done.acquire()
        if self._error is not None:
            raise self._error

    def recorded(self) -> tuple[int, float]:
        """Steps that are written, and the seconds that it took to write them."""
        return self._recorder.steps, self._recorder.recording_s

    def close(self) -> list[float]:
        """Let go of the strategy: before the process group is destroyed.

        Returns:
            The mean step of each stretch, without its first step.
        """
        self._closing = True
        self._go.release()
        self._thread.join()
        if self._error is not None:
            raise self._error
        for sink in self._sinks:
            sink.close()
        self._built.strategy.close()
        steps_s = self._recorder.step_seconds().reshape(-1, STRETCH)
        means: list[float] = steps_s[:, 1:].mean(axis=1).tolist()
        return means

    def _run(self, threads: int) -> None:
        torch.set_num_threads(threads)
        try:
            run_steps(self._handed_out(), self._work)
        except BaseException as error:  # noqa: BLE001  # handed on to the thread that waits
            self._error = error
        self._done.release()

    def _handed_out(self) -> Iterator[Any]:
        """The batches; between two stretches the thread waits here."""
        while True:
            if self._left == 0:
                self._done.release()
                self._go.acquire()
                if self._closing:
                    return
            self._left -= 1
            yield next(self._batches)


def take_turns(
    order: Order, plans: dict[str, RunPlan], comm: Comm, device: torch.device, folder: Path
) -> list[list[float]]:
    """This rank's seconds of a step by turn and side."""
    draw = random.Random(0)  # the same on every rank
    found = []
    for turn in range(order.turns):
        sides = {
            name: Side(plans[name], comm, device, folder / f"{turn}-{name}")
            for name in draw.sample(SIDES, len(SIDES))
        }
        taken = _turn(order, sides, draw)
        found.append([taken[name] for name in SIDES])
        del sides
        gc.collect()  # DDP objects hold themselves; they must be gone before the group is
    return found


def _turn(order: Order, sides: dict[str, Side], draw: random.Random) -> dict[str, float]:
    """Seconds of a step by side: of the median stretch, and of writing a step's record."""
    warmup = order.stretches // 2
    before = {}
    for number in range(warmup + order.stretches):
        if number == warmup:  # until then the recorder has found its pace
            before = {name: side.recorded() for name, side in sides.items()}
        for name in draw.sample(SIDES, len(SIDES)):
            sides[name].stretch()
    taken = {}
    for name, side in sides.items():
        steps, seconds = (
            now - then for now, then in zip(side.recorded(), before[name], strict=True)
        )
        if not steps:
            raise RuntimeError("nothing was written in a turn: Order.stretches has to be higher")
        taken[name] = statistics.median(side.close()[warmup:]) + seconds / steps
    return taken


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
    total = STRETCH * (order.stretches // 2 + order.stretches)
    shared = ("epochs=null", f"steps={total}", "warmup_steps=0")
    facts = gather_facts()
    ours, reference = (
        make_plan(load(compose.composed([*given, *shared])), facts)
        for given in (order.ours, order.reference)
    )
    recorder.FLUSH_EVERY_S *= len(SIDES)  # of which each side has its share
    device = prepare(ours, rank)
    set_float32(ours.config.precision, device)
    comm = connect(ours, rank)
    with tempfile.TemporaryDirectory() as name, torch.set_grad_enabled(True):
        plans = dict(zip(SIDES, (ours, reference, reference), strict=True))
        own = take_turns(order, plans, comm, device, Path(name))
    gathered = comm.gather(own)
    if gathered is not None:
        slowest = numpy.max(numpy.asarray(gathered), axis=0)
        print(json.dumps(slowest.tolist()))
    comm.close()
    if outer is not None:
        console.leave()  # an interpreter that unwinds after a process group is aborted now and then


if __name__ == "__main__":
    main()
