"""What saving the state every second costs the MLP: at most 2 % of a step.

Both sides are dpexp, with checkpoint.every_s=1 and without. A step's own time has only what the
thread that writes takes from it; the second row adds what lies between the steps, which are the
copies off the model and the writing of records. The last row is the whole command, which waits for
the last save.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from benchmarks.common import Pair, rounds, run_dpexp, seconds_per_step, show, take_turns

STEPS = 1000
LIMIT, WALL_LIMIT = 1.02, 1.1
TRAINED = (
    "task=train", "model=mlp", "model.widths=[512,1024,1024,10]", "batch_size=128",
    "dataset.rows=4096", "dataset.features=512", "dataset.targets=10", "drop_last=true",
    "epochs=null", f"steps={STEPS + 10}", "warmup_steps=10",
)  # fmt: skip


@dataclass(frozen=True)
class Figures:
    """Of one run: microseconds of a step, the same with what lies between steps, seconds of all."""

    step_us: float
    with_gaps_us: float
    wall_s: float
    saved: int


def measure(*more: str) -> Figures:
    """One run of the MLP."""
    began_s = time.perf_counter()
    result: dict[str, Any] = run_dpexp(*TRAINED, *more)
    wall_s = time.perf_counter() - began_s
    saved = result["checkpoint"] or {"copy_s": 0.0, "count": 0}
    measured = result["steps"]["measured"]
    step_us = result["throughput"]["wall_s"] / measured * 1e6
    gaps_us = (seconds_per_step(result) + saved["copy_s"] / measured) * 1e6
    return Figures(step_us, gaps_us, wall_s, saved["count"])


def main() -> None:
    """Print the table."""
    found = take_turns(
        rounds(7),
        {"saving": lambda: measure("checkpoint.every_s=1"), "not": measure},
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
        ]
    )  # fmt: skip
    print(f"checkpoints of each run: {', '.join(str(each.saved) for each in saving)}")


if __name__ == "__main__":
    main()
