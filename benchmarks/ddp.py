"""ddp on 2 ranks at most 1.03 times the same loop written by hand and started by torchrun."""

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

WIDTHS, ROWS, BATCH, STEPS = [512, 1024, 1024, 10], 4096, 128, 200
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def main() -> None:
    """Print the table."""
    script = ROOT / "benchmarks" / "references" / "ddp.py"
    widths = ",".join(map(str, WIDTHS))
    overrides = (
        "parallel=ddp", "num_devices=2", "task=train", "model=mlp", f"model.widths=[{widths}]",
        "epochs=null", f"steps={STEPS + 10}", "warmup_steps=10", f"batch_size={BATCH}",
        f"dataset.rows={ROWS}", f"dataset.features={WIDTHS[0]}", f"dataset.targets={WIDTHS[-1]}",
        "drop_last=true",
    )  # fmt: skip
    ours, reference = alternate(
        rounds(7),
        lambda: seconds_per_step(run_dpexp(*overrides)) * 1e3,
        lambda: (
            run_script(script, str(ROWS), widths, str(BATCH), str(STEPS), launcher=TORCHRUN) * 1e3
        ),
    )
    show([Pair("train MLP, ddp on 2 ranks", "ms/step", ours, reference, 1.03)])


if __name__ == "__main__":
    main()
