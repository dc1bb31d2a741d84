"""The TensorBoard event file: scalars of the steps, the config as text, HParams, shapes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import final

from dpexp.events.file import EventFile
from dpexp.events.hparams import hparams_row, hyperparameters, overrides_of, summary_scalars
from dpexp.events.layout import run_layout
from dpexp.records import COMM_PARTS, DP_PARTS, PHASES, RunResult, ShapeRecord, StepRecord
from dpexp.sinks.base import Sink

# Every step up to here; beyond, one event per THIN_S of measured time: viewers sample anyway.
ALL_STEPS = 1000
THIN_S = 0.25
# In a table that somebody reads. Each rank has some; shapes.csv has them all.
MOST_SHAPES = 1000


@final
class TensorBoardSink(Sink):
    """Exactly one event file in `folder`; one event holds all scalars of a step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = EventFile(folder)
        self._file.add(run_layout())
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
        self._file.text(tag, markdown)

    def finish(self, result: RunResult, shapes: Sequence[ShapeRecord]) -> None:
        """The last step if it was thinned out, the run's summary, HParams and shapes."""
        if self._pending is not None:
            self._write_step(self._pending)
        summary = summary_scalars(result)
        self._file.scalars(summary, max(self._last_step, 0))
        row = hyperparameters(result, overrides_of(self._folder))
        for part in hparams_row(row, result.status, list(summary)):
            self._file.add(part)
        self.text("shapes", shapes_table(shapes))
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write_step(self, record: StepRecord) -> None:
        self._file.scalars(step_scalars(record), record.step)
        self._last_step, self._written_s = record.step, self._clock_s
        self._pending = None


def step_scalars(record: StepRecord) -> dict[str, float]:
    """The scalars of one step, by tag. TensorBoard keeps them as 32-bit floats."""
    scalars = {
        f"time/{phase}_ms": getattr(record, f"{phase}_s") * 1e3
        for phase in ("step", *PHASES, *DP_PARTS, *COMM_PARTS)
        if getattr(record, f"{phase}_s") is not None
    }
    if record.scatter_s is not None:
        # dp stands still while it copies, so this is always 0; TensorBoard's cost grows with tags.
        scalars.pop("time/comm_overlapped_ms", None)
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


def shapes_table(shapes: Sequence[ShapeRecord]) -> str:
    """A Markdown table of the shapes, of very many the first ones; a bar breaks nothing."""
    rows = ["| module | replica | input | output | count | steps |", "|---|---|---|---|---|---|"]
    for record in shapes[:MOST_SHAPES]:
        cells = (
            record.module or "(model)",
            record.replica,
            record.input_shape,
            record.output_shape,
            record.count,
            f"{record.first_step}–{record.last_step}",
        )
        rows.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    left = len(shapes) - MOST_SHAPES
    return "\n".join([*rows, "", f"{left:,} more are in shapes.csv"] if left > 0 else rows)
