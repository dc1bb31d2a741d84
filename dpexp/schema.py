"""The typed schema of the config: every key, its type and its documentation, once.

Values live in ``conf/``; ``--help`` is made from the docs below. It is applied after composition
(config.py): a structured root would refuse ``+foo=1``, and the arguments of a user's own class.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from dpexp.schema_measuring import (
    CheckConfig,
    CheckpointConfig,
    InjectConfig,
    MeasureConfig,
    RanksFrom,
    Rerun,
    UntilConfig,
    doc,
)
from dpexp.schema_workload import BatchConfig, LoaderConfig, PrepareConfig


class Task(Enum):
    """What a step does."""

    forward = "forward"
    train = "train"
    evaluate = "evaluate"


class Scaling(Enum):
    """What `batch_size` counts."""

    strong = "strong"
    weak = "weak"


class StrategyName(Enum):
    """How a batch is spread over devices."""

    none = "none"
    dp = "dp"
    ddp = "ddp"
    fsdp = "fsdp"


# Strategies whose devices belong to one process; the others have one process per device.
ONE_PROCESS = (StrategyName.none, StrategyName.dp)


class Precision(Enum):
    """The number format of a step's arithmetic; parameters stay 32-bit floats."""

    fp32 = "fp32"
    tf32 = "tf32"
    bf16 = "bf16"
    fp16 = "fp16"


class CommHook(Enum):
    """How DDP carries its gradients."""

    none = "none"
    fp16 = "fp16"
    bf16 = "bf16"
    powersgd = "powersgd"


class Backend(Enum):
    """The library that carries the collectives of ddp and fsdp."""

    auto = "auto"
    gloo = "gloo"
    nccl = "nccl"


@dataclass(frozen=True)
class ShapesConfig:
    """What is recorded of shapes."""

    depth: int = doc("0 records the model's own shapes, n also those of submodules n levels down")
    print: bool = doc("print the exercise's lines: sizes inside and outside the model")


@dataclass(frozen=True)
class ParallelConfig:
    """A strategy and its options; those of ddp and fsdp are torch's own, with torch's meaning."""

    strategy: StrategyName = doc("set by the group: parallel=none, dp, ddp or fsdp")
    timeout_s: float = doc("how long a rank waits for the others before the run fails")
    ranks_from: RanksFrom = doc("auto: torchrun's, else dpexp's own; slurm: the tasks of an srun")
    interface: str | None = doc("the network interface of a run on several hosts (lo, eth0, ib0)")
    max_restarts: int = doc("how often all ranks start again after one of them was lost")
    backend: Backend | None = doc("ddp, fsdp: auto (nccl on CUDA, else gloo), gloo or nccl")
    bucket_cap_mb: Any | None = doc(
        "ddp: size of a gradient bucket in MiB; auto = torch's own (25, the first bucket 1)"
    )
    find_unused_parameters: bool | None = doc("ddp: look for parameters without gradient each step")
    static_graph: bool | None = doc("ddp: promise that the graph never changes")
    gradient_as_bucket_view: bool | None = doc("ddp: gradients are views into the buckets")
    broadcast_buffers: bool | None = doc("ddp: send rank 0's buffers to all before each forward")
    comm_hook: CommHook | None = doc("ddp: send gradients as they are, as fp16, bf16 or powersgd")
    powersgd_rank: int | None = doc("ddp: columns of powersgd's factors; more are more exact")
    powersgd_start: int | None = doc("ddp: steps before powersgd begins to compress; 2 or more")
    zero: bool | None = doc("ddp: each rank keeps a part of the optimizer's state (ZeRO)")
    wrap: Any | None = doc(
        "fsdp: what is sharded as a unit: blocks (what the model repeats), model (one unit), "
        "class names in a list, or modules of at least so many parameters"
    )
    reshard_after_forward: bool | None = doc("fsdp: free gathered parameters until backward")


