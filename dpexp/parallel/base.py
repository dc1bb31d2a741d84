"""What every strategy does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dpexp.batches import Inputs, cut
from dpexp.comm import Comm
from dpexp.disturb import collective_pause
from dpexp.errors import ConfigError
from dpexp.parallel.collectives import CollectiveLog
from dpexp.plan import RunPlan
from dpexp.schedule import Indices, chunk_sizes
from dpexp.schema import Task
from dpexp.shapes import ShapeLog, call_shape, shape_of
from dpexp.timing import Clock

_NOTHING = nullcontext()


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

    The life of a strategy: :meth:`wrap` once; for each step :meth:`choose_rows` and
    :meth:`micro_batches`, and for each micro-batch :meth:`forward` and, when training,
    :meth:`weigh`, inside :meth:`synchronised`; :meth:`state_dict` and :meth:`close` at the end.
    """

    def __init__(self, context: Context) -> None:
        self.plan = context.plan
        self.comm = context.comm
        self.device = context.device
        self.clock = context.clock
        self.shapes = context.shapes
        # Pairs of marks around dp's four steps of the current step's forwards, in the order of
        # DP_PARTS; the loop empties it.
        self.parts: list[tuple[Any, Any]] = []
        # What the current step's collectives leave; None where they are not timed, or there are
        # none. Emptied by the loop.
        self.log: CollectiveLog | None = None
        self.notes: tuple[str, ...] = ()  # what a reader of the result should know
        # The sum of the ranks' weighed losses divided by this is the mean over the batch's rows.
        self.loss_divisor = float(context.comm.world_size)
        self._pause = collective_pause(context.plan.config.inject)
        self._accumulate = context.plan.config.accumulate

    def _timed_collectives(self, *, blocking: bool) -> CollectiveLog | None:
        """A log, if the config wants collectives timed and a step has any."""
        config = self.plan.config
        if config.task is not Task.train or not config.measure.comm or self.plan.num_devices == 1:
            return None  # one device has nobody to exchange anything with
        return CollectiveLog(self.clock, self.comm.world_size, blocking=blocking, pause=self._pause)

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
        """Call the model on `rows` rows and note the shapes of each replica; 0 = borrowed."""

    @abstractmethod
    def weigh(self, loss: torch.Tensor, rows: int, global_rows: int) -> torch.Tensor:
        """Make a mean loss over own rows one whose gradient equals the single device's.

        The losses of a step's micro-batches then add up to the step's.

        Args:
            loss: 0-dim, or under dp one entry per active replica when the model itself returns
                a scalar.
            rows: of this micro-batch, as of :meth:`micro_batches`.
            global_rows: of the step over all devices.

        Returns:
            The 0-dim tensor to call ``backward`` on.
        """

    def micro_batches(self, inputs: Inputs, global_rows: int) -> Sequence[tuple[Inputs, int]]:
        """This process's part of a step, cut by ``accumulate``: inputs and own rows of each.

        Every rank has equally many, since each is a meeting of the ranks under some strategies:
        as many as device 0, which never has fewer rows than another. One of 0 rows computes on
        borrowed ones and weighs 0.
        """
        own = self.own_rows(global_rows)
        if self._accumulate == 1:
            return ((inputs, own),)
        most = chunk_sizes(global_rows, self.plan.num_processes)[0]
        longest, *others = [size for size in chunk_sizes(most, self._accumulate) if size]
        starts = range(0, longest * (1 + len(others)), longest)
        sizes = [max(0, min(longest, own - start)) for start in starts]
        held = own or most  # a rank without rows has borrowed those of device 0
        constants = self.plan.config.forward_kwargs
        return list(zip(cut(inputs, held, sizes, longest, constants), sizes, strict=True))

    def synchronised(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch: whether gradients are exchanged.

        Args:
            last: of its step; the others only add to the gradients that are there.
        """
        return _NOTHING

    def check_gradients(self, parameters: list[nn.Parameter]) -> None:  # noqa: B027
        """After a step's last backward: refuse what would train wrong weights in silence."""

    def agree(self) -> None:  # noqa: B027  # a process by itself agrees with itself
        """At a flush: refuse what only a comparison of the ranks shows. All ranks call it."""

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """The whole state of the unwrapped model, on rank 0. Called by all ranks."""
        return model.state_dict()

    def close(self) -> None:  # noqa: B027  # nothing to let go of is a valid answer
        """Let go of the model, threads and hooks."""

    def _scalar(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, when it is a mean over rows.

        Raises:
            ConfigError: it has entries; a mean over them may not be what the user wants.
        """
        if loss.dim() and self.plan.config.loss in ("auto", "output"):
            raise ConfigError(
                "loss",
                self.plan.config.loss,
                "without a target the model's output is taken for its loss, but its shape is "
                f"{list(loss.shape)}",
                allowed="a 0-dim mean over the rows",
                fix="batch.target=<index or key>, or a model that returns its loss",
            )
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
