"""What is wrong with a config whatever the hardware. Pure; no torch, so it is told at once."""

from __future__ import annotations

import re

from dpexp.errors import ConfigError, SkippedCellError
from dpexp.schema import Config, StrategyName

DEVICE_FORMS = "auto, cpu, cuda, cuda:<i>, mps, xpu (no spaces, lower case)"
_DEVICE = re.compile(r"auto|cpu|mps|xpu|cuda(:(0|[1-9][0-9]*))?")
MAX_DEVICES = 1024
DDP_OPTIONS = (
    "backend",
    "bucket_cap_mb",
    "find_unused_parameters",
    "static_graph",
    "gradient_as_bucket_view",
    "broadcast_buffers",
)


def check(config: Config, *, in_sweep: bool = False) -> None:
    """Refuse what is wrong whatever the hardware.

    Args:
        in_sweep: a cell of a sweep's grid; a combination without meaning is then skipped.

    Raises:
        ConfigError: see the message.
        SkippedCellError: (in a sweep) the cell means nothing: `none` on several devices.
    """
    _check_device_string(config.device)
    asked = config.num_devices
    # bool is an int in Python; num_devices=true is a mistake all the same.
    counts = type(asked) is int and 1 <= asked <= MAX_DEVICES
    if asked != "auto" and not counts:
        raise ConfigError(
            "num_devices",
            config.num_devices,
            "is not a number of devices",
            allowed=f"auto, or a whole number from 1 to {MAX_DEVICES}",
            fix="num_devices=2",
        )
    if config.parallel.strategy is StrategyName.none and asked not in ("auto", 1):
        kind = SkippedCellError if in_sweep else ConfigError
        fix = "num_devices=1, or parallel=dp"
        raise kind("num_devices", asked, "parallel=none uses one device", fix=fix)
    _check_minima(config)
    if config.steps is not None and config.steps < 1:
        raise ConfigError(
            "steps",
            config.steps,
            f"nothing would be left to do: {config.steps} steps",
            allowed="1 or more, or null for whole epochs",
            fix="steps=null",
        )
    if config.epochs is None and config.steps is None:
        raise ConfigError(
            "epochs",
            None,
            "epochs and steps are both null, so the run would never end",
            fix="epochs=1",
        )
    if not 0 < config.parallel.timeout_s < 7 * 24 * 3600:
        raise ConfigError(
            "parallel.timeout_s",
            config.parallel.timeout_s,
            "is not a time-out",
            allowed="more than 0 seconds, less than a week",
            fix="parallel.timeout_s=300",
        )
    _check_options(config)
    _check_loss(config)


def _check_minima(config: Config) -> None:
    minima = {
        "batch_size": (config.batch_size, 1),
        "epochs": (config.epochs, 1),
        "warmup_steps": (config.warmup_steps, 0),
        "loader.workers": (config.loader.workers, 0),
        "shapes.depth": (config.shapes.depth, 0),
        "seed": (config.seed, 0),
    }
    for key, (value, least) in minima.items():
        if value is not None and value < least:
            raise ConfigError(
                key, value, "is too small", allowed=f"{least} or more", fix=f"{key}={max(least, 1)}"
            )


def _check_device_string(device: object) -> None:
    if not isinstance(device, str) or not _DEVICE.fullmatch(device):
        close = str(device).replace(" ", "").lower()
        fix = f"device={close}" if _DEVICE.fullmatch(close) else "device=auto"
        raise ConfigError("device", device, "is not a device string", allowed=DEVICE_FORMS, fix=fix)


def _check_options(config: Config) -> None:
    options = config.parallel
    if options.strategy is StrategyName.ddp:
        missing = [name for name in DDP_OPTIONS if getattr(options, name) is None]
        if missing:
            raise ConfigError(
                f"parallel.{missing[0]}", None, "ddp needs a value", fix="parallel=ddp"
            )
        if options.bucket_cap_mb is not None and not options.bucket_cap_mb > 0:
            raise ConfigError(
                "parallel.bucket_cap_mb",
                options.bucket_cap_mb,
                "must be more than 0 MiB",
                fix="parallel.bucket_cap_mb=25",
            )
        return
    for name in DDP_OPTIONS:
        if getattr(options, name) is not None:
            raise ConfigError(
                f"parallel.{name}",
                getattr(options, name),
                f"is an option of ddp, not of {options.strategy.value}",
                fix="parallel=ddp",
            )


def _check_loss(config: Config) -> None:
    names = ("auto", "mse", "cross_entropy", "output")
    named = isinstance(config.loss, str) and config.loss in names
    node = isinstance(config.loss, dict) and isinstance(config.loss.get("_target_"), str)
    if not (named or node):
        raise ConfigError(
            "loss",
            config.loss,
            "is not a loss",
            allowed=", ".join(names) + ", or a node with a _target_",
            fix="'loss={_target_: torch.nn.L1Loss}'",
        )
