"""nn.DataParallel's four steps over virtual devices on a CPU.

torch's own refuse CPU tensors. These have the same semantics: chunks of ceil(B/N) rows, as many
as there are rows for; replicas that are thrown away after forward and whose parameters are not
leaves; replica 0 sharing its storage with the model, so that only its in-place changes survive;
no call for an idle replica; one thread per replica. What they cannot imitate: the copies move
between caches instead of devices, the backward pass runs in one thread, and all replicas draw
random numbers from one generator.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, final

import torch
from torch import nn

from dpexp.batches import like


@final
class VirtualDevices:
    """N virtual devices: a thread each.

    Args:
        count: number of devices.
        threads_each: intra-op threads that each device's thread may use.
    """

    def __init__(self, count: int, threads_each: int) -> None:
        self._count = count
        self._threads_each = threads_each
        # Not one executor for all: it hands a call to a thread that is idle again, and of two short
        # calls both to the same one.
        self._threads = [
            ThreadPoolExecutor(1, f"dpexp-device-{device}", torch.set_num_threads, (threads_each,))
            for device in range(count)
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy gets threads of its own; they start when they are first needed.
        return VirtualDevices, (self._count, self._threads_each)

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Positional and keyword arguments per device; the shorter side is padded as torch does."""
        calls = _split(inputs, self._count) if inputs else []
        keywords = _split(kwargs, self._count) if kwargs else []
        calls += [()] * (len(keywords) - len(calls))
        keywords += [{} for _ in range(len(calls) - len(keywords))]
        return tuple(calls), tuple(keywords)

    def replicate(self, model: nn.Module, count: int) -> list[nn.Module]:
        """`count` copies of the model that share nothing but, in copy 0, the storage."""
        return _replicate(model, count, detach=not torch.is_grad_enabled())

    def parallel_apply(
        self, calls: Sequence[Callable[..., Any]], inputs: Sequence[Any], kwargs: Sequence[Any]
    ) -> list[Any]:
        """All calls at once, each in a device's thread. Raises the first failed replica's error."""
        grad = torch.is_grad_enabled()
        autocast, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

        def work(call: Callable[..., Any], args: Any, keywords: Any) -> Any:
            # Grad mode and autocast belong to a thread, so they have to be carried over.
            with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype, autocast):
                return call(*args, **keywords)

        if len(calls) == 1:
            return [work(calls[0], inputs[0], kwargs[0])]
        entries = zip(calls, inputs, kwargs, strict=True)
        jobs = [
            thread.submit(work, *entry)
            for thread, entry in zip(self._threads, entries, strict=False)  # idle devices
        ]
        errors = [job.exception() for job in jobs]  # waits for all: none may outlive the step
        for error in errors:
            if error is not None:
                raise error
        return [job.result() for job in jobs]

    def gather(self, outputs: Sequence[Any]) -> Any:
        """The outputs joined along dimension 0; scalars become a vector. Structure is kept."""
        first = outputs[0]
        if first is None:
            return None
        if isinstance(first, torch.Tensor):
            if first.dim() == 0:
                return torch.stack(list(outputs))
            return torch.cat(list(outputs))
        if isinstance(first, dict):
            if any(len(output) != len(first) for output in outputs):
                raise ValueError("All dicts must have the same number of keys")
            return type(first)((key, self.gather([o[key] for o in outputs])) for key in first)
        joined = [self.gather(entries) for entries in zip(*outputs, strict=True)]
        return like(first, joined)

    def close(self) -> None:
        """End the threads."""
        for thread in self._threads:
            thread.shutdown(wait=True)


def _split(value: Any, count: int) -> list[Any]:
    """`value` per device: tensors cut along dimension 0, everything else repeated."""
    if isinstance(value, torch.Tensor):
        return list(value.chunk(count))
    if isinstance(value, (tuple, list)) and value:
        return [like(value, part) for part in zip(*(_split(v, count) for v in value), strict=False)]
    if isinstance(value, dict) and value:
        parts = zip(*(_split(entry, count) for entry in value.values()), strict=False)
        return [type(value)(zip(value, part, strict=True)) for part in parts]
    return [value for _ in range(count)]


class _Broadcast(torch.autograd.Function):
    """`count` copies of each tensor; the gradients of the copies are added up, in order."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.count = count
        copies = [tensor.view_as(tensor) for tensor in tensors]  # device 0 keeps the storage
        for _ in range(count - 1):
            copies += [tensor.clone() for tensor in tensors]
        fixed = [i for i, tensor in enumerate(tensors) if not tensor.requires_grad]
        ctx.mark_non_differentiable(
            *(copies[i + len(tensors) * device] for device in range(count) for i in fixed)
        )
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        width = len(gradients) // ctx.count
        totals = list(gradients[:width])
        for device in range(1, ctx.count):
            for index in range(width):
                totals[index] = totals[index] + gradients[device * width + index]
        return (None, *totals)


def _copies(tensors: list[torch.Tensor], count: int, detach: bool) -> list[list[torch.Tensor]]:
    if not tensors:
        return [[] for _ in range(count)]
    if detach:
        return [tensors, *([t.detach().clone() for t in tensors] for _ in range(count - 1))]
    flat = _Broadcast.apply(count, *tensors)  # type: ignore[no-untyped-call]
    width = len(tensors)
    return [list(flat[device * width : (device + 1) * width]) for device in range(count)]


def _replicate(model: nn.Module, count: int, detach: bool) -> list[nn.Module]:
    parameters, buffers = list(model.parameters()), list(model.buffers())
    parameter_copies = _copies([*parameters], count, detach)
    buffer_copies = _copies([*buffers], count, detach=True)
    modules = list(model.modules())
    replicas: list[nn.Module] = []
    for device in range(count):
        values = dict(zip(map(id, parameters), parameter_copies[device], strict=True))
        values |= dict(zip(map(id, buffers), buffer_copies[device], strict=True))
        twins = {id(module): _twin(module) for module in modules}
        for module in modules:
            _fill(module, twins[id(module)], twins, values)
        replicas.append(twins[id(model)])
    return replicas


def _twin(module: nn.Module) -> Any:
    copy_shallow: Any = module._replicate_for_data_parallel  # plain attributes are shared
    twin = copy_shallow()
    twin._former_parameters = OrderedDict()  # as torch's own replicas have
    return twin


def _fill(
    module: nn.Module,
    twin: Any,
    twins: dict[int, nn.Module],
    values: dict[int, torch.Tensor],
) -> None:
    """Give a replica its own children, parameters (as plain tensors, not leaves) and buffers."""
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else twins[id(child)]
    for name, parameter in module._parameters.items():
        if parameter is None:
            twin._parameters[name] = None
        else:
            setattr(twin, name, values[id(parameter)])
            twin._former_parameters[name] = values[id(parameter)]
    for name, buffer in module._buffers.items():
        twin._buffers[name] = None if buffer is None else values[id(buffer)]
