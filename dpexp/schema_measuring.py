"""The part of the config's schema that says what is measured, checked and disturbed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


def doc(text: str, section: str = "") -> Any:
    """A field without default (the default is in conf/), with its help text."""
    return field(metadata={"doc": text, "section": section})


class RanksFrom(Enum):
    """Who starts the ranks of a run."""

    auto = "auto"
    slurm = "slurm"


class Rerun(Enum):
    """Which cells of a sweep that is resumed run, instead of all that are not ok."""

    failed = "failed"
    all = "all"


@dataclass(frozen=True)
class CheckpointConfig:
    """When a training run saves its state, and how much of it stays."""

    every_s: float | None = doc("save the state of a training run about so often; null = never")
    every_steps: int | None = doc("save it after each so many steps; null = never")
    keep: int = doc("how many of the newest checkpoints stay")


@dataclass(frozen=True)
class UntilConfig:
    """When to stop measuring."""

    ci: float | None = doc(
        "stop when the mean step is known to within this share (0.02 = 2 %), at 95 %; null = "
        "after steps or epochs"
    )
    max_s: float = doc("with until.ci: stop after so many seconds of measured steps at the latest")


@dataclass(frozen=True)
class CheckConfig:
    """What is proved before anything is timed."""

    parity: bool | None = doc(
        "replay the first steps against a single device and compare loss, gradients and weights; "
        "null = in sweeps of task=train"
    )
    steps: int = doc("how many steps are replayed")


@dataclass(frozen=True)
class MeasureConfig:
    """What is measured beside the phases."""

    comm: bool = doc("time each collective of a training step: exposed, overlapped, waiting")
    calibration_pairs: int | None = doc(
        "ddp, fsdp: after warm-up, run so many pairs of extra steps with and without gradient "
        "exchange; null = 8 in sweeps of task=train (not fsdp on a GPU), else none"
    )
    flops: bool | None = doc(
        "count FLOPs and find the MFU and the parts of memory; null = in sweeps of task=train"
    )
    peak_flops_per_device: float | None = doc(
        "the peak that MFU refers to, in FLOP/s; null = measure a matrix product"
    )


@dataclass(frozen=True)
class InjectConfig:
    """Disturbances on purpose. A run with one says so wherever it is shown."""

    collective_delay_s: float = doc("each collective of a training step takes so much longer")
    slow_rank: int | None = doc("this rank (dp: this replica) computes slow_factor times as long")
    slow_factor: float = doc("how many times as long inject.slow_rank takes")
    data_delay_s: float = doc("each batch takes so much longer to fetch")
    data_rank: int | None = doc("only on this rank; null = on all")
    noisy_rank: int | None = doc("this rank pauses in each forward, for a random time")
    noise_s: float = doc("mean pause of inject.noisy_rank (exponentially distributed)")
    die_rank: int | None = doc("this rank kills itself at inject.at_step")
    hang_rank: int | None = doc("this rank hangs at inject.at_step")
    at_step: int = doc("the step for inject.die_rank and inject.hang_rank")
