"""What a config asks of the kind of device that it gets. Pure; no torch."""

from __future__ import annotations

from dpexp.errors import ConfigError
from dpexp.schema import Config, Precision, StrategyName


def check_precision(config: Config, device_type: str) -> None:
    """Refuse formats and memory that only CUDA devices have.

    Raises:
        ConfigError: the device here is another one.
    """
    if config.precision is Precision.tf32 and device_type != "cuda":
        raise ConfigError(
            "precision",
            "tf32",
            f"TensorFloat-32 is a format of CUDA devices; the device here is {device_type}",
            allowed="fp32, bf16, fp16",
            fix="precision=bf16",
        )
    if config.loader.pin_memory and device_type != "cuda":
        raise ConfigError(
            "loader.pin_memory",
            True,
            f"page-locked memory speeds up copies to CUDA devices; the device here is "
            f"{device_type}",
            fix="loader.pin_memory=null",
        )


def check_preparation(config: Config, device_type: str) -> None:
    """Refuse what cannot be done to a model on this device.

    Raises:
        ConfigError: `prepare.sync_batchnorm` where there are no CUDA devices of several processes.
    """
    strategy = config.parallel.strategy
    if not config.prepare.sync_batchnorm or strategy is StrategyName.none:
        return
    if strategy is StrategyName.dp:
        problem = "nn.SyncBatchNorm works between processes, and dp has only one"
    elif device_type != "cuda":
        problem = f"nn.SyncBatchNorm works on CUDA devices only; the device here is {device_type}"
    else:
        return
    raise ConfigError("prepare.sync_batchnorm", True, problem, fix="prepare.sync_batchnorm=false")
