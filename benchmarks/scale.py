"""What grows with the number of ranks: ``python -m benchmarks.scale``, at 64, 256 and 1,024.

Simulated: one rank after the other in this process, over torch's fake process group, with steps and
results of the other ranks that are made up (scale_ranks.py). So it says what dpexp's own work
costs, and how much it would send; not how long a network takes for that.

``--write`` makes ``docs/scale.md`` of what was found.
"""

from __future__ import annotations

import argparse
import gc
import pickle
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from multiprocessing import RawArray
from pathlib import Path
from typing import Any, TypeVar

import psutil

from benchmarks.overhead import describe
from benchmarks.scale_page import (
    A_RANK,
    ALL,
    PAGE,
    PARENT,
    RANK_0,
    Figure,
    Growth,
    growths,
    page,
)
from benchmarks.scale_ranks import (
    BUCKETS,
    LAYERS,
    RANKS_PER_HOST,
    ROWS_PER_DEVICE,
    STEPS,
    CountingComm,
    Kept,
    Rank,
    event_file,
    facts_for,
    fake_group,
    plan_of,
    results_of,
    tables_of,
)
from benchmarks.scale_report import the_report, writers
from dpexp.beacon import WIDTH
from dpexp.brought import drawn_ranks, gather_results
from dpexp.comm import CLOCK_ROUNDS
from dpexp.device import describe_environment, gather_facts
from dpexp.files import write_whole
from dpexp.plan import RunPlan, make_plan
from dpexp.records import STEP_TABLES, RankResult, RunResult, StepRecord
from dpexp.results import assemble
from dpexp.schedule import Schedule, chunk_of
from dpexp.sinks import (
    TensorBoardSink,
    step_table,
)
from dpexp.sinks.tensorboard import shapes_table
from dpexp.stragglers import LEGS
from dpexp.watchdog import Watchdog
from dpexp.wire import pack

SIZES = (64, 256, 1024)
TURNS = 7
Found = TypeVar("Found")
OWN_RESULT = "its own result, which is not sent"


def cpu_ms(work: Callable[[], Any], before: Callable[[], Any] | None = None) -> float:
    """The least CPU time that some work takes, of a few turns."""
    least = float("inf")
    for _ in range(TURNS):
        if before is not None:
            before()
        gc.collect()
        began = time.process_time()
        work()
        least = min(least, time.process_time() - began)
    return 1000 * least


def peak_mb(work: Callable[[], Found]) -> tuple[float, Found]:
    """What some work holds of Python's and numpy's memory at most, beside what there was before."""
    gc.collect()
    tracemalloc.start()
    made = work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1e6, made


def before_the_steps(ranks: int) -> Iterator[Figure]:
    """Plan, schedule, and what the launching process looks after."""
    plan = plan_of(ranks)
    config, facts = plan.config, facts_for(ranks)
    yield Figure("the plan", A_RANK, "ms", cpu_ms(lambda: make_plan(config, facts)))
    yield Figure("the plan as handed to a rank", A_RANK, "KB", len(pickle.dumps(plan)) / 1e3)
    schedule = Schedule(2**20, ROWS_PER_DEVICE * ranks, None, 1000, False, True, 0)
    batches = list(islice(schedule, 1000))
    own = cpu_ms(lambda: [chunk_of(batch.indices, 1, ranks) for batch in batches])
    yield Figure("its chunk of a global batch", A_RANK, "µs", own)
    watchdog = Watchdog(RawArray("q", WIDTH * ranks), ranks, Path(), 1800.0)
    looks = cpu_ms(lambda: [(watchdog.hung(), watchdog.late()) for _ in range(10)])
    yield Figure("a look at all ranks (of one host)", PARENT, "ms", looks / 10)


def a_flush(ranks: int, rank: int) -> Iterator[Figure]:
    """What a flush of 100 steps costs a rank, without files.

    One in which rank 0 hears who was late, as it does in some.
    """
    whose = A_RANK if rank else RANK_0
    with fake_group(rank, ranks):
        comm = CountingComm(rank, ranks)
        own = Rank(plan_of(ranks), comm)

        def flush() -> None:
            own.recorder.flush()
            own.recorder.finish()

        own.make_steps(1)
        flush()
        before = comm.calls.total(), comm.sent_bytes, comm.received_bytes
        own.make_steps()
        flush()
        calls, sent, received = comm.calls.total(), comm.sent_bytes, comm.received_bytes
        # One of the calls waits for rank 0 alone; the rest are reductions.
        yield Figure("collectives of a flush", whose, "calls", calls - before[0])
        if rank:
            yield Figure("handed over in a flush", whose, "KB", (sent - before[1]) / 1e3)
        yield Figure("received in a flush", whose, "KB", (received - before[2]) / 1e3)
        spent = cpu_ms(flush, own.make_steps)
        yield Figure("a flush of 100 steps", whose, "ms", spent)
        own.make_steps()
        peak, _ = peak_mb(flush)
        yield Figure("memory of a flush at most", whose, "MB", peak)


