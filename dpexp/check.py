"""What is wrong with a config whatever the hardware. Pure; no torch, so it is told at once."""

from __future__ import annotations

import re
from typing import Any

from dpexp.bounds import check_bounds
from dpexp.check_measuring import check_measuring
from dpexp.check_sinks import check_sinks
from dpexp.errors import ConfigError, SkippedCellError
from dpexp.extras import refuse_missing
from dpexp.resuming import check_resuming
from dpexp.schema import OPTIONS, CommHook, Config, StrategyName, Task
from dpexp.schema_workload import CompileMode, Preload

DEVICE_FORMS = "auto, cpu, cuda, cuda:<i>, mps, xpu (no spaces, lower case)"
_DEVICE = re.compile(r"auto|cpu|mps|xpu|cuda(:(0|[1-9][0-9]*))?")
MAX_DEVICES = 1024
LOSSES = ("auto", "mse", "l1", "bce_with_logits", "cross_entropy", "output")
METRICS = ("auto", "accuracy", "mse", "l1", "cross_entropy", "output")
LR_SCHEDULERS = ("none", "cosine", "linear")


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
    check_bounds(config)
    check_resuming(config)
    _check_length(config, in_sweep)
    if not 0 < config.parallel.timeout_s < 7 * 24 * 3600:
        raise ConfigError(
            "parallel.timeout_s",
            config.parallel.timeout_s,
            "is not a time-out",
            allowed="more than 0 seconds, less than a week",
            fix="parallel.timeout_s=300",
        )
    _check_options(config)
    _check_named("loss", config.loss, LOSSES, "torch.nn.L1Loss")
    if isinstance(config.loss, dict) and config.loss.get("reduction", "mean") != "mean":
        raise ConfigError(
            "loss.reduction",
            config.loss["reduction"],
            "dpexp weights means over rows, and would take a sum for one",
            fix="loss.reduction=mean",
        )
    _check_named("metric", config.metric, METRICS, "mymodule.f1")
    _check_named(
        "lr_scheduler", config.lr_scheduler, LR_SCHEDULERS, "torch.optim.lr_scheduler.ExponentialLR"
    )
    for key in ("dataset", "model", "optimizer", "loss", "metric", "lr_scheduler"):
        refuse_missing(key, getattr(config, key))
    _check_task(config)
    _check_model(config)
    _check_loader(config)
    _check_entries(config)
    check_sinks(config.sinks)
    check_measuring(config)


def _check_length(config: Config, in_sweep: bool) -> None:
    """How long a run is, and how often it is made."""
    if config.repeats > 1 and not in_sweep:
        raise ConfigError(
            "repeats",
            config.repeats,
            "a single run is not repeated; a sweep is, also one of a single cell",
            fix="-m for a sweep, or repeats=1",
        )
    if config.steps is not None and config.steps < 1:
        raise ConfigError(
            "steps",
            config.steps,
            f"nothing would be left to do: {config.steps} steps",
            allowed="1 or more, or null for whole epochs",
            fix="steps=null",
        )
    until = config.until.ci
    if config.epochs is None and config.steps is None and until is None:
        raise ConfigError(
            "epochs",
            None,
            "epochs and steps are both null, so the run would never end",
            fix="epochs=1, or until.ci=0.02",
        )
    if until is not None and until >= 1:
        raise ConfigError(
            "until.ci",
            until,
            "is a share of the mean step, and one as large as that is always reached",
            allowed="more than 0 and less than 1",
            fix="until.ci=0.02",
        )
    if until is not None and config.lr_scheduler in ("cosine", "linear"):
        raise ConfigError(
            "lr_scheduler",
            config.lr_scheduler,
            f"ends at the last step, and with until.ci={until} nobody knows which that will be",
            fix="lr_scheduler=none, or until.ci=null",
        )


def _check_device_string(device: object) -> None:
    if not isinstance(device, str) or not _DEVICE.fullmatch(device):
        close = str(device).replace(" ", "").lower()
        fix = f"device={close}" if _DEVICE.fullmatch(close) else "device=auto"
        raise ConfigError("device", device, "is not a device string", allowed=DEVICE_FORMS, fix=fix)


def _check_options(config: Config) -> None:
    options, own = config.parallel, OPTIONS.get(config.parallel.strategy, ())
    name = options.strategy.value
    for strategy, keys in OPTIONS.items():
        for key in keys:
            value = getattr(options, key)
            if key in own and value is None:
                raise ConfigError(
                    f"parallel.{key}", None, f"{name} needs a value", fix=f"parallel={name}"
                )
            if key not in own and value is not None:
                raise ConfigError(
                    f"parallel.{key}",
                    value,
                    f"is an option of {strategy.value}, not of {name}",
                    fix=f"parallel={strategy.value}",
                )
    cap = options.bucket_cap_mb
    if cap not in (None, "auto") and not (type(cap) in (int, float) and 0 < cap < 2**20):
        raise ConfigError(
            "parallel.bucket_cap_mb",
            cap,
            "is no size of a bucket",
            allowed="auto, or a number of MiB: more than 0, less than a TiB",
            fix="parallel.bucket_cap_mb=auto",
        )
    if "wrap" in own and not _is_wrap(options.wrap):
        raise ConfigError(
            "parallel.wrap",
            options.wrap,
            "does not say what is sharded as a unit",
            allowed="blocks, model, a list of class names, or a number of parameters",
            fix="parallel.wrap=[Block]",
        )


