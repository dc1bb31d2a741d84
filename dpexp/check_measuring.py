"""What is wrong with the keys that measure and disturb. Pure; no torch."""

from __future__ import annotations

from dpexp.errors import ConfigError, SkippedCellError
from dpexp.schema import Config, Task

# The longest disturbance that is one: a week.
MOST_S = 7 * 24 * 3600.0


def check_measuring(config: Config) -> None:
    """Refuse what would disturb nothing, or measure nothing, whatever the machine.

    Raises:
        ConfigError: names the key, the value and the way out.
    """
    _check_amounts(config)
    _check_at_step(config)
    inject, measure = config.inject, config.measure
    in_steps = {
        "inject.collective_delay_s": inject.collective_delay_s,
        "measure.calibration_pairs": measure.calibration_pairs or 0,
    }
    for key, value in in_steps.items():
        if value and config.task is not Task.train:
            raise ConfigError(key, value, "is for training only", fix="task=train")
        if value and not measure.comm:
            raise ConfigError(
                key,
                value,
                "acts on collectives that are timed",
                fix=f"measure.comm=true, or {key}=0",
            )
    if inject.noisy_rank is not None and not inject.noise_s:
        raise ConfigError(
            "inject.noisy_rank",
            inject.noisy_rank,
            "pauses for inject.noise_s on average, which is 0",
            fix="inject.noise_s=0.01",
        )
    if inject.noise_s and inject.noisy_rank is None:
        raise ConfigError(
            "inject.noise_s", inject.noise_s, "no rank is noisy", fix="inject.noisy_rank=0"
        )
    if inject.data_rank is not None and not inject.data_delay_s:
        raise ConfigError(
            "inject.data_rank",
            inject.data_rank,
            "its batches take inject.data_delay_s longer, which is 0",
            fix="inject.data_delay_s=0.01",
        )


def check_ranks(
    config: Config, num_devices: int, num_processes: int, *, in_sweep: bool = False
) -> None:
    """Refuse to disturb a rank that is not there.

    Raises:
        ConfigError: names the key, the value and the ranks.
        SkippedCellError: the same in a sweep, where another cell may have the rank.
    """
    inject = config.inject
    limits: dict[str, tuple[int | None, int, str]] = {
        "inject.slow_rank": (inject.slow_rank, num_devices, "device"),
        "inject.noisy_rank": (inject.noisy_rank, num_devices, "device"),
        "inject.data_rank": (
            inject.data_rank if inject.data_delay_s else None,
            num_processes,
            "process",
        ),
        "inject.die_rank": (inject.die_rank, num_processes, "process"),
        "inject.hang_rank": (inject.hang_rank, num_processes, "process"),
    }
    for key, (rank, count, kind) in limits.items():
        if rank is None or 0 <= rank < count:
            continue
        many = {"device": "devices", "process": "processes"}[kind] if count > 1 else kind
        refusal = SkippedCellError if in_sweep else ConfigError
        raise refusal(
            key,
            rank,
            f"parallel={config.parallel.strategy.value} has {count} {many} here",
            allowed=f"0 to {count - 1}" if count > 1 else "0",
            fix=f"{key}={count - 1}",
        )


def _check_amounts(config: Config) -> None:
    inject = config.inject
    delays = {
        "inject.collective_delay_s": inject.collective_delay_s,
        "inject.data_delay_s": inject.data_delay_s,
        "inject.noise_s": inject.noise_s,
    }
    for key, delay_s in delays.items():
        if not 0 <= delay_s < MOST_S:
            raise ConfigError(
                key,
                delay_s,
                "is not a delay",
                allowed="0 seconds or more, less than a week",
                fix=f"{key}=0.01",
            )
    if not 1 <= inject.slow_factor < MOST_S:
        raise ConfigError(
            "inject.slow_factor",
            inject.slow_factor,
            "nothing can be made to compute faster",
            allowed="1 or more",
            fix="inject.slow_factor=1.2",
        )


def _check_at_step(config: Config) -> None:
    inject, steps = config.inject, config.steps
    ends = inject.die_rank is not None or inject.hang_rank is not None
    if ends and steps is not None and inject.at_step >= steps:
        raise ConfigError(
            "inject.at_step",
            inject.at_step,
            f"the run has {steps} steps, so nothing would happen",
            allowed=f"0 to {steps - 1}",
            fix=f"inject.at_step={steps - 1}",
        )
