"""The TensorBoard event file: scalars of the steps, the config as text, HParams, shapes."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import hparams, text

from dpexp.records import COMM_PARTS, DP_PARTS, PHASES, RunResult, ShapeRecord, StepRecord
from dpexp.sinks.base import Sink

# Every step up to here; beyond, one event per THIN_S of measured time: viewers sample anyway.
ALL_STEPS = 1000
THIN_S = 0.25


@final
class TensorBoardSink(Sink):
    """Exactly one event file in `folder`; one event holds all scalars of a step."""

    def __init__(self, folder: Path) -> None:
        # The record writer itself and not EventFileWriter, whose thread would write on while the
        # next steps are measured.
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.dpexp"
        self._file = (folder / name).open("wb")
        self._writer = RecordWriter(self._file)
        self._writer.write(
            Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString()
        )
        self._clock_s = 0.0
        self._written_s = 0.0
        self._last_step = -1
        self._pending: StepRecord | None = None

    def write(self, records: Sequence[StepRecord]) -> None:
        for record in records:
            self._clock_s += record.step_s
            if record.step >= ALL_STEPS and self._clock_s - self._written_s < THIN_S:
                self._pending = record
                continue
            self._write_step(record)
        self._file.flush()

    def text(self, tag: str, markdown: str) -> None:
        """A page of the Text tab."""
        self._add(text(tag, markdown), 0)  # type: ignore[no-untyped-call]

    def finish(self, result: RunResult, shapes: Sequence[ShapeRecord]) -> None:
        """The last step if it was thinned out, the run's summary, HParams and shapes."""
        if self._pending is not None:
            self._write_step(self._pending)
        summary = summary_scalars(result)
        step = max(self._last_step, 0)
        self._add_scalars(summary, step)
        row = hparams(  # type: ignore[no-untyped-call]
            hyperparameters(result), dict.fromkeys(summary, 0.0)
        )
        for part in row:
            self._add(part, step)
        self.text("shapes", shapes_table(shapes))
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write_step(self, record: StepRecord) -> None:
        self._add_scalars(step_scalars(record), record.step)
        self._last_step, self._written_s = record.step, self._clock_s
        self._pending = None

    def _add_scalars(self, scalars: dict[str, float], step: int) -> None:
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._add(Summary(value=values), step)

    def _add(self, summary: Any, step: int) -> None:
        event = Event(wall_time=time.time(), step=step, summary=summary)
        self._writer.write(event.SerializeToString())


def step_scalars(record: StepRecord) -> dict[str, float]:
    """The scalars of one step, by tag. TensorBoard keeps them as 32-bit floats."""
    scalars = {
        f"time/{phase}_ms": getattr(record, f"{phase}_s") * 1e3
        for phase in ("step", *PHASES, *DP_PARTS, *COMM_PARTS)
        if getattr(record, f"{phase}_s") is not None
    }
    if record.step_s > 0:  # a device's clock may be too coarse for a step
        scalars["throughput/samples_per_s"] = record.global_rows / record.step_s
    if record.comm_bytes is not None:
        scalars["comm/bytes_per_step"] = record.comm_bytes
    if record.bus_bytes_per_s is not None:
        scalars["comm/bus_gb_per_s"] = record.bus_bytes_per_s / 1e9
    scalars["memory/peak_mib"] = record.peak_bytes / 2**20
    if record.loss is not None:
        scalars["loss/train"] = record.loss
    if record.learning_rate is not None:
        scalars["optimizer/learning_rate"] = record.learning_rate
    scalars["shape/global_rows"] = record.global_rows
    for replica, rows in enumerate(record.replica_rows):
        scalars[f"shape/replica_{replica}_rows"] = rows
    return scalars


def summary_scalars(result: RunResult) -> dict[str, float]:
    """The run's figures over the measured steps: the metrics of the HParams tab."""
    throughput = result.throughput or {}
    step = (result.timing or {}).get("step")
    values = {
        "summary/samples_per_s": throughput.get("samples_per_s"),
        "summary/step_p50_ms": None if step is None or step.p50_s is None else step.p50_s * 1e3,
        "summary/step_p95_ms": None if step is None or step.p95_s is None else step.p95_s * 1e3,
    }
    if result.metric is not None:
        values[f"metric/{result.metric['name']}"] = result.metric["value"]
    return {tag: value for tag, value in values.items() if value is not None}


def hyperparameters(result: RunResult) -> dict[str, bool | float | str]:
    """One flat row, with the same columns for every strategy."""
    flat: dict[str, bool | float | str] = {
        "parallel": result.parallel,
        "num_devices": result.num_devices or 0,
        "num_processes": result.num_processes or 0,
        "device": result.device or "",
        "emulated": bool(result.emulated),
        "batch_size_global": (result.batch or {}).get("global", 0),
        "batch_size_per_device": (result.batch or {}).get("per_device", 0),
        "threads_per_process": result.threads_per_process or 0,
        "cores": result.environment.get("cores", 0),
    }
    skipped = ("parallel", "num_devices", "device")
    for key, value in _flatten({k: v for k, v in result.config.items() if k not in skipped}):
        flat[key] = value if isinstance(value, (bool, int, float, str)) else json.dumps(value)
    return flat


def _flatten(node: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in node.items():
        if isinstance(value, dict) and value:
            pairs += _flatten(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", value))
    return pairs


def code_block(content: str) -> str:
    """Markdown that shows `content` as it is, in one block."""
    return "\n".join("    " + line for line in content.splitlines())


def shapes_table(shapes: Sequence[ShapeRecord]) -> str:
    """A Markdown table of the shapes; a bar inside a value does not break it."""
    rows = ["| module | replica | input | output | count | steps |", "|---|---|---|---|---|---|"]
    for record in shapes:
        cells = (
            record.module or "(model)",
            record.replica,
            record.input_shape,
            record.output_shape,
            record.count,
            f"{record.first_step}–{record.last_step}",
        )
        rows.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)
