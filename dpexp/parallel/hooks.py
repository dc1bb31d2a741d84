"""DDP's communication hooks: how gradients travel between ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dpexp.schema import CommHook, ParallelConfig


def add_comm_hook(model: TorchDDP, options: ParallelConfig) -> None:
    """Let DDP send its gradients as ``parallel.comm_hook`` says.

    fp16 and bf16 halve the bytes; powersgd sends two thin factors of each gradient matrix
    (Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
    Distributed Optimization", 2019).
    """
    hook = options.comm_hook
    if hook is CommHook.fp16:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook is CommHook.bf16:
        # Without annotations: torch compares them, and knows no strings in their place.
        model.register_comm_hook(None, lambda _state, bucket: _as_bf16(bucket))
    elif hook is CommHook.powersgd:
        state = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=options.powersgd_rank or 1,
            start_powerSGD_iter=options.powersgd_start or 2,
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _as_bf16(bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """torch's own hook asks for NCCL and refuses a build without CUDA; this one does not."""
    whole: torch.Tensor = bucket.buffer()
    sent = whole.to(torch.bfloat16).div_(dist.get_world_size())
    future = dist.all_reduce(sent, async_op=True).get_future()

    def back(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        whole.copy_(done.value()[0])
        return whole

    return future.then(back)  # type: ignore[no-any-return]
