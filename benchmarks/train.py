"""Training on one device: an MLP at most 1.03 times the hand-written loop, Linear 5 to 2 at most
40 us a step above it, everything recorded."""

from __future__ import annotations

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

SCRIPT = ROOT / "benchmarks" / "references" / "train.py"


def compare(
    model: list[str], count: int, widths: list[int], rows: int, batch: int, steps: int
) -> tuple[list[float], list[float]]:
    """Microseconds per step of dpexp and of the hand-written loop."""
    overrides = (
        "task=train", *model, "epochs=null",
        f"steps={steps + 10}", "warmup_steps=10", f"batch_size={batch}", f"dataset.rows={rows}",
        f"dataset.features={widths[0]}", f"dataset.targets={widths[-1]}", "drop_last=true",
    )  # fmt: skip
    arguments = (str(rows), ",".join(map(str, widths)), str(batch), str(steps))
    return alternate(
        count,
        lambda: seconds_per_step(run_dpexp(*overrides)) * 1e6,
        lambda: run_script(SCRIPT, *arguments) * 1e6,
    )


def main() -> None:
    """Print the table."""
    count = rounds(7)
    mlp = compare(
        ["model=mlp", "model.widths=[512,1024,1024,10]"],
        count,
        [512, 1024, 1024, 10],
        4096,
        128,
        300,
    )
    linear = compare(["model=linear"], count, [5, 2], 100, 30, 20000)
    show(
        [
            Pair("train MLP 512-1024-1024-10, batch 128", "us/step", *mlp, 1.03),
            Pair("train Linear 5-2, batch 30", "us/step", *linear, 40.0, difference=True),
        ]
    )


if __name__ == "__main__":
    main()
