"""`task=evaluate`: one figure over all samples, each counted once, on any number of ranks."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from typing import Any, final

import torch
from torch.nn import functional

from dpexp.batches import holds_rows, like, like_dict, map_tensors
from dpexp.comm import Comm
from dpexp.device import widest_float
from dpexp.errors import ConfigError
from dpexp.losses import (
    IGNORED,
    class_scores,
    is_classes,
    need_target,
    own_loss,
    prediction,
    same_shape,
    scores_and_classes,
)
from dpexp.schedule import chunk_sizes


def make_scoring(metric: Any, custom: Any, comm: Comm, replicas: int) -> Scoring:
    """What adds up the metric of a config.

    Args:
        metric: the config value: a name, or a node with a `_target_`.
        custom: the built object, when `metric` is a node.
        replicas: devices of this process, each of which may return a loss of its own.
    """
    if custom is not None:
        return WholeBatches(metric["_target_"].rpartition(".")[2], custom, comm)
    return RowByRow(metric, comm, replicas)


class Scoring(ABC):
    """Adds up a metric. :meth:`add` at each step on each rank, then :meth:`result`."""

    @abstractmethod
    def add(self, output: Any, target: Any, rows: int) -> None:
        """Count one batch of `rows` own rows; with 0 they are another rank's."""

    @abstractmethod
    def result(self) -> dict[str, Any] | None:
        """`name`, `value` and `samples`, on rank 0; None elsewhere. Waits for all ranks."""


@final
class RowByRow(Scoring):
    """A metric that is a mean over rows, or over what they have: every rank finds its own rows'.

    Targets that a cross-entropy leaves out count for neither accuracy nor cross-entropy.
    The values are added up without rounding (math.fsum), so the mean does not depend on which
    rank had which row.
    """

    def __init__(self, metric: str, comm: Comm, replicas: int) -> None:
        self._metric, self._comm, self._replicas = metric, comm, replicas
        self._values: list[torch.Tensor] = []  # per row: the sum over what it has, and how much

    def add(self, output: Any, target: Any, rows: int) -> None:
        chosen = _fitting(target) if self._metric == "auto" else self._metric
        if rows == 0:
            self._metric = chosen
            return
        if chosen == "output":
            values = _own_values(output, rows, self._replicas)
            if self._metric == "auto" and values.numel() > rows:
                own_loss(output, None)  # refuses: nobody has said that these are to be averaged
        else:
            values = _ROWS[chosen](output, target)
        self._metric = chosen
        counts = torch.ones_like(values, dtype=torch.bool)
        if chosen in ("accuracy", "cross_entropy") and is_classes(target):
            counts = (target != IGNORED).reshape(values.shape)
        wide = values.detach().to(widest_float(values.device))
        whole = torch.where(counts, wide, 0.0).reshape(rows, -1).sum(dim=1)
        self._values.append(torch.stack([whole, counts.reshape(rows, -1).sum(dim=1)], dim=1))

    def result(self) -> dict[str, Any] | None:
        own = torch.cat(self._values).tolist() if self._values else []
        gathered = self._comm.gather(own)
        if gathered is None:
            return None
        rows = [row for each in gathered for row in each]
        sums, counts = [row[0] for row in rows], sum(row[1] for row in rows)
        total = math.fsum(sums) if all(map(math.isfinite, sums)) else math.nan
        value = total / counts if counts else math.nan
        return {"name": self._metric, "value": value, "samples": len(rows)}


@final
class WholeBatches(Scoring):
    """A metric of the user's: rank 0 calls it with whole global batches, in order.

    So it sees what it would see on a single device, whatever it computes.

    Args:
        custom: a function of (output, target) that gives one value per row, or their mean; or an
            object with ``update(output, target)`` and ``compute()``.
    """

    def __init__(self, name: str, custom: Any, comm: Comm) -> None:
        self._name, self._custom, self._comm = name, custom, comm
        self._updates = hasattr(custom, "update") and hasattr(custom, "compute")
        self._means: list[tuple[float, int]] = []
        self._samples = 0

    def add(self, output: Any, target: Any, rows: int) -> None:
        own = _travelling((output, target))
        gathered = self._comm.gather((own, rows))
        if gathered is None:
            return
        parts = [(pair, count) for pair, count in gathered if count]
        total = sum(count for _, count in parts)
        counts = [count for _, count in parts]
        whole = [_joined([pair[side] for pair, _ in parts], counts) for side in (0, 1)]
        self._samples += total
        if self._updates:
            self._custom.update(*whole)
            return
        value = self._number(self._custom(*whole))
        if value.dim() and len(value) != total:
            raise ConfigError(
                "metric",
                self._name,
                f"gives {len(value)} values for {total} rows",
                allowed="one value per row, or their mean",
            )
        per_row = value.reshape(total, -1).mean(dim=1).tolist() if value.dim() else None
        self._means += [(v, 1) for v in per_row] if per_row else [(value.item(), total)]

    def _number(self, value: Any) -> torch.Tensor:
        try:
            return torch.as_tensor(value, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                "metric",
                self._name,
                f"gives a {type(value).__name__}",
                allowed="a number, or one per row",
            ) from error

    def result(self) -> dict[str, Any] | None:
        if self._comm.rank:
            return None
        if self._updates:
            value = self._number(self._custom.compute()).mean().item()
        else:
            value = math.fsum(mean * count for mean, count in self._means) / self._samples
        return {"name": self._name, "value": value, "samples": self._samples}


