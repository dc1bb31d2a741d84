"""What dpexp brings: the options of the config groups, and the types of their arguments."""

from __future__ import annotations

from typing import Any

GROUPS = {
    "dataset": (
        "cifar10",
        "custom",
        "digits",
        "hf",
        "image_folder",
        "images",
        "random",
        "tensors",
        "tokens",
    ),
    "model": (
        "cnn",
        "custom",
        "gpt",
        "gpt2_small",
        "gpt2_tiny",
        "linear",
        "mlp",
        "resnet18",
        "resnet50",
        "vit_b_16",
    ),
    "parallel": ("ddp", "dp", "fsdp", "none"),
    "optimizer": ("adamw", "custom", "sgd"),
    "sinks": ("custom", "mlflow", "none", "wandb"),
}
# Types of the built-in targets' arguments, so that a wrong one is refused without importing torch.
BUILTIN_ARGUMENTS: dict[str, dict[str, Any]] = {
    "dpexp.datasets.random_rows": {"rows": int, "features": int, "targets": int, "seed": int},
    "dpexp.datasets.digits": {"flatten": bool},
    "dpexp.datasets.images": {
        "rows": int,
        "channels": int,
        "height": int,
        "width": int,
        "classes": int,
        "seed": int,
    },
    "dpexp.datasets.tokens": {"rows": int, "length": int, "vocabulary": int, "seed": int},
    "dpexp.datasets.image_folder": {"path": str, "size": int},
    "dpexp.datasets.cifar10": {"path": str, "train": bool, "download": bool},
    "dpexp.datasets.hf": {"path": str, "split": str | None, "columns": list[str] | None},
    "dpexp.datasets.tensors": {"path": str, "inputs": str | None, "target": str | None},
    "dpexp.models.linear": {"in_features": int, "out_features": int},
    "dpexp.models.mlp": {"widths": list[int]},
    "dpexp.models.cnn": {"in_channels": int, "channels": list[int], "classes": int},
    "dpexp.models.gpt": {
        "vocabulary": int,
        "length": int,
        "width": int,
        "heads": int,
        "layers": int,
    },
    "dpexp.sinks.MlflowSink": {"tracking_uri": str | None, "experiment": str},
    "dpexp.sinks.WandbSink": {"project": str, "entity": str | None, "mode": str},
    "torch.optim.SGD": {"lr": float, "momentum": float, "weight_decay": float, "nesterov": bool},
    "torch.optim.AdamW": {"lr": float, "betas": list[float], "weight_decay": float},
}
