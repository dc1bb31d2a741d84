"""The report of a sweep of cells with very many ranks, and the files that rank 0 of one writes."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.common import run_checked
from benchmarks.scale_page import PARENT, Figure
from benchmarks.scale_ranks import CountingComm, Rank, fake_group, plan_of, results_of
from dpexp.device import describe_environment, gather_facts
from dpexp.records import RankResult, RunResult
from dpexp.results import assemble
from dpexp.sinks import write_shapes, write_timeline

# Prints CPU seconds and peak KiB. ru_maxrss would begin with the memory of who starts the process.
REPORTING = """
import runpy, sys, time
sys.argv[:1] = ["report"]
try:
    runpy.run_module("dpexp.report", run_name="__main__")
except SystemExit as end:
    if end.code:
        raise
facts = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(time.process_time(), facts["VmHWM"].split()[0])
"""


def writers(
    gathered: list[RankResult], result: RunResult, folder: Path
) -> dict[str, Callable[[], None]]:
    """What writes each file."""
    shapes = [record for rank in gathered for record in rank.shapes]
    return {
        "run.json": lambda: result.write(folder / "run.json"),
        "timeline.json": lambda: write_timeline(folder / "timeline.json", gathered),
        "shapes.csv": lambda: write_shapes(folder / "shapes.csv", shapes),
    }


def the_report(sizes: tuple[int, ...]) -> Iterator[list[Figure]]:
    """The report of a sweep whose cells have 1, 2, 4, ... ranks, up to each of `sizes`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "multirun.yaml").write_text("{}\n")
        ranks, number = 1, 0
        for most in sizes:
            while ranks <= most:
                write_cell(folder / f"{number}_ddp_n{ranks}", ranks)
                ranks, number = 2 * ranks, number + 1
            yield list(report_of(folder))


def write_cell(folder: Path, ranks: int) -> None:
    """A cell of so many ranks, each of which does as much as one alone."""
    folder.mkdir()
    plan = plan_of(ranks)
    with fake_group(0, ranks):
        first = Rank(plan, CountingComm(0, ranks))
        first.make_steps()
        first.recorder.flush()
    own = first.result()
    gathered = [own, *results_of(own, ranks)]
    result = assemble(plan, describe_environment(gather_facts()), gathered)
    for write in writers(gathered, result, folder).values():
        write()


def report_of(folder: Path) -> Iterator[Figure]:
    """What the report of a sweep costs, in a process of its own."""
    printed = run_checked([sys.executable, "-c", REPORTING, str(folder)], folder)
    spent_s, peak_kib = map(float, printed.split()[-2:])
    yield Figure("the report, with its start", PARENT, "ms", 1000 * spent_s)
    yield Figure("memory of the report", PARENT, "MB", peak_kib * 1024 / 1e6)
    for name in ("report.html", "report.md", "summary.csv", "sweep.json"):
        yield Figure(name, PARENT, "KB", (folder / name).stat().st_size / 1e3)
