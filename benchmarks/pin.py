"""Two runs at once, of one thread each: with cores of their own (``pin=true``) against without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common import Pair, rounds, show, take_turns

STEPS = 150
RUN = (
    "task=train", "model=mlp", "model.widths=[5,512,512,2]", "batch_size=256", "dataset.rows=2560",
    "epochs=null", f"steps={STEPS}", "warmup_steps=20", "measure.comm=false",
)  # fmt: skip


def step_ms(count: int, *overrides: str) -> list[float]:
    """Median and 95th percentile of a step, of the slowest of `count` runs at once."""
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / str(number) for number in range(count)]
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "dpexp", *RUN, *overrides, f"hydra.run.dir={folder}"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for folder in folders
        ]
        if any(process.wait() for process in started):
            raise SystemExit("a run failed")
        steps = [json.loads((each / "run.json").read_text())["timing"]["step"] for each in folders]
    return [max(step[key] for step in steps) * 1e3 for key in ("p50_s", "p95_s")]


def main() -> None:
    """Print the table."""
    sides = {
        "alone": lambda: step_ms(1),
        "free": lambda: step_ms(2),
        "pinned": lambda: step_ms(2, "pin=true"),
    }
    measured = take_turns(rounds(6), sides)
    pairs = []
    for place, name in enumerate(("median", "95th percentile")):
        one, two, own = ([each[place] for each in measured[side]] for side in sides)
        pairs.append(Pair(f"two pinned against two that are not, {name}", "ms", own, two, 1.0))
        pairs.append(Pair(f"two pinned against one alone, {name}", "ms", own, one, 1.1))
    show(pairs)


if __name__ == "__main__":
    main()
