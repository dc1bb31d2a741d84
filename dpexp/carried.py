"""Nested values of a state as JSON and tensors apart, and together again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
# Keys of the JSON that stand for what JSON has not.
_TENSOR, _TUPLE, _PAIRS, _FLOAT = "tensor", "tuple", "pairs", "float"
_MARK = "is a"


class UnsavableError(Exception):
    """A state holds an object that is neither a tensor nor a plain value.

    Args:
        place: where, with dots.
        value: the object.
    """

    def __init__(self, place: str, value: object) -> None:
        self.place = place
        super().__init__(f"{place} is a {type(value).__name__}")


def split(value: Any, place: str, tensors: Tensors) -> Any:
    """`value` as JSON types; its tensors are put into `tensors`, named by their place.

    Raises:
        UnsavableError: it holds something else than tensors, numbers, texts and their containers.
    """
    if isinstance(value, torch.Tensor):
        tensors[place] = value
        return {_MARK: _TENSOR, "name": place}
    if isinstance(value, float) and not math.isfinite(value):
        return {_MARK: _FLOAT, "value": repr(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        pairs = {key: split(each, f"{place}.{key}", tensors) for key, each in value.items()}
        if all(type(key) is str for key in pairs) and _MARK not in pairs:
            return pairs
        keys = [split(key, place, tensors) for key in pairs]
        return {_MARK: _PAIRS, "pairs": list(map(list, zip(keys, pairs.values(), strict=True)))}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        entries = [split(each, f"{place}.{index}", tensors) for index, each in enumerate(value)]
        return {_MARK: _TUPLE, "entries": entries} if isinstance(value, tuple) else entries
    raise UnsavableError(place, value)


def names_in(plain: Any) -> list[str]:
    """The names of the tensors that :func:`join` needs."""
    if isinstance(plain, list):
        return [name for each in plain for name in names_in(each)]
    if not isinstance(plain, dict):
        return []
    if plain.get(_MARK) == _TENSOR:
        return [str(plain["name"])]
    return [name for each in plain.values() for name in names_in(each)]


def join(plain: Any, tensors: Mapping[str, torch.Tensor]) -> Any:  # noqa: PLR0911  # a table
    """What :func:`split` was given, of the same types."""
    if isinstance(plain, list):
        return [join(each, tensors) for each in plain]
    if not isinstance(plain, dict):
        return plain
    kind = plain.get(_MARK)
    if kind == _TENSOR:
        return tensors[plain["name"]]
    if kind == _FLOAT:
        return float(plain["value"])
    if kind == _TUPLE:
        return tuple(join(each, tensors) for each in plain["entries"])
    if kind == _PAIRS:
        return {join(key, tensors): join(each, tensors) for key, each in plain["pairs"]}
    return {key: join(each, tensors) for key, each in plain.items()}
