"""What every strategy does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dpexp.batches import Inputs, move
from dpexp.comm import Comm
from dpexp.errors import ConfigError
from dpexp.plan import RunPlan
from dpexp.schedule import Indices
from dpexp.shapes import ShapeLog, call_shape, shape_of
from dpexp.timing import Clock


@dataclass(frozen=True)
class Context:
    """What a strategy needs to know of the rank it runs in."""

    plan: RunPlan
    comm: Comm
    device: torch.device
    clock: Clock[Any]
    shapes: ShapeLog


class Strategy(ABC):
    """Spreads a global batch over devices.

    The life of a strategy: :meth:`wrap` once, then for each step :meth:`choose_rows`,
    :meth:`place`, :meth:`forward` and, when training, :meth:`weigh`; :meth:`close` at the end.
    """

    def __init__(self, context: Context) -> None:
        self.plan = context.plan
        self.comm = context.comm
        self.device = context.device
        self.clock = context.clock
        self.shapes = context.shapes
        # Pairs of marks around dp's four steps of the current forward, in the order of DP_PARTS.
        self.parts: list[tuple[Any, Any]] = []

    @abstractmethod
    def wrap(self, model: nn.Module) -> None:
        """Take the model, which already lies on the device. The optimizer is made afterwards."""

    @abstractmethod
    def choose_rows(self, rows: Indices) -> Indices:
        """Of a global batch, the rows that this process loads. Shape [rows] -> [own rows]."""

    @abstractmethod
    def own_rows(self, global_rows: int) -> int:
        """How many rows of a batch of `global_rows` count for this process; 0 = idle."""

    @abstractmethod
    def forward(self, inputs: Inputs, rows: int) -> Any:
        """Call the model on `rows` rows and note the shapes of each replica."""

    @abstractmethod
    def weigh(self, loss: torch.Tensor, rows: int, global_rows: int) -> torch.Tensor:
        """Make a mean loss over own rows one whose gradient equals the single device's.

        Args:
            loss: 0-dim, or under dp one entry per active replica when the model itself returns
                a scalar.
            rows: own rows, as of :meth:`own_rows`.

        Returns:
            The 0-dim tensor to call ``backward`` on.
        """

    def place(self, inputs: Inputs) -> Inputs:
        """The batch on this process's (first) device."""
        if self.device.type == "cpu":
            return inputs
        return Inputs(
            move(inputs.args, self.device),
            move(inputs.kwargs, self.device),
            move(inputs.target, self.device),
        )

    def close(self) -> None:  # noqa: B027  # nothing to let go of is a valid answer
        """Let go of the model, threads and hooks."""

    def _scalar(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, when it is a mean over rows.

        Raises:
            ConfigError: it has entries; a mean over them may not be what the user wants.
        """
        if loss.dim():
            raise ConfigError(
                "loss",
                self.plan.config.loss,
                f"must be the 0-dim mean over the rows, not of shape {list(loss.shape)}",
                fix="a loss with reduction='mean'",
            )
        return loss

    def _noted(self, model: nn.Module, inputs: Inputs) -> Any:
        """Call a model that has one replica in this process, and note its shapes."""
        output = model(*inputs.args, **inputs.kwargs)
        self.shapes.note(0, call_shape(inputs.args, inputs.kwargs), shape_of(output))
        return output