@dataclass(frozen=True)
class Config:
    """A run's whole config as plain data: what the ranks get. Frozen, picklable, no OmegaConf."""

    dataset: dict[str, Any] = doc(
        "random, images, tokens, digits, tensors, image_folder, cifar10, hf, or custom with any "
        "_target_",
        "groups",
    )
    model: dict[str, Any] = doc(
        "linear, mlp, cnn, gpt, resnet18, resnet50, vit_b_16, gpt2_tiny, gpt2_small, or custom "
        "with any _target_",
        "groups",
    )
    parallel: ParallelConfig = doc("none, dp, ddp or fsdp", "groups")
    optimizer: dict[str, Any] = doc("sgd, adamw, or custom with any _target_", "groups")
    sinks: dict[str, Any] = doc(
        "where runs are written besides their folder: none, mlflow, wandb, custom with any "
        "_target_, or several in brackets",
        "groups",
    )
    task: Task = doc(
        "forward (no gradients), train (loss, backward, optimizer) or evaluate (metric over all "
        "samples)",
        "what to run",
    )
    loss: Any = doc(
        "auto (cross_entropy for integer targets, mse for others, or the model's own 0-dim "
        "output), mse, l1, bce_with_logits, cross_entropy, output, or a node with a _target_",
        "what to run",
    )
    metric: Any = doc(
        "for evaluate: auto (accuracy for integer targets, mse for others, or the model's own "
        "output), accuracy, mse, l1, cross_entropy, output, or a node with a _target_",
        "what to run",
    )
    lr_scheduler: Any = doc(
        "none, cosine or linear (both to 0 at the last step), or a node with a _target_; it moves "
        "each step",
        "what to run",
    )
    clip_grad_norm: float | None = doc(
        "largest norm of the gradient over all parameters; null = no clipping", "what to run"
    )
    precision: Precision = doc(
        "fp32, tf32 (CUDA), bf16 or fp16 (autocast; fp16 with a gradient scaler)", "what to run"
    )
    prepare: PrepareConfig = doc("what is done to the model after it is built", "what to run")
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
    pin: bool = doc(
        "on a CPU: cores of its own for each rank, which no other pinned run takes meanwhile",
        "devices",
    )
    batch_size: int | str = doc(
        "rows of a batch: global under strong scaling, per device under weak; auto = as many as "
        "fit",
        "batches",
    )
    accumulate: int = doc(
        "micro-batches that each device's rows of a step are cut into; one update", "batches"
    )
    batch: BatchConfig = doc("what of a batch the model gets, and what the loss", "batches")
    scaling: Scaling = doc(
        "strong: batch_size is split over devices; weak: each gets batch_size", "batches"
    )
    epochs: int | None = doc("passes over the data; null = as many as steps needs", "batches")
    steps: int | None = doc("at most this many global batches; null = whole epochs", "batches")
    warmup_steps: int = doc("leading steps that are recorded but not in the statistics", "batches")
    drop_last: bool = doc("leave out an epoch's last batch when it is short", "batches")
    shuffle: bool = doc("a new order of the samples each epoch", "batches")
    loader: LoaderConfig = doc("how batches are fetched", "batches")
    watchdog_s: float | None = doc(
        "a run whose ranks all come to no other phase for so long hangs and is ended; null = never",
        "limits",
    )
    process_memory_mib: float | None = doc(
        "resident memory that each process may use before the run ends as oom; null = no limit. "
        "On a CPU also the limit of batch_size=auto",
        "limits",
    )
    checkpoint: CheckpointConfig = doc("when a training run saves its state", "limits")
    until: UntilConfig = doc("when to stop measuring", "measuring")
    repeats: int = doc(
        "in a sweep: how often each cell runs, interleaved, in an order drawn from the seed",
        "measuring",
    )
    repeat: int = doc("which repeat this run is; set by a sweep with repeats", "measuring")
    resume: Any = doc("what to go on with: a folder, last (sweep), true (newest run)", "measuring")
    rerun: Rerun | None = doc(
        "with resume: failed (cells that began and are not ok) or all; null = all that are not ok",
        "measuring",
    )
    check: CheckConfig = doc("what is proved before anything is timed", "measuring")
    measure: MeasureConfig = doc("what is measured beside the phases", "measuring")
    trace: bool = doc(
        "after the timed steps, write a torch.profiler trace of a few more per rank", "measuring"
    )
    inject: InjectConfig = doc("disturbances on purpose, to see what is said of them", "measuring")
    shapes: ShapesConfig = doc("what is recorded of shapes", "records")
    extra: dict[str, Any] = field(default_factory=dict, metadata={"doc": "", "section": ""})


NESTED = {
    "parallel": ParallelConfig,
    "prepare": PrepareConfig,
    "batch": BatchConfig,
    "loader": LoaderConfig,
    "checkpoint": CheckpointConfig,
    "until": UntilConfig,
    "check": CheckConfig,
    "measure": MeasureConfig,
    "inject": InjectConfig,
    "shapes": ShapesConfig,
}
# Options of `parallel` by the strategies that have them; null for the others.
OPTIONS = {
    StrategyName.ddp: (
        "backend",
        "bucket_cap_mb",
        "find_unused_parameters",
        "static_graph",
        "gradient_as_bucket_view",
        "broadcast_buffers",
        "comm_hook",
        "powersgd_rank",
        "powersgd_start",
        "zero",
    ),
    StrategyName.fsdp: ("backend", "wrap", "reshard_after_forward"),
}
