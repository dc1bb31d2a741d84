"""One process per device, torch's DistributedDataParallel."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from typing import Any, cast, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dpexp.batches import Inputs
from dpexp.errors import ConfigError
from dpexp.parallel.base import Strategy
from dpexp.parallel.chunks import own_or_borrowed, weighted
from dpexp.parallel.collectives import CollectiveLog
from dpexp.parallel.hooks import add_comm_hook
from dpexp.schedule import Indices, chunk_sizes
from dpexp.schema import CommHook, ParallelConfig

# torch's own sizes, where none is given.
FIRST_BUCKET_MIB, BUCKET_MIB = 1.0, 25.0


@final
class DistributedDataParallel(Strategy):
    """Rank r takes chunk r of the global batch; DDP averages the gradients.

    A rank without rows in a step borrows those of chunk 0 (chunks.py).
    """

    def wrap(self, model: nn.Module) -> None:
        options = self.plan.config.parallel
        self._wrapped: MeasuredDDP | None = None
        self._model: nn.Module = model
        if not any(parameter.requires_grad for parameter in model.parameters()):
            # torch refuses to wrap it, and there is no gradient to synchronise. But the ranks
            # shall agree on the weights, as DDP's constructor makes them.
            self.comm.spread([*model.parameters(), *model.buffers()])
            return
        with warnings.catch_warnings():
            # Deprecated since 2.13 in favour of a name that earlier versions do not know.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            self._model = self._wrapped = MeasuredDDP(
                model,
                device_ids=None if self.device.type == "cpu" else [self.device],
                bucket_cap_mb=None if options.bucket_cap_mb == "auto" else options.bucket_cap_mb,
                find_unused_parameters=bool(options.find_unused_parameters),
                static_graph=bool(options.static_graph),
                gradient_as_bucket_view=bool(options.gradient_as_bucket_view),
                broadcast_buffers=bool(options.broadcast_buffers),
            )
        if self.plan.backend == "gloo" and options.comm_hook is CommHook.powersgd:
            first_mib, _ = bucket_caps_mib(options)
            _refuse_several_buckets(model, first_mib)
        self.log = self._wrapped.log = self._timed_collectives(blocking=False)
        if add_comm_hook(self._wrapped, options, self.log):
            self.loss_divisor = 1.0

    def choose_rows(self, rows: Indices) -> Indices:
        return own_or_borrowed(rows, self.comm)

    def own_rows(self, global_rows: int) -> int:
        return chunk_sizes(global_rows, self.comm.world_size)[self.comm.rank]

    def forward(self, inputs: Inputs, rows: int) -> Any:
        self.shapes.muted = rows == 0
        return self._noted(self._model, inputs)

    def weigh(self, loss: torch.Tensor, rows: int, global_rows: int) -> torch.Tensor:
        return weighted(self._scalar(loss), rows, global_rows, self.loss_divisor)

    def synchronised(self, last: bool) -> AbstractContextManager[Any]:
        if last or self._wrapped is None:
            return super().synchronised(last)
        return self._wrapped.no_sync()

    def check_gradients(self, parameters: list[nn.Parameter]) -> None:
        options = self.plan.config.parallel
        if options.find_unused_parameters or options.static_graph or self._wrapped is None:
            return
        unused = sum(parameter.grad is None for parameter in parameters)
        if unused:
            # torch says so in the next forward; after a run's last step there is none, and the
            # gradients would stay those of this rank alone.
            raise ConfigError(
                "parallel.find_unused_parameters",
                False,
                f"the model did not use {unused} of its parameters in this step, and ddp waits for "
                "the gradients of all",
                fix="parallel.find_unused_parameters=true",
            )

    def close(self) -> None:
        # DDP must be gone before the process group is: see worker.py.
        del self._model, self._wrapped


def bucket_caps_mib(options: ParallelConfig) -> tuple[float, float]:
    """How large DDP makes the first bucket of a step, and how large the others.

    Where no size is given torch makes the first one small, so that it travels soon
    (torch/nn/parallel/distributed.py, `_BucketCapacityConfig`).
    """
    if options.bucket_cap_mb == "auto":
        return FIRST_BUCKET_MIB, BUCKET_MIB
    cap_mib = cast(float, options.bucket_cap_mb)
    return cap_mib, cap_mib


def _refuse_several_buckets(model: nn.Module, cap_mib: float) -> None:
    """torch's PowerSGD waits for collectives inside the callbacks of others.

    On gloo those of two buckets then wait for each other, for ever: a collective that never begins
    does not time out either.
    """
    sizes: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.nbytes
    if len(sizes) == 1 and sum(sizes.values()) <= cap_mib * 2**20:
        return
    mib = sum(sizes.values()) / 2**20
    raise ConfigError(
        "parallel.comm_hook",
        "powersgd",
        f"on gloo torch's PowerSGD needs all gradients in one bucket; here they are {mib:.3g} MiB "
        f"of {len(sizes)} format{'s' if len(sizes) > 1 else ''}",
        fix="parallel.comm_hook=fp16"
        if len(sizes) > 1
        else f"parallel.bucket_cap_mb={int(mib) + 1}",
    )


@final
class MeasuredDDP(TorchDDP):
    """torch's own, which notes when it sends the buffers before forward.

    There the ranks meet before their first bucket: a rank that is late is waited for there.
    """

    log: CollectiveLog | None = None

    def _sync_buffers(self) -> None:
        entry = None
        if self.log is not None:
            num_bytes = sum(buffer.nbytes for buffer in self.modules_buffers)
            entry = self.log.begin("broadcast", num_bytes, blocking=True)
        super()._sync_buffers()  # type: ignore[no-untyped-call]
        if self.log is not None and entry is not None:
            self.log.done(entry)
