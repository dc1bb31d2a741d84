"""What recording and checking cost a step: dpexp with everything on against everything off, and the
same loop by hand, in Accelerate, in Lightning Fabric and in Lightning's Trainer.

``--write`` makes ``docs/overhead.md`` of what was measured; without it the page is only printed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from benchmarks.common import ROOT, Pair, run_dpexp, run_script, seconds_per_step, take_turns
from benchmarks.overhead_page import Comparison, Cost, Loop, page
from benchmarks.paired import Order, launch
from benchmarks.turns import Paired
from dpexp.device import describe_environment, gather_facts
from dpexp.files import write_whole

PAGE = ROOT / "docs" / "overhead.md"
REFERENCES = ROOT / "benchmarks" / "references"
WARMUP = 10  # as in the references
ON = (
    "measure.comm=true", "measure.calibration_pairs=8", "measure.flops=true", "check.parity=true",
)  # fmt: skip
OFF = (
    "measure.comm=false", "measure.calibration_pairs=0", "measure.flops=false",
    "check.parity=false",
)  # fmt: skip
LOOPS = (
    Loop("by hand", "by hand", "train.py"),
    Loop("dpexp, everything on", "by hand"),
    Loop("by hand, DataLoader", "by hand, DataLoader", "loader_loop.py"),
    Loop("Accelerate", "by hand, DataLoader", "accelerate_loop.py", "accelerate"),
    Loop("Lightning Fabric", "by hand, DataLoader", "fabric_loop.py", "lightning"),
    Loop("Lightning Trainer", "by hand, DataLoader", "trainer_loop.py", "lightning"),
)


@dataclass(frozen=True)
class Job:
    """A model and its data. `rows` are a whole number of batches, or the last rows are dropped."""

    name: str
    widths: tuple[int, ...]
    batch: int
    rows: int
    steps: int

    def training(self) -> tuple[str, ...]:
        """For dpexp, without the number of steps."""
        model = "linear" if len(self.widths) == 2 else "mlp"
        widths = () if model == "linear" else (f"model.widths={list(self.widths)}",)
        return (
            "task=train", f"model={model}", *widths, f"batch_size={self.batch}",
            f"dataset.rows={self.rows}", f"dataset.features={self.widths[0]}",
            f"dataset.targets={self.widths[-1]}", "drop_last=true",
        )  # fmt: skip

    def overrides(self) -> tuple[str, ...]:
        """For dpexp."""
        steps = ("epochs=null", f"steps={self.steps + WARMUP}", f"warmup_steps={WARMUP}")
        return (*self.training(), *steps)

    def arguments(self) -> tuple[str, ...]:
        """For the scripts in `references/`."""
        return str(self.rows), ",".join(map(str, self.widths)), str(self.batch), str(self.steps)


@dataclass(frozen=True)
class Switch:
    """One comparison of on and off: the limit is a ratio, or microseconds (`difference`).

    The job's steps are those of a whole command. `stretches`: of each side in a turn; as many as
    take some seconds, in which a run writes its records several times. `turns`: of a launch; more
    where the machine is noisier.
    """

    job: Job
    ranks: int
    stretches: int
    turns: int
    limit: float
    difference: bool = False


NAME_MLP, MLP = "MLP 512-1024-1024-10, batch 128", (512, 1024, 1024, 10)
NAME_LINEAR, LINEAR = "Linear 5-2, batch 30", (5, 2)
STRATEGY = {1: ("parallel=none",), 2: ("parallel=ddp", "num_devices=2")}
SWITCHES = (
    Switch(Job(f"{NAME_MLP}, none", MLP, 128, 4096, 20), 1, 40, 3, 1.02),
    Switch(Job(f"{NAME_MLP}, ddp on 2 ranks", MLP, 128, 4096, 20), 2, 25, 12, 1.02),
    Switch(Job(f"{NAME_LINEAR}, none", LINEAR, 30, 100, 100), 1, 1500, 3, 40.0, difference=True),
    Switch(
        Job(f"{NAME_LINEAR}, ddp on 2 ranks", LINEAR, 30, 100, 100),
        2,
        100,
        6,
        40.0,
        difference=True,
    ),
)
# Longer epochs than above, so that what the tools do at the end of an epoch does not count as a
# step's.
COMPARED = (
    Job(NAME_MLP, MLP, 128, 12_800, 200),
    Job(NAME_LINEAR, LINEAR, 30, 30_000, 5000),
)


def switched(launches: int, count: int, switch: Switch) -> Cost:
    """Measure one pair of on and off.

    Args:
        count: whole commands of each side.
    """
    name, strategy = switch.job.name, STRATEGY[switch.ranks]
    _tell(f"{name}: on and off")
    given = (*switch.job.training(), *strategy)
    order = Order((*given, *ON), (*given, *OFF), switch.stretches, switch.turns)
    step_s = [launch(order, switch.ranks) for _ in range(launches)]
    given = (*switch.job.overrides(), *strategy)
    sides = {"on": partial(once, *given, *ON), "off": partial(once, *given, *OFF)}
    found = take_turns(count, sides)
    return Cost(
        Paired(name, step_s, switch.limit, switch.difference),
        Pair(name, "s", found["on"], found["off"], float("inf"), difference=True),
    )


def once(*overrides: str) -> float:
    """Seconds of a command beside its measured steps."""
    began_s = time.perf_counter()
    result = run_dpexp(*overrides)
    whole_s = time.perf_counter() - began_s
    return whole_s - seconds_per_step(result) * int(result["steps"]["measured"])


def compared(count: int, job: Job, loops: tuple[Loop, ...] = LOOPS) -> Comparison:
    """Measure the loops that are installed."""
    there = [loop for loop in loops if loop.package is None or is_installed(loop.package)]
    _tell(f"{job.name}: {', '.join(loop.name for loop in there)}")
    figures = take_turns(count, {loop.name: _measure(job, loop) for loop in there})
    return Comparison(job.name, job.rows // job.batch, loops, figures)


def _measure(job: Job, loop: Loop) -> Callable[[], float]:
    if loop.script is None:
        overrides = (*job.overrides(), *STRATEGY[1], *ON)
        return lambda: seconds_per_step(run_dpexp(*overrides)) * 1e6
    script = REFERENCES / loop.script
    return lambda: run_script(script, *job.arguments()) * 1e6


def _tell(what: str) -> None:
    """Minutes pass: say on the error output, apart from the page, what is being measured."""
    print(f"measuring {what}", file=sys.stderr, flush=True)


def is_installed(package: str) -> bool:
    """Whether a script would find it."""
    return importlib.util.find_spec(package) is not None


def describe(load: float) -> dict[str, str]:
    """The facts of the page: when, on what, with which versions.

    Args:
        load: share of all cores that was busy just before.
    """
    facts = gather_facts()
    known = describe_environment(facts)
    threads = known["variables"]["OMP_NUM_THREADS"]
    tools = {
        name: importlib.metadata.version(name) if is_installed(name) else "not installed"
        for name in ("accelerate", "lightning")
    }
    return {
        "date": datetime.date.today().isoformat(),
        "processor": f"{_processor()}, {facts.cores} cores",
        "threads": f"OMP_NUM_THREADS={threads}" if threads else "OMP_NUM_THREADS not set",
        "busy before the first run": f"{load:.0%} of {os.cpu_count()} cores",
        "system": f"{platform.system()} {platform.machine()}",
        "python": str(known["python"]),
        "dpexp": str(known["dpexp"]),
        "torch": str(known["torch"]),
        **tools,
    }


def _processor() -> str:
    """Its name where the system tells it, else its kind."""
    table = Path("/proc/cpuinfo")
    lines = table.read_text("utf-8").splitlines() if table.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def main() -> None:
    """Measure, print the page, and write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="whole commands of each side")
    parser.add_argument("--launches", type=int, default=4, help="of processes that do both sides")
    parser.add_argument("--write", action="store_true", help="make docs/overhead.md")
    asked = parser.parse_args()
    if asked.rounds < 1 or asked.launches < 1:
        parser.error("--rounds, --launches: 1 at least")
    facts = describe(psutil.cpu_percent(interval=2) / 100)
    costs = [switched(asked.launches, asked.rounds, switch) for switch in SWITCHES]
    text = page(facts, asked.rounds, costs, [compared(asked.rounds, job) for job in COMPARED])
    print(text)
    if asked.write:
        write_whole(PAGE, text)


if __name__ == "__main__":
    main()
