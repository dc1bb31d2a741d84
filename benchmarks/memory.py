"""Resident memory of a rank at most 40 MB above a bare script with the same imports."""

from __future__ import annotations

from benchmarks.common import ROOT, Pair, alternate, rounds, run_dpexp, run_script, show

LIMIT_MIB = 40e6 / 2**20
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def peak_mib(*overrides: str) -> float:
    """Largest peak of a run's ranks."""
    result = run_dpexp("task=train", "epochs=250", *overrides)
    return float(max(result["memory"]["peak_bytes"]) / 2**20)


def main() -> None:
    """Print the table."""
    script, count = ROOT / "benchmarks" / "references" / "bare.py", rounds(3)
    one = alternate(count, peak_mib, lambda: run_script(script, "none"))
    two = alternate(
        count,
        lambda: peak_mib("parallel=ddp", "num_devices=2"),
        lambda: run_script(script, "ddp", launcher=TORCHRUN),
    )
    show(
        [
            Pair("peak of a rank, none", "MiB", *one, LIMIT_MIB, difference=True),
            Pair("peak of a rank, ddp on 2", "MiB", *two, LIMIT_MIB, difference=True),
        ]
    )


if __name__ == "__main__":
    main()
