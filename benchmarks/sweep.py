"""A cell costs at most 0.4 s beyond its steps once the first has run (2 ranks); a sweep of 7 tiny
cells ends in at most 8 s on 2 cores."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import Pair, rounds, show


def timed_sweep(*overrides: str) -> tuple[float, list[float]]:
    """Seconds of a whole sweep, and of its steps by cell."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "dpexp", "-m", *overrides, f"hydra.sweep.dir={folder}"],
            cwd=folder, capture_output=True, check=True,
        )  # fmt: skip
        spent = time.perf_counter() - began
        runs = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*/run.json"))]
    steps = [max(r["wall_s"] for r in run["ranks"]) for run in runs if run["status"] == "ok"]
    return spent, steps


def cell_cost() -> float:
    """Seconds that each of 6 further ddp cells of 2 ranks adds, without its steps."""
    base = ("parallel=ddp", "num_devices=2")
    one, one_steps = timed_sweep(*base, "seed=0")
    seven, seven_steps = timed_sweep(*base, "seed=0,1,2,3,4,5,6")
    return ((seven - sum(seven_steps)) - (one - sum(one_steps))) / 6


def seven_cells() -> float:
    """Seconds of the sweep of 7 tiny cells (2 more are skipped)."""
    return timed_sweep("parallel=none,dp,ddp", "num_devices=1,2,4")[0]


def main() -> None:
    """Print the table."""
    count = rounds(5)
    show(
        [
            Pair(
                "a further cell (ddp, 2 ranks)", "s", [cell_cost() for _ in range(count)], [0.4], 1
            ),
            Pair("sweep of 7 tiny cells", "s", [seven_cells() for _ in range(count)], [8.0], 1),
        ]
    )


if __name__ == "__main__":
    main()
