"""The typed schema of the config, and the step from a composed config to plain data.

Values live in ``conf/``; types and documentation live here, once. ``--help`` is made from the
docs below. The schema is applied after composition rather than as a structured root node: a
structured root would refuse ``+foo=1``, and typed group options would refuse the arguments of a
user's own ``_target_``.
"""

from __future__ import annotations

import difflib
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from dpexp.errors import NO_VALUE, ConfigError


class Task(Enum):
    """What a step does."""

    forward = "forward"
    train = "train"


class Scaling(Enum):
    """What `batch_size` counts."""

    strong = "strong"
    weak = "weak"


class StrategyName(Enum):
    """How a batch is spread over devices."""

    none = "none"
    dp = "dp"
    ddp = "ddp"


class Backend(Enum):
    """The library that carries DDP's collectives."""

    auto = "auto"
    gloo = "gloo"
    nccl = "nccl"


def doc(text: str, section: str = "") -> Any:
    """A field without default (the default is in conf/), with its help text."""
    return field(metadata={"doc": text, "section": section})


@dataclass(frozen=True)
class LoaderConfig:
    """How batches are fetched."""

    workers: int = doc("loader processes per rank; 0 fetches in the rank itself")


@dataclass(frozen=True)
class ShapesConfig:
    """What is recorded of shapes."""

    depth: int = doc("0 records the model's own shapes, n also those of submodules n levels down")
    print: bool = doc("print the exercise's lines: sizes inside and outside the model")


@dataclass(frozen=True)
class ParallelConfig:
    """A strategy and its options; those of ddp are torch's own, with torch's meaning."""

    strategy: StrategyName = doc("set by the group: parallel=none, dp or ddp")
    timeout_s: float = doc("how long a rank waits for the others before the run fails")
    backend: Backend | None = doc("ddp: auto (nccl on CUDA, else gloo), gloo or nccl")
    bucket_cap_mb: float | None = doc("ddp: size of a gradient bucket in MiB")
    find_unused_parameters: bool | None = doc("ddp: look for parameters without gradient each step")
    static_graph: bool | None = doc("ddp: promise that the graph never changes")
    gradient_as_bucket_view: bool | None = doc("ddp: gradients are views into the buckets")
    broadcast_buffers: bool | None = doc("ddp: send rank 0's buffers to all before each forward")


@dataclass(frozen=True)
class Config:
    """A run's whole config as plain data: what the ranks get. Frozen, picklable, no OmegaConf."""

    dataset: dict[str, Any] = doc("random, digits, tensors, or custom with any _target_", "groups")
    model: dict[str, Any] = doc("linear, mlp, cnn, or custom with any _target_", "groups")
    parallel: ParallelConfig = doc("none, dp or ddp", "groups")
    optimizer: dict[str, Any] = doc("sgd, adamw, or custom with any _target_", "groups")
    task: Task = doc("forward (no gradients) or train (loss, backward, optimizer)", "what to run")
    loss: Any = doc(
        "auto (cross_entropy for integer targets, mse for others, or the model's own 0-dim "
        "output), mse, cross_entropy, output, or a node with a _target_",
        "what to run",
    )
    forward_kwargs: dict[str, Any] = doc("keyword arguments of every forward call", "what to run")
    seed: int = doc("fixes the order of the samples, the data and the initial weights", "what to run")
    save_weights: bool = doc("write the final state_dict to weights.pt in the run's folder", "what to run")
    device: str = doc("auto, cpu, cuda, cuda:<i>, mps or xpu; auto = accelerator, else cpu", "devices")
    num_devices: int | str = doc("how many devices the batch is spread over; auto = all there are", "devices")
    batch_size: int = doc("rows of a batch: global under strong scaling, per device under weak", "batches")
    scaling: Scaling = doc("strong: batch_size is split over devices; weak: each gets batch_size", "batches")
    epochs: int | None = doc("passes over the data; null = as many as steps needs", "batches")
    steps: int | None = doc("at most this many global batches; null = whole epochs", "batches")
    warmup_steps: int = doc("leading steps that are recorded but not in the statistics", "batches")
    drop_last: bool = doc("leave out an epoch's last batch when it is short", "batches")
    shuffle: bool = doc("a new order of the samples each epoch", "batches")
    loader: LoaderConfig = doc("how batches are fetched", "batches")
    shapes: ShapesConfig = doc("what is recorded of shapes", "records")
    extra: dict[str, Any] = field(default_factory=dict, metadata={"doc": "", "section": ""})