def _is_wrap(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(entry, str) for entry in value)
    return value in ("blocks", "model") or (type(value) is int and value > 0)


def _check_named(key: str, value: Any, names: tuple[str, ...], example: str) -> None:
    """A key that takes a name or a node with a `_target_`."""
    named = isinstance(value, str) and value in names
    node = isinstance(value, dict) and isinstance(value.get("_target_"), str)
    if not (named or node):
        raise ConfigError(
            key,
            value,
            f"is not a {key}",
            allowed=", ".join(names) + ", or a node with a _target_",
            fix=f"'{key}={{_target_: {example}}}'",
        )


def _check_task(config: Config) -> None:
    """What only some tasks have."""
    if config.task is not Task.train:
        given = {
            "accumulate": (config.accumulate, 1),
            "clip_grad_norm": (config.clip_grad_norm, None),
            "lr_scheduler": (config.lr_scheduler, "none"),
            "parallel.zero": (config.parallel.zero or False, False),
            "parallel.comm_hook": (_value(config.parallel.comm_hook), "none"),
            "check.parity": (config.check.parity or False, False),
        }
        for key, (value, unset) in given.items():
            if value != unset:
                raise ConfigError(key, value, "is for training only", fix="task=train")
    saves = config.checkpoint.every_s is not None or config.checkpoint.every_steps is not None
    if saves and config.task is not Task.train:
        name = "every_steps" if config.checkpoint.every_s is None else "every_s"
        value = getattr(config.checkpoint, name)
        raise ConfigError(f"checkpoint.{name}", value, "is for training only", fix="task=train")
    if config.accumulate > 1 and config.parallel.static_graph:
        raise ConfigError(
            "parallel.static_graph",
            True,
            "with accumulate the gradients of some backward passes are not exchanged, which torch "
            "does not allow for a static graph",
            fix="accumulate=1, or parallel.static_graph=false",
        )
    if config.accumulate > 1 and config.shapes.print:
        raise ConfigError(
            "shapes.print",
            True,
            "prints the sizes of whole batches, which accumulate cuts into micro-batches",
            fix="accumulate=1, or shapes.print=false and look into shapes.csv",
        )
    if config.task is not Task.evaluate and config.metric != "auto":
        raise ConfigError("metric", config.metric, "is for evaluation only", fix="task=evaluate")
    if config.task is Task.evaluate:
        if config.drop_last:
            problem = "would leave out samples of the evaluation"
            raise ConfigError("drop_last", True, problem, fix="drop_last=false")
        if config.epochs != 1:
            raise ConfigError(
                "epochs",
                config.epochs,
                "an evaluation counts each sample once",
                allowed="1",
                fix="epochs=1",
            )


def _value(hook: CommHook | None) -> str:
    return "none" if hook is None else hook.value


def _check_model(config: Config) -> None:
    prepare = config.prepare
    if prepare.compile and config.parallel.strategy is StrategyName.dp:
        raise ConfigError(
            "prepare.compile",
            True,
            "nn.DataParallel copies the model in each step, and a compiled model stays bound to "
            "the first one",
            fix="parallel=ddp, or prepare.compile=false",
        )
    if prepare.compile_mode is not CompileMode.default and not prepare.compile:
        raise ConfigError(
            "prepare.compile_mode",
            prepare.compile_mode.value,
            "nothing is compiled",
            fix="prepare.compile=true",
        )


def _check_loader(config: Config) -> None:
    loader = config.loader
    if loader.preload is Preload.device and loader.workers:
        raise ConfigError(
            "loader.preload",
            "device",
            f"a dataset on the device needs no loader processes, but loader.workers="
            f"{loader.workers}",
            fix="loader.workers=0, or loader.preload=none",
        )


def _check_entries(config: Config) -> None:
    """`batch.inputs` and `batch.target` name entries of a batch."""
    inputs, target = config.batch.inputs, config.batch.target
    many = list(inputs.values()) if isinstance(inputs, dict) else inputs
    many = many if isinstance(many, list) else [many]
    if not many or not all(_is_entry(entry) for entry in many):
        raise ConfigError(
            "batch.inputs",
            inputs,
            "does not name entries of a batch",
            allowed="auto, an index, a key, a list of them, or {keyword: index or key}",
            fix="batch.inputs=auto",
        )
    if target is not None and not _is_entry(target):
        raise ConfigError(
            "batch.target",
            target,
            "does not name an entry of a batch",
            allowed="auto, none, an index or a key",
            fix="batch.target=auto",
        )


def _is_entry(value: Any) -> bool:
    return type(value) is int or (isinstance(value, str) and value != "")
