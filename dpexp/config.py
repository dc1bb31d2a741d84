"""From a composed config to plain, typed data, and back to JSON types."""

from __future__ import annotations

import copy
import difflib
import functools
import typing
from dataclasses import fields
from enum import Enum
from typing import Any, cast

from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import (
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from dpexp.builtin import BUILTIN_ARGUMENTS, GROUPS
from dpexp.errors import NO_VALUE, ConfigError
from dpexp.nodes import plain
from dpexp.schema import NESTED, Config
from dpexp.texts import first_line

OF_THE_SWEEP = ("resume", "rerun")


def load(composed: DictConfig) -> Config:
    """Turn a composed config into plain, typed data.

    Args:
        composed: Hydra's config without the ``hydra`` node; interpolations not yet resolved.

    Raises:
        ConfigError: a value is missing, of the wrong type, or refers to a key that is not there.
    """
    given = _resolved(composed)
    for group, options in GROUPS.items():
        if not isinstance(given.get(group), dict):
            raise ConfigError(
                group,
                given.get(group),
                "a config group needs one of its options",
                allowed=", ".join(options),
                fix=f"{group}={options[-1]}",
            )
    values: dict[str, Any] = {}
    for spec in fields(Config):
        if spec.name == "extra":
            continue
        if spec.name in OF_THE_SWEEP:
            given.setdefault(spec.name, None)  # not in the record of a run
        if spec.name not in given:
            raise ConfigError(
                spec.name, NO_VALUE, "the key is missing", fix=f"do not remove {spec.name}"
            )
        value = given.pop(spec.name)
        if spec.name in NESTED:
            values[spec.name] = _nested(spec.name, NESTED[spec.name], value)
        else:
            values[spec.name] = _typed(spec.name, _TYPES[spec.name], value)
    for group in ("dataset", "model", "optimizer"):
        _check_target(group, values[group])
    for name, node in values["sinks"].items():
        if not isinstance(node, dict):
            raise ConfigError(f"sinks.{name}", node, "must be a node with a _target_")
        _check_target(f"sinks.{name}", node)
    return Config(**values, extra=given)


def plain_or_none(composed: DictConfig) -> dict[str, Any] | None:
    """The config as a run's record will have it; None of one that is refused."""
    try:
        return to_plain(load(composed))
    except ConfigError:
        return None


def without_hydra(composed: DictConfig) -> DictConfig:
    """A copy of a composed config without Hydra's own node."""
    copied = copy.deepcopy(composed)
    with open_dict(copied):
        copied.pop("hydra", None)
    return copied


def to_plain(config: Config) -> dict[str, Any]:
    """The config as JSON types, for run.json and TensorBoard; null options are left out.

    So are :data:`OF_THE_SWEEP`: the same run has the same record, whenever it was made.
    """

    def convert(value: Any) -> Any:
        if isinstance(value, Enum):
            return value.value
        if hasattr(value, "__dataclass_fields__"):
            pairs = ((f.name, getattr(value, f.name)) for f in fields(value))
            return {name: convert(entry) for name, entry in pairs if entry is not None}
        return value

    left_out = ("extra", *OF_THE_SWEEP)
    kept = (f.name for f in fields(Config) if f.name not in left_out)
    return {**{name: convert(getattr(config, name)) for name in kept}, **config.extra}


def _resolved(composed: DictConfig) -> dict[str, Any]:
    unresolved = plain(composed)
    if not _has_to_be_resolved(unresolved):
        return cast(dict[str, Any], unresolved)
    try:
        resolved = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        key = error.full_key or "config"
        raise ConfigError(
            key, NO_VALUE, "this value must be given", fix=f"{key}=<value>"
        ) from error
    except OmegaConfBaseException as error:
        key = error.full_key or "config"
        if isinstance(error, InterpolationResolutionError) or "nterpolation" in str(error):
            first = first_line(error)
            raise ConfigError(
                key, _raw_at(unresolved, key), f"cannot be resolved: {first}", fix=f"{key}=<value>"
            ) from error
        raise ConfigError(key, NO_VALUE, first_line(error)) from error
    return cast(dict[str, Any], resolved)


def _has_to_be_resolved(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_to_be_resolved, value.values()))
    if isinstance(value, list):
        return any(map(_has_to_be_resolved, value))
    return isinstance(value, str) and ("${" in value or value == MISSING)


def _raw_at(raw: Any, key: str) -> Any:
    for part in key.split("."):
        raw = raw.get(part, NO_VALUE) if isinstance(raw, dict) else NO_VALUE
    return raw


def _nested(name: str, schema: type, value: Any) -> Any:
    if not isinstance(value, dict):
        raise ConfigError(
            name, value, "must be a node with keys", fix=f"leave {name} as it is in conf/"
        )
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
    types = _types_of(schema)
    converted = {}
    for key in known:
        if key not in value and type(None) not in getattr(types[key], "__args__", ()):
            raise ConfigError(f"{name}.{key}", NO_VALUE, "the key is missing")
        converted[key] = _typed(f"{name}.{key}", types[key], value.get(key))
    return schema(**converted)


@functools.cache
def _types_of(schema: type) -> dict[str, Any]:
    return typing.get_type_hints(schema)


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
    """`value` as `expected`; a config needs some conversions (1 to 1.0, "1e-3" to 0.001)."""
    converted = _convert(expected, value)
    if converted is _REFUSED:
        allowed = _describe(expected)
        example = f"{key}={_example(expected)}"
        chosen = isinstance(value, str) and _is_choice(expected)
        problem = "is none of the choices" if chosen else "is of the wrong type"
        raise ConfigError(key, value, problem, allowed=allowed, fix=example)
    return converted


_REFUSED = object()


def _convert(expected: Any, value: Any) -> Any:  # noqa: PLR0911
    options = getattr(expected, "__args__", ()) if _is_union(expected) else ()
    if options:
        if value is None and type(None) in options:
            return None
        for option in options:
            converted = _convert(option, value)
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


def _is_choice(expected: Any) -> bool:
    options = expected.__args__ if _is_union(expected) else (expected,)
    return any(isinstance(option, type) and issubclass(option, Enum) for option in options)


def _describe(expected: Any) -> str:
    if _is_union(expected):
        return " or ".join(_describe(option) for option in expected.__args__)
    if getattr(expected, "__origin__", None) is list:
        return f"a list, like {_example(expected)}"
    if isinstance(expected, type) and issubclass(expected, Enum):
        return ", ".join(member.value for member in expected)
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return names.get(expected, "null" if expected is type(None) else "a node with keys")


def _example(expected: Any) -> str:
    if _is_union(expected):
        return _example(expected.__args__[0])
    if getattr(expected, "__origin__", None) is list:
        return "[a,b]" if expected.__args__[0] is str else "[8,16]"
    if isinstance(expected, type) and issubclass(expected, Enum):
        return str(next(iter(expected)).value)
    return {int: "8", float: "0.1", str: "text", bool: "true"}.get(expected, "<node>")


# These are judged by check.check, which can say more than "wrong type".
_TYPES = {**typing.get_type_hints(Config), "device": Any, "num_devices": Any, "batch_size": Any}


def flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, by dotted key. Lists are values; an empty dict has no keys."""
    if not isinstance(node, dict):
        return {prefix[:-1]: node}
    pairs = [flat(value, f"{prefix}{key}.") for key, value in node.items()]
    return {key: value for each in pairs for key, value in each.items()}
