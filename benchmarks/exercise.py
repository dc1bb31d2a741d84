"""The exercise, forward on one device, recording on: at most half the plain script's step."""

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

EPOCHS = 5000


def main() -> None:
    """Print the table."""
    script = ROOT / "benchmarks" / "references" / "exercise.py"
    ours, reference = alternate(
        rounds(7),
        lambda: seconds_per_step(run_dpexp(f"epochs={EPOCHS}", "dataset.targets=0")) * 1e6,
        lambda: run_script(script, str(EPOCHS)) * 1e6,
    )
    show([Pair("exercise, forward", "us/step", ours, reference, 0.5)])


if __name__ == "__main__":
    main()