def _travelling(value: Any) -> Any:
    """`value` with its tensors on the CPU and without gradients; objects with fields too."""
    if _has_fields(value):
        return _with_fields(value, {k: _travelling(v) for k, v in vars(value).items()})
    if isinstance(value, (tuple, list)):
        return like(value, [_travelling(entry) for entry in value])
    return map_tensors(lambda tensor: tensor.detach().cpu(), value)


def _joined(parts: list[Any], rows: list[int]) -> Any:
    """The ranks' parts of a batch, in order, as one.

    Args:
        rows: of each part. A list or tuple of as many entries holds one for each row.
    """
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(parts) if first.dim() else torch.stack(parts)
    if isinstance(first, dict):
        return like_dict(
            first, {key: _joined([part[key] for part in parts], rows) for key in first}
        )
    if isinstance(first, (tuple, list)):
        if all(holds_rows(part, count) for part, count in zip(parts, rows, strict=True)):
            return like(first, [entry for part in parts for entry in part])
        columns = zip(*parts, strict=True)
        return like(first, [_joined(list(entries), rows) for entries in columns])
    if _has_fields(first):
        fields = {name: _joined([vars(part)[name] for part in parts], rows) for name in vars(first)}
        return _with_fields(first, fields)
    return first


def _has_fields(value: Any) -> bool:
    """Whether it is an object of a class that only holds values, such as a dataclass."""
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (torch.Tensor, dict, tuple, list, type))
        and not callable(value)
    )


def _with_fields(example: Any, fields: dict[str, Any]) -> Any:
    changed = copy.copy(example)
    for name, entry in fields.items():
        object.__setattr__(changed, name, entry)  # a frozen dataclass has no other way
    return changed


def _fitting(target: Any) -> str:
    if target is None:
        return "output"
    return "accuracy" if is_classes(target) else "mse"


def _own_values(output: Any, rows: int, replicas: int) -> torch.Tensor:
    """The model's own values per row; a mean counts for each of its rows."""
    value = own_loss(output, None) if not isinstance(output, torch.Tensor) else output
    if value.dim() and len(value) == rows:
        return value
    sizes = [size for size in chunk_sizes(rows, replicas) if size]
    if value.dim() == 0 or len(value) == len(sizes):  # one mean per replica under dp
        counts = torch.tensor(sizes if value.dim() else [rows], device=value.device)
        return value.reshape(-1).repeat_interleave(counts)
    return own_loss(value, None)  # refuses it


def _accuracy(output: Any, target: Any) -> torch.Tensor:
    need_target("metric", "accuracy", target)
    scores = prediction(output)
    if scores.shape in (target.shape, (*target.shape, 1)):  # one logit per row
        return torch.eq(scores.reshape(target.shape) > 0, target > 0)
    return torch.eq(class_scores(scores, target, "metric", "accuracy").argmax(dim=1), target)


def _cross_entropy(output: Any, target: Any) -> torch.Tensor:
    pair = scores_and_classes("metric", output, target)
    return functional.cross_entropy(*pair, reduction="none")


def _mse(output: Any, target: Any) -> torch.Tensor:
    value, wanted = same_shape("metric", "mse", output, target)
    return (value - wanted).square()


def _l1(output: Any, target: Any) -> torch.Tensor:
    value, wanted = same_shape("metric", "l1", output, target)
    return torch.abs(value - wanted)


_ROWS = {"accuracy": _accuracy, "cross_entropy": _cross_entropy, "mse": _mse, "l1": _l1}
