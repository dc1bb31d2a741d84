"""The typed schema of the config: every key, its type and its documentation, once.

Values live in ``conf/``; ``--help`` is made from the docs below. The schema is applied after
composition (see config.py) rather than as a structured root node: a structured root would refuse
``+foo=1``, and typed group options would refuse the arguments of a user's own ``_target_``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Task(Enum):
    """What a step does."""

    forward = "forward"
    train = "train"


class Scaling(Enum):
    """What `batch_size` counts."""

    strong = "strong"
    weak = "weak"


class StrategyName(Enum):
    """How a batch is spread over devices."""

    none = "none"
    dp = "dp"
    ddp = "ddp"


class Backend(Enum):
    """The library that carries DDP's collectives."""

    auto = "auto"
    gloo = "gloo"
    nccl = "nccl"


def doc(text: str, section: str = "") -> Any:
    """A field without default (the default is in conf/), with its help text."""
    return field(metadata={"doc": text, "section": section})


@dataclass(frozen=True)
class LoaderConfig:
    """How batches are fetched."""

    workers: int = doc("loader processes per rank; 0 fetches in the rank itself")


@dataclass(frozen=True)
class ShapesConfig:
    """What is recorded of shapes."""

    depth: int = doc("0 records the model's own shapes, n also those of submodules n levels down")
    print: bool = doc("print the exercise's lines: sizes inside and outside the model")


@dataclass(frozen=True)
class ParallelConfig:
    """A strategy and its options; those of ddp are torch's own, with torch's meaning."""

    strategy: StrategyName = doc("set by the group: parallel=none, dp or ddp")
    timeout_s: float = doc("how long a rank waits for the others before the run fails")
    backend: Backend | None = doc("ddp: auto (nccl on CUDA, else gloo), gloo or nccl")
    bucket_cap_mb: float | None = doc("ddp: size of a gradient bucket in MiB")
    find_unused_parameters: bool | None = doc("ddp: look for parameters without gradient each step")
    static_graph: bool | None = doc("ddp: promise that the graph never changes")
    gradient_as_bucket_view: bool | None = doc("ddp: gradients are views into the buckets")
    broadcast_buffers: bool | None = doc("ddp: send rank 0's buffers to all before each forward")


@dataclass(frozen=True)
class Config:
    """A run's whole config as plain data: what the ranks get. Frozen, picklable, no OmegaConf."""

    dataset: dict[str, Any] = doc("random, digits, tensors, or custom with any _target_", "groups")
    model: dict[str, Any] = doc("linear, mlp, cnn, or custom with any _target_", "groups")
    parallel: ParallelConfig = doc("none, dp or ddp", "groups")
    optimizer: dict[str, Any] = doc("sgd, adamw, or custom with any _target_", "groups")
    task: Task = doc("forward (no gradients) or train (loss, backward, optimizer)", "what to run")
    loss: Any = doc(
        "auto (cross_entropy for integer targets, mse for others, or the model's own 0-dim "
        "output), mse, cross_entropy, output, or a node with a _target_",
        "what to run",
    )
    forward_kwargs: dict[str, Any] = doc("keyword arguments of every forward call", "what to run")
    seed: int = doc(
        "fixes the order of the samples, the data and the initial weights", "what to run"
    )
    save_weights: bool = doc(
        "write the final state_dict to weights.pt in the run's folder", "what to run"
    )
    device: str = doc(
        "auto, cpu, cuda, cuda:<i>, mps or xpu; auto = accelerator, else cpu", "devices"
    )
    num_devices: int | str = doc(
        "how many devices the batch is spread over; auto = all there are", "devices"
    )
    batch_size: int = doc(
        "rows of a batch: global under strong scaling, per device under weak", "batches"
    )
    scaling: Scaling = doc(
        "strong: batch_size is split over devices; weak: each gets batch_size", "batches"
    )
    epochs: int | None = doc("passes over the data; null = as many as steps needs", "batches")
    steps: int | None = doc("at most this many global batches; null = whole epochs", "batches")
    warmup_steps: int = doc("leading steps that are recorded but not in the statistics", "batches")
    drop_last: bool = doc("leave out an epoch's last batch when it is short", "batches")
    shuffle: bool = doc("a new order of the samples each epoch", "batches")
    loader: LoaderConfig = doc("how batches are fetched", "batches")
    shapes: ShapesConfig = doc("what is recorded of shapes", "records")
    extra: dict[str, Any] = field(default_factory=dict, metadata={"doc": "", "section": ""})


NESTED = {"parallel": ParallelConfig, "loader": LoaderConfig, "shapes": ShapesConfig}
GROUPS = {
    "dataset": ("custom", "digits", "random", "tensors"),
    "model": ("cnn", "custom", "linear", "mlp"),
    "parallel": ("ddp", "dp", "none"),
    "optimizer": ("adamw", "custom", "sgd"),
}

# Types of the built-in targets' arguments, so that a wrong one is refused without importing torch.
BUILTIN_ARGUMENTS: dict[str, dict[str, Any]] = {
    "dpexp.datasets.random_rows": {"rows": int, "features": int, "targets": int, "seed": int},
    "dpexp.datasets.digits": {"flatten": bool},
    "dpexp.datasets.tensors": {"path": str, "inputs": str | None, "target": str | None},
    "dpexp.models.linear": {"in_features": int, "out_features": int},
    "dpexp.models.mlp": {"widths": list[int]},
    "dpexp.models.cnn": {"in_channels": int, "channels": list[int], "classes": int},
    "torch.optim.SGD": {"lr": float, "momentum": float, "weight_decay": float, "nesterov": bool},
    "torch.optim.AdamW": {"lr": float, "betas": list[float], "weight_decay": float},
}
