"""What one rank has to say of its steps."""

from __future__ import annotations

import os
from typing import Any

import torch

from dpexp.checkpointing import Checkpoints
from dpexp.device import peak_device_bytes, peak_resident_bytes
from dpexp.plan import RunPlan
from dpexp.recorder import Recorder
from dpexp.records import RankResult
from dpexp.shapes import ShapeLog
from dpexp.uncertainty import within_run


def rank_result(
    plan: RunPlan,
    recorder: Recorder,
    shapes: ShapeLog,
    rank: int,
    device: str,
    notes: tuple[str, ...],
    facts: dict[str, Any],
    saved: Checkpoints,
) -> RankResult:
    """The result so far; also of a rank whose steps ended early.

    Args:
        facts: of the model.
    """
    return RankResult(
        rank=rank,
        steps=recorder.steps,
        measured_steps=recorder.measured_steps,
        rows_seen=recorder.rows_seen,
        measured_global_rows=recorder.measured_global_rows,
        wall_s=recorder.wall_s,
        recording_s=recorder.recording_s,
        timing=recorder.timing(),
        peak_bytes=peak_resident_bytes(),
        peak_device_bytes=peak_device_bytes(plan, rank),
        losses=(recorder.first_loss, recorder.last_loss),
        threads=torch.get_num_threads(),
        device=device,
        pid=os.getpid(),
        shapes=shapes.records(),
        notes=notes,
        model=facts,
        comm=recorder.comm_summary(),
        checkpoint=saved.summary(),
        uncertainty=within_run(recorder.step_seconds(), recorder.measured_global_rows)
        if rank == 0
        else None,
    )
