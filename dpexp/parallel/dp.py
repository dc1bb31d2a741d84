"""One process, one thread per device: torch's nn.DataParallel, on a CPU over virtual devices."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast, final

import torch
from torch import nn

from dpexp.batches import Inputs, leading_sizes
from dpexp.errors import ConfigError
from dpexp.parallel import replicas, traffic
from dpexp.parallel.base import Strategy
from dpexp.parallel.collectives import CollectiveLog
from dpexp.parallel.virtual import VirtualDevices
from dpexp.schedule import Indices, chunk_sizes
from dpexp.shapes import ShapeLog, call_shape, current_replica, shape_of
from dpexp.timing import Clock


@final
class DataParallel(Strategy):
    """The batch is cut into chunks, the model copied to every device, the outputs gathered."""

    def wrap(self, model: nn.Module) -> None:
        # Scalars are gathered into a vector on purpose, once per step: see weigh().
        warnings.filterwarnings("ignore", message="Was asked to gather along dimension 0")
        first, count = self.plan.first_index, self.plan.num_devices
        self._virtual = (
            VirtualDevices(count, self.plan.threads_per_replica) if self.plan.emulated else None
        )
        # One device is called without copies; see forward().
        self.log = self._timed_collectives(blocking=True)
        self._model = MeasuredDataParallel(
            model,
            list(range(first, first + count)),
            self._virtual,
            self.clock,
            self.shapes,
            self.parts,
            self.log,
        )

    def choose_rows(self, rows: Indices) -> Indices:
        return rows

    def own_rows(self, global_rows: int) -> int:
        return global_rows

    def forward(self, inputs: Inputs, rows: int) -> Any:
        if self.plan.num_devices == 1:
            # As in torch: one device is called without copies, so there are no four steps.
            output = self._noted(self._model, inputs)
            self.parts.clear()
            return output
        refuse_uncuttable(inputs, rows)
        return self._model(*inputs.args, **inputs.kwargs)

    def weigh(self, loss: torch.Tensor, rows: int, global_rows: int) -> torch.Tensor:
        sizes = [size for size in chunk_sizes(rows, self.plan.num_devices) if size]
        if loss.dim() == 0 or len(loss) != len(sizes):
            loss = self._scalar(loss)
            return loss if rows == global_rows else loss * (rows / global_rows)
        # The model returned its own mean loss on each active replica.
        weights = torch.tensor(sizes, dtype=loss.dtype, device=loss.device) / global_rows
        return torch.dot(loss, weights)

    def close(self) -> None:
        if self._virtual is not None:
            self._virtual.close()
        del self._model


def refuse_uncuttable(inputs: Inputs, rows: int) -> None:
    """Refuse inputs that nn.DataParallel would cut where they have no rows.

    Raises:
        ConfigError: a tensor's first dimension is not the row.
    """
    for shape in leading_sizes((inputs.args, inputs.kwargs)):
        if len(shape) and shape[0] != rows:
            raise ConfigError(
                "parallel",
                "dp",
                f"cuts every input along its first dimension, but one has "
                f"shape {list(shape)} in a batch of {rows} rows",
                fix="make the batch the first dimension of every tensor, or parallel=none",
            )


@final
class MeasuredDataParallel(nn.DataParallel[nn.Module]):
    """nn.DataParallel with its four steps marked, real or over virtual devices.

    Args:
        parts: receives one pair of marks per step of each forward, in the order of DP_PARTS.
        log: notes what is copied between devices; None = do not.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: list[int],
        virtual: VirtualDevices | None,
        clock: Clock[Any],
        shapes: ShapeLog,
        parts: list[tuple[Any, Any]],
        log: CollectiveLog | None = None,
    ) -> None:
        if virtual is None:
            super().__init__(module, device_ids)
        else:
            # torch's constructor drops the devices silently on a CPU, and would take the GPU on
            # a machine that has one; so only the fields that forward() reads are set.
            nn.Module.__init__(self)
            self.module = module
            self.dim = 0
            self.device_ids = device_ids
            self.output_device = device_ids[0]
            self.src_device_obj = torch.device("cpu")
        self._virtual = virtual
        self._clock = clock
        self._shapes = shapes
        self._parts = parts
        self._log = log
        self._model_bytes = traffic.model_bytes(module)

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[Any]) -> Any:
        start = self._clock.mark()
        if self._virtual is None:
            scattered = super().scatter(inputs, kwargs, device_ids)
        else:
            scattered = self._virtual.scatter(inputs, kwargs)
        # With a keyword that is no tensor torch makes a call for every device, also for those
        # without rows; that call would lack its inputs (pytorch#31460).
        result = replicas.drop_idle(*scattered)
        self._ended("scatter", start, lambda: traffic.scattered_bytes(result))
        return result

    def replicate(self, module: nn.Module, device_ids: Sequence[Any]) -> Any:
        start = self._clock.mark()
        if self._virtual is None:
            copies = super().replicate(module, device_ids)
        else:
            copies = self._virtual.replicate(module, len(device_ids))
        copied_bytes, gradient_bytes = self._model_bytes
        self._ended("replicate", start, lambda: (len(copies) - 1) * copied_bytes)
        if self._log is not None:
            traffic.time_reduction(copies, gradient_bytes, self._log)
        return copies

    def parallel_apply(self, replicas: Sequence[Any], inputs: Any, kwargs: Any) -> Any:
        start = self._clock.mark()
        calls = [_Call(index, replica, self._shapes) for index, replica in enumerate(replicas)]
        if self._virtual is None:
            # torch only calls them; they need not be modules
            outputs = super().parallel_apply(cast(Any, calls), inputs, kwargs)
        else:
            outputs = self._virtual.parallel_apply(calls, inputs, kwargs)
        self._parts.append((start, self._clock.mark()))
        # In the order of the replicas, not in that in which their threads happened to end.
        for call in calls:
            self._shapes.note(call.index, *call.shapes)
        return outputs

    def gather(self, outputs: Any, output_device: Any) -> Any:
        start = self._clock.mark()
        replicas.check_gatherable(outputs[0])
        if self._virtual is None:
            gathered = super().gather(outputs, output_device)
        else:
            gathered = self._virtual.gather(outputs)
        self._ended("gather", start, lambda: traffic.gathered_bytes(outputs))
        return gathered

    def _ended(self, step: str, start: Any, num_bytes: Callable[[], int]) -> None:
        """Note the end of one of the four steps; all but parallel_apply are communication."""
        if self._log is not None:
            self._log.pause()
        end = self._clock.mark()
        self._parts.append((start, end))
        if self._log is not None:
            self._log.copied(step, num_bytes(), start, end)


@final
class _Call:
    """One replica's forward, with the thread told which replica it works for."""

    def __init__(self, index: int, replica: nn.Module, log: ShapeLog) -> None:
        self.index = index
        self.shapes: tuple[Any, Any] = (None, None)
        self._replica = replica
        self._log = log

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        token = current_replica.set(self.index)
        try:
            output = self._replica(*args, **kwargs)
        except Exception as error:
            raise replicas.ReplicaError(self.index, call_shape(args, kwargs), error) from error
        finally:
            current_replica.reset(token)
        self.shapes = (call_shape(args, kwargs), shape_of(output))
        return output