NESTED = {"parallel": ParallelConfig, "loader": LoaderConfig, "shapes": ShapesConfig}
GROUPS = {
    "dataset": ("custom", "digits", "random", "tensors"),
    "model": ("cnn", "custom", "linear", "mlp"),
    "parallel": ("ddp", "dp", "none"),
    "optimizer": ("adamw", "custom", "sgd"),
}

# Types of the built-in targets' arguments, so that a wrong one is refused without importing torch.
BUILTIN_ARGUMENTS: dict[str, dict[str, Any]] = {
    "dpexp.datasets.random_rows": {"rows": int, "features": int, "targets": int, "seed": int},
    "dpexp.datasets.digits": {"flatten": bool},
    "dpexp.datasets.tensors": {"path": str, "inputs": str | None, "target": str | None},
    "dpexp.models.linear": {"in_features": int, "out_features": int},
    "dpexp.models.mlp": {"widths": list[int]},
    "dpexp.models.cnn": {"in_channels": int, "channels": list[int], "classes": int},
    "torch.optim.SGD": {"lr": float, "momentum": float, "weight_decay": float, "nesterov": bool},
    "torch.optim.AdamW": {"lr": float, "betas": list[float], "weight_decay": float},
}


def load(composed: DictConfig) -> Config:
    """Turn a composed config into plain, typed data.

    Args:
        composed: Hydra's config without the ``hydra`` node; interpolations not yet resolved.

    Raises:
        ConfigError: a value is missing, of the wrong type, or refers to a key that is not there.
    """
    plain = _resolved(composed)
    for group, options in GROUPS.items():
        if not isinstance(plain.get(group), dict):
            raise ConfigError(
                group,
                plain.get(group),
                "a config group needs one of its options",
                allowed=", ".join(options),
                fix=f"{group}={options[-1]}",
            )
    values: dict[str, Any] = {}
    for spec in fields(Config):
        if spec.name == "extra":
            continue
        if spec.name not in plain:
            raise ConfigError(spec.name, NO_VALUE, "the key is missing", fix=f"do not remove {spec.name}")
        value = plain.pop(spec.name)
        if spec.name in NESTED:
            values[spec.name] = _nested(spec.name, NESTED[spec.name], value)
        else:
            values[spec.name] = _typed(spec.name, _TYPES[spec.name], value)
    for group in ("dataset", "model", "optimizer"):
        _check_target(group, values[group])
    return Config(**values, extra=plain)


def to_plain(config: Config) -> dict[str, Any]:
    """The config as JSON types, for run.json and TensorBoard; null options are left out."""

    def convert(value: Any) -> Any:
        if isinstance(value, Enum):
            return value.value
        if hasattr(value, "__dataclass_fields__"):
            pairs = ((f.name, getattr(value, f.name)) for f in fields(value))
            return {name: convert(entry) for name, entry in pairs if entry is not None}
        return value

    plain = {f.name: convert(getattr(config, f.name)) for f in fields(Config)}
    return {**{k: v for k, v in plain.items() if k != "extra"}, **config.extra}


def _resolved(composed: DictConfig) -> dict[str, Any]:
    try:
        plain = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        key = error.full_key or "config"
        raise ConfigError(
            key, "???", "this value must be given", fix=f"{key}=<value>"
        ) from error
    except OmegaConfBaseException as error:
        key = error.full_key or "config"
        if isinstance(error, InterpolationResolutionError) or "nterpolation" in str(error):
            first = str(error).splitlines()[0]
            raw = OmegaConf.to_container(composed, resolve=False)
            raise ConfigError(
                key, _raw_at(raw, key), f"cannot be resolved: {first}", fix=f"{key}=<value>"
            ) from error
        raise ConfigError(key, NO_VALUE, str(error).splitlines()[0]) from error
    return cast(dict[str, Any], plain)


def _raw_at(raw: Any, key: str) -> Any:
    for part in key.split("."):
        raw = raw.get(part, NO_VALUE) if isinstance(raw, dict) else NO_VALUE
    return raw


