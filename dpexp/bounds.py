"""The least and the most that a number in the config may be. Pure; no torch."""

from __future__ import annotations

from dpexp.errors import ConfigError
from dpexp.schema import Config

# Else what a 64-bit number holds, with room to multiply.
MOST = {
    "loader.workers": 1024,
    "loader.prefetch": 1024,
    "batch_size": 2**40,
    "repeats": 1000,
    "parallel.max_restarts": 1000,
    "measure.calibration_pairs": 1000,
}
MOST_OTHERS = 2**62


def check_bounds(config: Config) -> None:
    """Refuse numbers that are out of their range.

    Raises:
        ConfigError: names the key, the value and what is allowed.
    """
    size = config.batch_size
    # bool is an int in Python; batch_size=true is a mistake all the same.
    if size != "auto" and type(size) is not int:
        raise ConfigError(
            "batch_size",
            size,
            "is not a number of rows",
            allowed="auto, or a whole number of at least 1",
            fix="batch_size=32",
        )
    least_of: dict[str, tuple[int | None, int | None]] = {
        "batch_size": (None if isinstance(size, str) else size, 1),
        "epochs": (config.epochs, 1),
        "steps": (config.steps, None),  # check.py has more to say of too few
        "warmup_steps": (config.warmup_steps, 0),
        "accumulate": (config.accumulate, 1),
        "loader.workers": (config.loader.workers, 0),
        "loader.prefetch": (config.loader.prefetch, 1),
        "shapes.depth": (config.shapes.depth, 0),
        "checkpoint.every_steps": (config.checkpoint.every_steps, 1),
        "checkpoint.keep": (config.checkpoint.keep, 1),
        "parallel.max_restarts": (config.parallel.max_restarts, 0),
        "repeats": (config.repeats, 1),
        "repeat": (config.repeat, 0),
        "check.steps": (config.check.steps, 1),
        "measure.calibration_pairs": (config.measure.calibration_pairs, 0),
        "inject.at_step": (config.inject.at_step, 0),
        "seed": (config.seed, 0),
        "parallel.powersgd_rank": (config.parallel.powersgd_rank, 1),
        # torch's own limit: the first step shows DDP the order of the gradients
        "parallel.powersgd_start": (config.parallel.powersgd_start, 2),
    }
    for key, (value, least) in least_of.items():
        most = MOST.get(key, MOST_OTHERS)
        if value is not None and least is not None and value < least:
            raise ConfigError(
                key, value, "is too small", allowed=f"{least} or more", fix=f"{key}={max(least, 1)}"
            )
        if value is not None and value > most:
            raise ConfigError(key, value, "is too large", allowed=f"at most {most}")
    _check_above_zero(config)


def _check_above_zero(config: Config) -> None:
    above_zero = {
        "clip_grad_norm": (config.clip_grad_norm, "1"),
        "loader.timeout_s": (config.loader.timeout_s, "300"),
        "process_memory_mib": (config.process_memory_mib, "2000"),
        "watchdog_s": (config.watchdog_s, "1800"),
        "checkpoint.every_s": (config.checkpoint.every_s, "60"),
        "until.ci": (config.until.ci, "0.02"),
        "until.max_s": (config.until.max_s, "60"),
        "measure.peak_flops_per_device": (config.measure.peak_flops_per_device, "1e12"),
    }
    for key, (number, usual) in above_zero.items():
        if number is not None and not 0 < number < float("inf"):
            raise ConfigError(key, number, "must be more than 0", fix=f"{key}={usual}")
