"""What devices send each other in a step, computed from sizes alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dpexp.anatomy.data import Bucket, Buckets, Exchange, ModelFacts, Unit
from dpexp.plan import RunPlan
from dpexp.schema import CommHook, StrategyName, Task

MIB = 2**20
# powerSGD_hook's default min_compression_rate: a matrix is sent whole unless factors halve it.
_LEAST_GAIN = 2


def exchanges(
    model: nn.Module, facts: ModelFacts, plan: RunPlan, micro_batches: int
) -> tuple[Exchange, ...]:
    """The strategy's traffic in a full step; () where nothing is exchanged.

    An all-reduce of M bytes over n devices makes each send 2 (n-1)/n M on a ring, a gather or a
    reduce-scatter (n-1)/n M (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
    clusters of workstations", 2009). That FSDP costs two gathers and one reduce-scatter:
    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
    2020, section 7.
    """
    if plan.num_devices == 1 or plan.strategy is StrategyName.none:
        return ()
    if plan.strategy is StrategyName.dp:
        return _dp(facts, plan, micro_batches)
    if plan.strategy is StrategyName.ddp:
        return _ddp(model, facts, plan)
    return _fsdp(model, plan, micro_batches)


def ddp_buckets(model: nn.Module, plan: RunPlan, arrival: Sequence[int]) -> Buckets:
    """DDP's buckets, by torch's own assignment and as its constructor calls it.

    Without `find_unused_parameters` the first step has one bucket a type; after it buckets are
    built again in the order in which gradients came, and stay. With it they are built once, from
    the last parameter to the first.

    Args:
        arrival: indices of trainable parameters in the order of their gradients; empty = unknown.
    """
    from dpexp.parallel.ddp import bucket_caps_mib

    options = plan.config.parallel
    pairs = _reduced(model)
    tensors: list[torch.Tensor] = [parameter for _, parameter in pairs]
    sparse = [
        isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse for module, _ in pairs
    ]
    assign: Any = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
    first_cap, cap = (int(mib * MIB) for mib in bucket_caps_mib(options))
    rebuilt = bool(options.static_graph) or not options.find_unused_parameters
    indices, _ = assign(tensors, [sys.maxsize] if rebuilt else [first_cap, cap], sparse)
    first = _buckets(list(reversed(indices)), tensors)
    if not rebuilt:
        return Buckets(first, first, "from the last parameter to the first")
    known = len(arrival) == len(tensors)
    order = list(arrival) if known else list(reversed(range(len(tensors))))
    arriving, odd = [tensors[i] for i in order], [sparse[i] for i in order]
    indices, _ = assign(arriving, [first_cap, cap], odd, order)
    where = (
        "in which this model's gradients come"
        if known
        else "from the last parameter to the first, as assumed"
    )
    return Buckets(first, _buckets(indices, tensors), where)


def fsdp_units(model: nn.Module, wrap: Any) -> list[tuple[str, list[nn.Parameter]]]:
    """FSDP's units and their own parameters, in the order of the model; the root is last."""
    from dpexp.parallel.fsdp import units

    names = {id(module): name for name, module in model.named_modules()}
    taken: set[int] = set()
    found = []
    for unit in (*units(model, wrap), model):  # inner ones first
        own = [parameter for parameter in unit.parameters() if id(parameter) not in taken]
        taken.update(map(id, own))
        name = names[id(unit)] or "the rest"
        found.append((name, own))
    return [*reversed(found[:-1]), found[-1]]


def unit_facts(pairs: list[tuple[str, list[nn.Parameter]]]) -> tuple[Unit, ...]:
    """The units as plain data."""
    return tuple(
        Unit(name, sum(p.numel() for p in own), sum(p.nbytes for p in own)) for name, own in pairs
    )


def shard_bytes(tensor: torch.Tensor, ranks: int) -> int:
    """What rank 0 keeps of a tensor that is cut along its first dimension, padding included."""
    if tensor.dim() == 0 or tensor.numel() == 0:
        return tensor.nbytes
    rows = tensor.shape[0]
    return -(-rows // ranks) * (tensor.nbytes // rows)


def _dp(facts: ModelFacts, plan: RunPlan, micro_batches: int) -> tuple[Exchange, ...]:
    copied = (facts.parameter_bytes + facts.buffer_bytes) * micro_batches
    times = f" x {micro_batches} micro-batches" if micro_batches > 1 else ""
    further = plan.num_devices - 1
    model = Exchange(
        f"model, copied from device 0 to each of {further} further devices",
        copied,
        None,
        f"parameters + buffers{times}",
    )
    if plan.config.task is not Task.train:
        return (model,)
    back = Exchange(
        f"gradients, from each of {further} further devices to device 0",
        facts.gradient_bytes * micro_batches,
        None,
        f"gradients of trainable parameters{times}",
    )
    return (model, back)


def _ddp(model: nn.Module, facts: ModelFacts, plan: RunPlan) -> tuple[Exchange, ...]:
    if plan.config.task is not Task.train:
        return ()
    options, ranks = plan.config.parallel, plan.num_devices
    hook = options.comm_hook
    size, formula = facts.gradient_bytes, "gradients of trainable parameters"
    if hook in (CommHook.fp16, CommHook.bf16):
        size, formula = facts.trainable * 2, "2 bytes a trainable parameter"
    if hook is CommHook.powersgd:
        rank = options.powersgd_rank or 1
        size = _powersgd_bytes(model, rank)
        formula = (
            f"factors of rank {rank}, rank x (rows + columns), where they halve a matrix; all of "
            f"it in the first {options.powersgd_start} steps"
        )
    found = [Exchange("gradients, all-reduced", size, _ring(size, ranks, 2), formula)]
    if options.zero:
        found.append(
            Exchange(
                "updated parameters, each from the rank that has its state to all",
                facts.gradient_bytes,
                _ring(facts.gradient_bytes, ranks),
                "trainable parameters",
            )
        )
    if options.broadcast_buffers and facts.buffers:
        found.append(Exchange("buffers, from rank 0 to all", facts.buffer_bytes, None, "buffers"))
    return tuple(found)


def _fsdp(model: nn.Module, plan: RunPlan, micro_batches: int) -> tuple[Exchange, ...]:
    ranks, training = plan.num_devices, plan.config.task is Task.train
    again = training and bool(plan.config.parallel.reshard_after_forward)
    times = (2 if again else 1) * micro_batches
    gathered = times * ranks * sum(shard_bytes(p, ranks) for p in model.parameters())
    when = "in forward and in backward" if again else "in forward"
    passes = f" of {micro_batches} micro-batches" if micro_batches > 1 else ""
    found = [
        Exchange(
            "parameters, gathered",
            gathered,
            _ring(gathered, ranks),
            f"parameters, padded to {ranks} equal parts, {when}{passes}",
        )
    ]
    if training:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        reduced = ranks * sum(shard_bytes(p, ranks) for p in trained)
        formula = "gradients of trainable parameters, padded, once a step"
        found.append(
            Exchange("gradients, reduce-scattered", reduced, _ring(reduced, ranks), formula)
        )
    return tuple(found)


def _ring(size: int, ranks: int, passes: int = 1) -> int:
    return round(passes * size * (ranks - 1) / ranks)


def _powersgd_bytes(model: nn.Module, rank: int) -> int:
    total = 0
    for parameter in model.parameters():
        if not parameter.requires_grad or not parameter.numel():
            continue
        rows = parameter.shape[0] if parameter.dim() else 1
        columns = parameter.numel() // rows
        thin = min(rows, columns, rank)
        factors = (rows + columns) * thin
        numbers = factors if factors * _LEAST_GAIN < rows * columns else rows * columns
        total += numbers * parameter.element_size()
    return total


def _reduced(model: nn.Module) -> list[tuple[nn.Module, nn.Parameter]]:
    """Trainable parameters with their module, each once, in the order that DDP has them."""
    seen: set[int] = set()
    pairs = []
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                pairs.append((module, parameter))
    return pairs


def _buckets(indices: Sequence[Sequence[int]], tensors: list[torch.Tensor]) -> tuple[Bucket, ...]:
    return tuple(Bucket(len(own), sum(tensors[i].nbytes for i in own)) for own in indices)
