"""DDP's communication hooks: how gradients travel between ranks, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dpexp.parallel.collectives import CollectiveLog
from dpexp.schema import CommHook, ParallelConfig

Hook = Callable[[Any], "torch.futures.Future[torch.Tensor]"]


def add_comm_hook(model: TorchDDP, options: ParallelConfig, log: CollectiveLog | None) -> bool:
    """Let DDP send its gradients as ``parallel.comm_hook`` says, and note it in the log.

    fp16 and bf16 halve the bytes; powersgd sends two thin factors of each gradient matrix
    (Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
    Distributed Optimization", 2019).

    Returns:
        Whether gradients are added up over the ranks; else they are averaged, as DDP does. A sum
        saves dividing each bucket, for which a Python hook would need a pass over it.
    """
    hook, sent_bytes = _compressed(model, options)
    if log is None:
        if hook is not None:
            # Without annotations: torch compares them, and knows no strings in their place.
            model.register_comm_hook(None, lambda _state, bucket: hook(bucket))
        return False
    send = hook or _adding_up(model)

    def timed(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        entry = log.begin("all_reduce", sent_bytes(bucket))
        future = send(bucket)

        def done(future: torch.futures.Future[Any]) -> torch.Tensor:
            value = future.value()
            log.done(entry)
            sent: torch.Tensor = value[0] if isinstance(value, list) else value
            return sent

        return future.then(done)

    model.register_comm_hook(None, lambda _state, bucket: timed(bucket))
    return hook is None


def _adding_up(model: TorchDDP) -> Hook:
    """The sum over the ranks, by the model's own group.

    ``dist.all_reduce`` does the same and takes 20 us more of each bucket's backward pass.
    """
    group: Any = model.process_group
    options = dist.distributed_c10d.AllreduceOptions()
    options.asyncOp = True

    def added_up(bucket: Any) -> torch.futures.Future[Any]:
        buffer: torch.Tensor = bucket.buffer()
        if buffer.is_complex():
            buffer = torch.view_as_real(buffer)
        work: Any = group.allreduce([buffer], options)
        future: torch.futures.Future[Any] = work.get_future()
        return future

    return added_up


def _compressed(
    model: TorchDDP, options: ParallelConfig
) -> tuple[Hook | None, Callable[[Any], int]]:
    """The hook of the config, None without one, and how many bytes it sends of a bucket."""
    name = options.comm_hook
    if name is CommHook.fp16:
        group: Any = None  # the default one
        return lambda bucket: default_hooks.fp16_compress_hook(group, bucket), _half
    if name is CommHook.bf16:
        return _as_bf16, _half
    if name is CommHook.powersgd:
        state = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=options.powersgd_rank or 1,
            start_powerSGD_iter=options.powersgd_start or 2,
        )
        return lambda bucket: powerSGD_hook.powerSGD_hook(state, bucket), _powersgd_bytes(state)
    return None, _whole


def _whole(bucket: Any) -> int:
    buffer: torch.Tensor = bucket.buffer()
    if buffer.is_sparse:  # of an embedding with sparse gradients: what has a row is sent
        return buffer._indices().nbytes + buffer._values().nbytes
    return buffer.nbytes


def _half(bucket: Any) -> int:
    return 2 * int(bucket.buffer().numel())


def _powersgd_bytes(state: powerSGD_hook.PowerSGDState) -> Callable[[Any], int]:
    """What PowerSGD sends of a bucket: all of it at first, later two factors of each matrix.

    Source: powerSGD_hook's own rule of what is worth compressing.
    """

    def sent(bucket: Any) -> int:
        if state.iter < state.start_powerSGD_iter:
            return _whole(bucket)
        numbers = 0
        for gradient in bucket.gradients():
            matrix = gradient.view(gradient.shape[0], -1) if gradient.dim() else gradient.view(1, 1)
            rows, columns = matrix.shape
            rank = min(rows, columns, state.matrix_approximation_rank)
            factors = (rows + columns) * rank
            gain = factors * state.min_compression_rate < rows * columns
            numbers += factors if gain else rows * columns
        return numbers * int(bucket.buffer().element_size())

    return sent


def _as_bf16(bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """torch's own hook asks for NCCL and refuses a build without CUDA; this one does not."""
    whole: torch.Tensor = bucket.buffer()
    sent = whole.to(torch.bfloat16).div_(dist.get_world_size())
    future = dist.all_reduce(sent, async_op=True).get_future()

    def back(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        whole.copy_(done.value()[0])
        return whole

    return future.then(back)  # type: ignore[no-any-return]
