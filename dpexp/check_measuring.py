"""What is wrong with the keys that measure and disturb. Pure; no torch."""

from __future__ import annotations

from dpexp.errors import ConfigError
from dpexp.schema import Config, StrategyName, Task

# The longest disturbance that is one: a week.
MOST_S = 7 * 24 * 3600.0
USUAL_FACTOR = 1.2  # of conf/config.yaml


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
) -> tuple[str, ...]:
    """Refuse to disturb a rank that is not there, or collectives where there are none.

    In a sweep another cell may have them: this one then runs undisturbed, as the ones without that
    rank have to.

    Returns:
        A note for each disturbance that this cell does not have.

    Raises:
        ConfigError: names the key, the value and the ranks.
    """
    absent = _without_collectives(config, in_sweep)
    for key, (rank, count, kind) in _ranks(config, num_devices, num_processes).items():
        if rank is None or 0 <= rank < count:
            continue
        many = {"device": "devices", "process": "processes"}[kind] if count > 1 else kind
        has = f"parallel={config.parallel.strategy.value} has {count} {many} here"
        if not in_sweep or rank < 0:
            allowed = f"0 to {count - 1}" if count > 1 else "0"
            raise ConfigError(key, rank, has, allowed=allowed, fix=f"{key}={count - 1}")
        absent.append(f"{key}={rank}: {has}, so this cell is not disturbed by it")
    return tuple(absent)


def _without_collectives(config: Config, in_sweep: bool) -> list[str]:
    """In a sweep the note that this cell has no collective to delay; else that is refused."""
    key, delay_s = "inject.collective_delay_s", config.inject.collective_delay_s
    if not delay_s or config.parallel.strategy is not StrategyName.none:
        return []
    if not in_sweep:
        raise ConfigError(
            key,
            delay_s,
            "parallel=none has no collectives, so nothing would be delayed",
            fix="parallel=ddp, or inject.data_delay_s for slow data",
        )
    return [f"{key}={delay_s:g}: parallel=none has no collectives, so this cell is not delayed"]


def check_sleeps(config: Config, device_type: str) -> None:
    """Refuse what a sleeping host would not do to a device that goes on by itself.

    Raises:
        ConfigError: names the key, the value and the way out.
    """
    inject = config.inject
    sleeping = {
        "inject.collective_delay_s": inject.collective_delay_s or None,
        "inject.slow_rank": inject.slow_rank,
        "inject.noisy_rank": inject.noisy_rank,
    }
    for key, value in sleeping.items():
        if value is not None and device_type != "cpu":
            raise ConfigError(
                key,
                value,
                f"lets the host sleep, which does not hold up a {device_type} device",
                fix="device=cpu",
            )


def injected(config: Config, num_devices: int, num_processes: int) -> list[str]:
    """What ``inject.*`` disturbs in a run, in words; [] = nothing."""
    inject, told = config.inject, []
    there = {
        key: rank
        for key, (rank, count, _) in _ranks(config, num_devices, num_processes).items()
        if rank is not None and rank < count
    }
    if inject.collective_delay_s and config.parallel.strategy is not StrategyName.none:
        told.append(f"each collective takes {inject.collective_delay_s:g} s longer")
    if inject.data_delay_s and (inject.data_rank is None or "inject.data_rank" in there):
        where = "" if inject.data_rank is None else f" on rank {inject.data_rank}"
        told.append(f"each batch takes {inject.data_delay_s:g} s longer to fetch{where}")
    saved = config.checkpoint.every_s or config.checkpoint.every_steps
    step = f"step {inject.at_step}"
    if saved or config.parallel.max_restarts:
        step += ", in the first attempt only"
    words = {
        "inject.slow_rank": f"computes about {inject.slow_factor:g} times as long",
        "inject.noisy_rank": f"pauses for {inject.noise_s:g} s a step on average",
        "inject.die_rank": f"kills itself at {step}",
        "inject.hang_rank": f"hangs at {step}; the others give up after "
        f"parallel.timeout_s={config.parallel.timeout_s:g}",
    }
    return [*told, *(f"rank {there[key]} {text}" for key, text in words.items() if key in there)]


def not_reached(config: Config, steps: int) -> tuple[str, ...]:
    """A note for each rank that was to end at a step which a run of `steps` steps did not have."""
    inject = config.inject
    ends = {"inject.die_rank": inject.die_rank, "inject.hang_rank": inject.hang_rank}
    return tuple(
        f"{key}={rank}: the run ended after {steps} steps, before inject.at_step={inject.at_step}; "
        "nothing happened"
        for key, rank in ends.items()
        if rank is not None and inject.at_step >= steps
    )


def _ranks(
    config: Config, num_devices: int, num_processes: int
) -> dict[str, tuple[int | None, int, str]]:
    """By key the rank that is disturbed, how many there are, and of what kind."""
    inject = config.inject
    delayed = inject.data_rank if inject.data_delay_s else None
    return {
        "inject.slow_rank": (inject.slow_rank, num_devices, "device"),
        "inject.noisy_rank": (inject.noisy_rank, num_devices, "device"),
        "inject.data_rank": (delayed, num_processes, "process"),
        "inject.die_rank": (inject.die_rank, num_processes, "process"),
        "inject.hang_rank": (inject.hang_rank, num_processes, "process"),
    }


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
    if inject.slow_rank is None and inject.slow_factor != USUAL_FACTOR:
        raise ConfigError(
            "inject.slow_factor", inject.slow_factor, "no rank is slow", fix="inject.slow_rank=0"
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