def _nested(name: str, schema: type, value: Any) -> Any:
    if not isinstance(value, dict):
        raise ConfigError(name, value, "must be a node with keys", fix=f"leave {name} as it is in conf/")
    known = {spec.name: spec for spec in fields(schema)}
    for key in value:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            raise ConfigError(
                f"{name}.{key}",
                value[key],
                "there is no such option",
                allowed=", ".join(known),
                fix=f"{name}.{close[0]}=…" if close else f"leave out {name}.{key}",
            )
    types = _nested_types(schema)
    converted = {}
    for key, spec in known.items():
        if key not in value and type(None) not in getattr(types[key], "__args__", ()):
            raise ConfigError(f"{name}.{key}", NO_VALUE, "the key is missing")
        converted[key] = _typed(f"{name}.{key}", types[key], value.get(key))
        assert spec.default is MISSING
    return schema(**converted)


def _check_target(group: str, node: dict[str, Any]) -> None:
    target = node.get("_target_")
    if not isinstance(target, str) or not target:
        raise ConfigError(
            f"{group}._target_",
            target,
            "must be the dotted name of a class or function",
            fix=f"{group}._target_=mymodule.MyClass",
        )
    for key, expected in BUILTIN_ARGUMENTS.get(target, {}).items():
        if key in node:
            node[key] = _typed(f"{group}.{key}", expected, node[key])


def _typed(key: str, expected: Any, value: Any) -> Any:
    """`value` as `expected`, with the conversions that a config needs (1 -> 1.0, "1e-3" -> 0.001)."""
    converted = _convert(expected, value)
    if converted is _REFUSED:
        allowed = _describe(expected)
        example = {"num_devices": "num_devices=2"}.get(key, f"{key}={_example(expected)}")
        raise ConfigError(key, value, "is of the wrong type", allowed=allowed, fix=example)
    return converted


_REFUSED = object()


def _convert(expected: Any, value: Any) -> Any:  # noqa: PLR0911
    options = getattr(expected, "__args__", ()) if _is_union(expected) else ()
    if options:
        for option in options:
            converted = None if option is type(None) and value is None else _convert(option, value)
            if converted is not _REFUSED:
                return converted
        return _REFUSED
    if expected is Any:
        return value
    if getattr(expected, "__origin__", None) is list:
        if not isinstance(value, list):
            return _REFUSED
        entries = [_convert(expected.__args__[0], entry) for entry in value]
        return _REFUSED if any(entry is _REFUSED for entry in entries) else entries
    if getattr(expected, "__origin__", None) is dict:
        return value if isinstance(value, dict) else _REFUSED
    if isinstance(expected, type) and issubclass(expected, Enum):
        return next((member for member in expected if member.value == _name(value)), _REFUSED)
    if expected is type(None):
        return _REFUSED
    if expected is float and not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError):
            return _REFUSED
    # bool is a subclass of int: True must not pass for 1.
    return value if type(value) is expected else _REFUSED


def _name(value: Any) -> Any:
    return "none" if value is None else value


def _is_union(expected: Any) -> bool:
    return type(expected).__name__ in ("UnionType", "Union", "_UnionGenericAlias")


def _describe(expected: Any) -> str:
    if _is_union(expected):
        return " or ".join(_describe(option) for option in expected.__args__)
    if getattr(expected, "__origin__", None) is list:
        return f"a list of {_describe(expected.__args__[0])}s, like [8,16]"
    if isinstance(expected, type) and issubclass(expected, Enum):
        return ", ".join(member.value for member in expected)
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return names.get(expected, "null" if expected is type(None) else "a node with keys")


def _example(expected: Any) -> str:
    if _is_union(expected):
        return _example(expected.__args__[0])
    if getattr(expected, "__origin__", None) is list:
        return "[8,16]"
    if isinstance(expected, type) and issubclass(expected, Enum):
        return str(next(iter(expected)).value)
    return {int: "8", float: "0.1", str: "text", bool: "true"}.get(expected, "<node>")


def _nested_types(schema: type) -> dict[str, Any]:
    import typing

    return typing.get_type_hints(schema)


# These three are judged by plan.check, which can say more than "wrong type".
_TYPES = {**_nested_types(Config), "device": Any, "num_devices": Any, "loss": Any}
