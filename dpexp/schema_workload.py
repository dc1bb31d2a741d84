"""The schema of what is done to models and batches: see schema.py."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from dpexp.schema_measuring import doc


class CompileMode(Enum):
    """torch.compile's modes."""

    default = "default"
    reduce_overhead = "reduce-overhead"
    max_autotune = "max-autotune"


class Preload(Enum):
    """Where a dataset is put before the first step."""

    none = "none"
    device = "device"


@dataclass(frozen=True)
class LoaderConfig:
    """How batches are fetched."""

    workers: int = doc("loader processes per rank; 0 fetches in the rank itself")
    prefetch: int = doc("batches that each loader process makes ahead")
    pin_memory: bool | None = doc("fetch into page-locked memory; null = on CUDA")
    persistent_workers: bool = doc("false starts new loader processes each epoch")
    timeout_s: float = doc("how long to wait for a loader process before the run fails")
    preload: Preload = doc("device puts the dataset on the device once, before the first step")


@dataclass(frozen=True)
class BatchConfig:
    """What of a batch the model gets, and what the loss."""

    inputs: Any = doc(
        "auto (all but the target), an index or key, a list of them, or {keyword: index or key}"
    )
    target: Any = doc("auto (the last entry of a tuple, else none), an index or key, or none")


@dataclass(frozen=True)
class PrepareConfig:
    """What is done to a model after it is built."""

    compile: bool = doc("torch.compile the model; its first steps are then warm-up")
    compile_mode: CompileMode = doc("torch's default, reduce-overhead or max-autotune")
    channels_last: bool = doc("images and convolutions with the channels last in memory")
    sync_batchnorm: bool = doc("BatchNorm over all ranks' rows (ddp and fsdp on CUDA)")
    init_from: str | None = doc("a .pt or .safetensors file with the initial weights")
