"""A small CNN on images against the same loop by hand, at most 1.03 times: the input pipeline (0, 1
and 2 loader processes, and the dataset on the device), torch.compile, accumulation."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from benchmarks.common import (
    ROOT,
    Pair,
    alternate,
    rounds,
    run_dpexp,
    run_script,
    seconds_per_step,
    show,
)

SCRIPT = ROOT / "benchmarks" / "references" / "images.py"
LIMIT = 1.03
ROWS, BATCH, STEPS, WARMUP = 4096, 128, 150, 15
TASK = (
    "task=train", "dataset=images", f"dataset.rows={ROWS}", "dataset.height=32", "dataset.width=32",
    "dataset.classes=10", "model=cnn", "model.in_channels=3", "model.channels=[4,8]",
    f"batch_size={BATCH}", "epochs=null", f"steps={STEPS + WARMUP}", f"warmup_steps={WARMUP}",
    "drop_last=true",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One way to run it: the same for dpexp and for the script."""

    name: str
    overrides: tuple[str, ...]
    arguments: tuple[str, ...]


CASES = (
    Case("no loader process", (), ()),
    Case("1 loader process", ("loader.workers=1",), ("--workers=1",)),
    Case("2 loader processes", ("loader.workers=2",), ("--workers=2",)),
    Case("dataset on the device", ("loader.preload=device",), ("--preload",)),
    Case("on the device, compiled", ("loader.preload=device", "prepare.compile=true"),
         ("--preload", "--compile")),
    Case("on the device, accumulate 4", ("loader.preload=device", "accumulate=4"),
         ("--preload", "--accumulate=4")),
)  # fmt: skip


def compare(case: Case, count: int) -> tuple[Pair, float]:
    """Milliseconds per step of both sides, and the share of dpexp's step that waits for data."""
    shares: list[float] = []

    def ours() -> float:
        result = run_dpexp(*TASK, *case.overrides)
        timing = result["timing"]
        shares.append(timing["data"]["mean_s"] / timing["step"]["mean_s"])
        return seconds_per_step(result) * 1e3

    sizes = (f"--rows={ROWS}", f"--batch={BATCH}", f"--steps={STEPS}", f"--warmup={WARMUP}")
    sides = alternate(count, ours, lambda: run_script(SCRIPT, *sizes, *case.arguments) * 1e3)
    return Pair(case.name, "ms/step", *sides, LIMIT), statistics.median(shares)


def main() -> None:
    """Print the table, then the shares."""
    count = rounds(5)
    outcomes = [compare(case, count) for case in CASES]
    show([pair for pair, _ in outcomes])
    for pair, share in outcomes:
        print(f"{pair.name}: {share:.1%} of dpexp's step waits for data")


if __name__ == "__main__":
    main()
