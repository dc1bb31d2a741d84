"""The report of 1,000 finished cells in under 5 s and 500 MB, growing linearly to 10,000.

The cells are derived from one real run (see cells.py); each report is made by a fresh
``python -m dpexp.report``, so its start counts.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.cells import write_sweep
from benchmarks.common import ROOT, Pair, rounds, run_dpexp, show

SIZES = (1_000, 10_000)
LIMIT_S = 5.0
LIMIT_MB = 500.0
# Of the time over the number of cells; what a start costs makes it smaller than that of the work.
LIMIT_EXPONENT = 1.1


def report(folder: Path) -> tuple[float, float]:
    """Seconds and peak resident megabytes of one report."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "dpexp.report", str(folder)]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as child:
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    spent = time.perf_counter() - began
    if child.returncode != 0:
        raise RuntimeError(f"{command} ended with {child.returncode}")
    return spent, usage.ru_maxrss * 1024 / 1e6


def main() -> None:
    """Print the table."""
    count = rounds(3)
    real = run_dpexp("parallel=ddp", "num_devices=2", "task=train", "epochs=10", "check.steps=3")
    pairs, medians = [], []
    for size in SIZES:
        with tempfile.TemporaryDirectory() as name:
            write_sweep(Path(name), real, size)
            seconds, megabytes = zip(*(report(Path(name)) for _ in range(count)), strict=True)
        medians.append(statistics.median(seconds))
        scale = size / SIZES[0]
        pairs += [
            Pair(f"{size:,} cells", "s", list(seconds), [LIMIT_S * scale], 1),
            Pair(f"{size:,} cells, peak", "MB", list(megabytes), [LIMIT_MB * scale], 1),
        ]
    show(pairs)
    exponent = math.log(medians[1] / medians[0]) / math.log(SIZES[1] / SIZES[0])
    print(f"time grows as cells ** {exponent:.2f} (at most {LIMIT_EXPONENT})")


if __name__ == "__main__":
    main()
