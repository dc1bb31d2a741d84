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
        pairs = CALIBRATION_PAIRS if usual and config.measure.comm else 0
    if config.parallel.strategy is StrategyName.fsdp and device_type != "cpu":
        pairs = 0  # its collectives are not timed there; a note says so
    flops = config.measure.flops
    return {
        "parity_steps": config.check.steps if parity else 0,
        "calibration_pairs": pairs if num_processes > 1 and training else 0,
        "counts_flops": usual if flops is None else flops,
    }


def untimed(config: Config, device_type: str) -> list[str]:
    """A note where collectives that should be timed are not."""
    wanted = config.task is Task.train and config.measure.comm
    if config.parallel.strategy is not StrategyName.fsdp or device_type == "cpu" or not wanted:
        return []
    return [
        "measure.comm: on a GPU the collectives of fsdp run on streams of their own and are not "
        "timed"
    ]
