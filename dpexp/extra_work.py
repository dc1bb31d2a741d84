"""What a run does beside its steps: checks and measurements that call the user's code too."""

from __future__ import annotations

from typing import Any

from dpexp.schema import Config, StrategyName, Task

CALIBRATION_PAIRS = 8


def extra_work(
    config: Config, device_type: str, num_processes: int, in_sweep: bool
) -> dict[str, Any]:
    """What calls the user's code more often than the steps do: by default in sweeps only."""
    training = config.task is Task.train
    usual = training and in_sweep
    parity = usual if config.check.parity is None else config.check.parity
    pairs = config.measure.calibration_pairs
    if pairs is None:
        # A step of fsdp without exchange keeps whole gradients. A model that is sharded because it
        # is large may not fit on a GPU then, and an extra must not end the run.
        whole = config.parallel.strategy is StrategyName.fsdp and device_type != "cpu"
        pairs = CALIBRATION_PAIRS if usual and config.measure.comm and not whole else 0
    flops = config.measure.flops
    return {
        "parity_steps": config.check.steps if parity else 0,
        "calibration_pairs": pairs if num_processes > 1 and training else 0,
        "counts_flops": usual if flops is None else flops,
    }
