"""The inverse of cutting a batch: the parts of all ranks as one batch."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch

from dpexp.batches import Inputs, holds_rows, leading_sizes, like, like_dict


def uncut(pieces: Sequence[tuple[Inputs, int]], constants: Container[str] = ()) -> Inputs:
    """Put parts of a batch together along the first dimension.

    Args:
        pieces: each with its number of rows, in the order of the rows; at least one. Tensors and
            lists with a row per row are joined; all else is the first one's.
        constants: names of keywords that are no part of the batch.

    Raises:
        RuntimeError: their sizes differ elsewhere than in the rows, as texts padded to the longest
            of each part do.
    """
    inputs, rows = [piece for piece, _ in pieces], [count for _, count in pieces]
    if len(pieces) == 1:
        return inputs[0]
    keywords = {
        name: value if name in constants else _joined([each.kwargs[name] for each in inputs], rows)
        for name, value in inputs[0].kwargs.items()
    }
    args = zip(*(each.args for each in inputs), strict=True)
    return Inputs(
        tuple(_joined(list(values), rows) for values in args),
        keywords,
        _joined([each.target for each in inputs], rows),
    )


def _joined(values: list[Any], rows: Sequence[int]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        by_rows = all(v.dim() and len(v) == n for v, n in zip(values, rows, strict=True))
        return torch.cat(values) if by_rows else first
    if isinstance(first, dict):
        return like_dict(first, {k: _joined([v[k] for v in values], rows) for k in first})
    if isinstance(first, (tuple, list)):
        if all(holds_rows(v, n) for v, n in zip(values, rows, strict=True)):
            return type(first)([entry for value in values for entry in value])
        return like(first, [_joined(list(each), rows) for each in zip(*values, strict=True)])
    return first


def numbers_in(inputs: Inputs, rows: int) -> int:
    """How many numbers the model gets in a batch; its rows where there is no tensor."""
    sizes = leading_sizes((inputs.args, inputs.kwargs))
    return max(rows, sum(size.numel() for size in sizes))


def same(one: Any, other: Any) -> bool:
    """Whether two nested values are equal to the last bit; NaN equals NaN."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = one.shape == other.shape and one.dtype == other.dtype
        return alike and torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    return bool(one is other or one == other)