def tables(ranks: int, plan: RunPlan, made: list[StepRecord], folder: Path) -> Iterator[Figure]:
    """The tables of steps, and what rank 0 writes for TensorBoard."""
    sink = step_table(folder, plan, 1)
    sink.write(made)
    size = sum(path.stat().st_size for path in folder.glob(STEP_TABLES))
    yield Figure("its rows of 100 steps in a table", A_RANK, "KB", size / 1e3)
    yield Figure("writing these", A_RANK, "ms", cpu_ms(lambda: sink.write(made)))
    sink.close()
    yield Figure("tables of steps", ALL, "files", tables_of(ranks, plan.by_host))
    board = TensorBoardSink(folder)
    before = event_file(folder).stat().st_size
    board.write(made)
    grown = event_file(folder).stat().st_size - before
    yield Figure("100 steps for TensorBoard", RANK_0, "KB", grown / 1e3)
    yield Figure("writing these", RANK_0, "ms", cpu_ms(lambda: board.write(made)))
    board.close()


def the_end(ranks: int, folder: Path) -> Iterator[Figure]:
    """What rank 0 does when the steps are done."""
    plan = plan_of(ranks)
    with fake_group(0, ranks):
        kept = Kept()
        first = Rank(plan, CountingComm(0, ranks), [kept])
        for _ in range(3):
            first.make_steps()
            first.recorder.flush()
        yield from tables(ranks, plan, kept.records, folder)
        own, peers = first.result(), brought(plan, ranks, first.result())
        comm = CountingComm(0, ranks, peers)
        yield Figure("its result, for rank 0", A_RANK, "KB", max(map(len, peers)) / 1e3)
        yield Figure(OWN_RESULT, RANK_0, "KB", len(pack(own)) / 1e3)
        gather = cpu_ms(lambda: gather_results(own, plan, comm))
        yield Figure("unpacking the results", RANK_0, "ms", gather)
        environment = describe_environment(gather_facts())
        peak, (gathered, result) = peak_mb(lambda: whole(own, plan, comm, environment, folder))
        yield Figure("memory of all that follows", RANK_0, "MB", peak)
    work = cpu_ms(lambda: assemble(plan, environment, gathered))
    yield Figure("putting the result together", RANK_0, "ms", work)
    shapes = [record for rank in gathered for record in rank.shapes]
    table = shapes_table(shapes)
    spent = cpu_ms(lambda: shapes_table(shapes))
    yield Figure("the table of shapes for TensorBoard", RANK_0, "KB", len(table) / 1e3)
    yield Figure("making it", RANK_0, "ms", spent)
    for name, write in writers(gathered, result, folder).items():
        yield Figure(f"writing {name}", RANK_0, "ms", cpu_ms(write))
        yield Figure(name, RANK_0, "KB", (folder / name).stat().st_size / 1e3)


def brought(plan: RunPlan, ranks: int, own: RankResult) -> list[bytes]:
    """What the other ranks send to rank 0."""
    assert own.comm is not None
    drawn = drawn_ranks(ranks, ranks - 1) if plan.by_host else set(range(ranks))
    told = replace(own, model={}, comm={**own.comm, "stragglers": None})
    short = replace(told, comm={**told.comm, "timeline": []})  # type: ignore[dict-item]
    pairs = zip(results_of(told, ranks), results_of(short, ranks), strict=True)
    return [pack(long if long.rank in drawn else brief) for long, brief in pairs]


def whole(
    own: RankResult, plan: RunPlan, comm: CountingComm, environment: dict[str, Any], folder: Path
) -> tuple[list[RankResult], RunResult]:
    """All of it, as worker.py does it."""
    gathered = gather_results(own, plan, comm)
    assert gathered is not None
    result = assemble(plan, environment, gathered)
    for write in writers(gathered, result, folder).values():
        write()
    return gathered, result


def figures_of(ranks: int) -> list[Figure]:
    """Everything at one number of ranks, without reports."""
    with tempfile.TemporaryDirectory() as name:
        return [
            *before_the_steps(ranks),
            *a_flush(ranks, 1),
            *a_flush(ranks, 0),
            *the_end(ranks, Path(name)),
        ]


def settings(found: list[Growth]) -> dict[str, object]:
    """What the page's text says: of the steps that were made up, and what else would be sent."""
    ranks, hosts = SIZES[-1], SIZES[-1] // RANKS_PER_HOST
    everybody_mb = STEPS * (BUCKETS + 1 + len(LEGS)) * 8 * ranks / 1e6
    named = {(each.name, each.whose): each.values[-1] for each in found}
    return {
        "steps": STEPS,
        "buckets": BUCKETS,
        "layers": LAYERS,
        "per_host": RANKS_PER_HOST,
        "turns": TURNS,
        "everybody_mb": everybody_mb,
        "everybody_gb": everybody_mb * ranks / 1e3,
        "padded_mb": named[OWN_RESULT, RANK_0] * ranks / 1e3,
        "hosts": hosts,
        "asked_hosts": CLOCK_ROUNDS * (hosts - 1),
        "asked_ranks": CLOCK_ROUNDS * (ranks - 1),
        "columns_mb": len(f"{ROWS_PER_DEVICE},") * ranks**2 / 1e6,
        "calls": int(named["collectives of a flush", A_RANK]),
    }


def main() -> None:
    """Print what was found, and write the page if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="make docs/scale.md")
    asked = parser.parse_args()
    psutil.cpu_percent()
    time.sleep(1)
    load = psutil.cpu_percent() / 100
    tools = ("accelerate", "lightning")  # which the page of benchmarks.overhead is about
    facts = {name: value for name, value in describe(load).items() if name not in tools}
    both = zip(SIZES, the_report(SIZES), strict=True)
    found = growths(SIZES, [[*figures_of(ranks), *reported] for ranks, reported in both])
    text = page(facts, found, settings(found))
    print(text)
    if asked.write:
        write_whole(PAGE, text)


if __name__ == "__main__":
    main()
