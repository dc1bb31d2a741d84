"""What saving the state every second costs the MLP: at most 2 % of a step.

Both sides are dpexp, with checkpoint.every_s=1 and without. A step's own time has only what the
thread that writes takes from it; the second row adds what lies between the steps, which are the
copies off the model and the writing of records. The third is the whole command, which waits for the
last save. Two commands differ by more than what is looked for, so the last row stays within each
run that saves: what the steps after a save take above the mean of the others, shared out over all.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import Pair, rounds, run_checked, seconds_per_step, show, take_turns

STEPS, WARMUP = 1000, 10
SAVING = ("checkpoint.every_s=1", f"checkpoint.keep={STEPS}")
AFTER = 5  # steps that writing may slow down: it takes about one
LIMIT, WALL_LIMIT = 1.02, 1.1
TRAINED = (
    "task=train", "model=mlp", "model.widths=[512,1024,1024,10]", "batch_size=128",
    "dataset.rows=4096", "dataset.features=512", "dataset.targets=10", "drop_last=true",
    "epochs=null", f"steps={STEPS + WARMUP}", f"warmup_steps={WARMUP}",
)  # fmt: skip


@dataclass(frozen=True)
class Figures:
    """Of one run: microseconds of a step, the same with what lies between steps, seconds of all."""

    step_us: float
    with_gaps_us: float
    wall_s: float
    saved: int
    undisturbed_us: float  # a step that does not follow a save
    shared_us: float  # the same with what those that do took more, shared out over all


def measure(*more: str) -> Figures:
    """One run of the MLP."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        command = [sys.executable, "-m", "dpexp", *TRAINED, *more, f"hydra.run.dir={folder}"]
        began_s = time.perf_counter()
        run_checked(command, Path(name))
        wall_s = time.perf_counter() - began_s
        result: dict[str, Any] = json.loads((folder / "run.json").read_text())
        with (folder / "steps.rank0.csv").open(newline="") as file:
            steps_us = [float(row["step_s"]) * 1e6 for row in csv.DictReader(file)]
        # step-<k> is the state after k steps, so the next one is step k, counted from 0.
        next_steps = [int(path.name[5:]) for path in folder.glob("checkpoints/step-*")]
    saved = result["checkpoint"] or {"copy_s": 0.0, "count": 0}
    measured = result["steps"]["measured"]
    step_us = result["throughput"]["wall_s"] / measured * 1e6
    gaps_us = (seconds_per_step(result) + saved["copy_s"] / measured) * 1e6
    usual_us, shared_us = shared_out(steps_us, next_steps)
    return Figures(step_us, gaps_us, wall_s, saved["count"], usual_us, shared_us)


def shared_out(steps_us: list[float], next_steps: list[int]) -> tuple[float, float]:
    """What a step takes that follows no save, and on average if all others were as long.

    Args:
        next_steps: the first step after each save.
    """
    slowed = {first + more for first in next_steps for more in range(AFTER)}
    slowed &= set(range(len(steps_us)))
    usual = [us for step, us in enumerate(steps_us) if step not in slowed and step >= WARMUP]
    usual_us = statistics.fmean(usual)
    extra_us = sum(steps_us[step] - usual_us for step in slowed)
    return usual_us, usual_us + extra_us / len(steps_us)


def main() -> None:
    """Print the table."""
    found = take_turns(
        rounds(7),
        {
            "saving": lambda: measure("checkpoint.every_s=1", f"checkpoint.keep={STEPS}"),
            "not": measure,
        },
    )
    saving, plain = found["saving"], found["not"]
    show(
        [
            Pair(
                "a step", "us",
                [each.step_us for each in saving], [each.step_us for each in plain], LIMIT,
            ),
            Pair(
                "a step and what lies between", "us",
                [each.with_gaps_us for each in saving], [each.with_gaps_us for each in plain],
                LIMIT,
            ),
            Pair(
                "the whole command", "s",
                [each.wall_s for each in saving], [each.wall_s for each in plain], WALL_LIMIT,
            ),
            Pair(
                "a step, within each run", "us",
                [each.shared_us for each in saving],
                [each.undisturbed_us for each in saving], LIMIT,
            ),
        ]
    )  # fmt: skip
    print(f"checkpoints of each run: {', '.join(str(each.saved) for each in saving)}")


if __name__ == "__main__":
    main()
