"""Turns the loop's raw marks into step records, and hands them to the sinks between steps.

The loop only appends to a list. Everything that costs time (reading device clocks, adding up
losses over ranks, writing) happens in :meth:`Recorder.flush`, which runs between two steps and
belongs to neither; its cost is reported as ``recording_s``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import torch

from dpexp import timing
from dpexp.comm import Comm
from dpexp.comm_recorder import CommRecorder
from dpexp.comm_times import Steps
from dpexp.errors import NonFiniteLossError
from dpexp.lifeline import whole
from dpexp.plan import RunPlan
from dpexp.records import DP_PARTS, PHASES, PhaseSummary, StepRecord
from dpexp.rows import Row, Spans, part_spans, phase_spans
from dpexp.schedule import chunk_sizes
from dpexp.sinks import Sink
from dpexp.stats import summarize
from dpexp.uncertainty import relative_half_width

FLUSH_EVERY_S = 1.0
_NO_COMM = (None,) * 6


@final
class Recorder:
    """Collects the steps of one rank.

    Args:
        comm: for the loss over all ranks; flushes happen at the same steps on every rank.
        sinks: get every record, in order.
        loss_divisor: the strategy's; None = the number of ranks.
        comm_recorder: counts what collectives cost; None = they are not timed.
        first: the first step; the warm-up begins with it.
    """

    def __init__(
        self,
        plan: RunPlan,
        comm: Comm,
        clock: timing.Clock[Any],
        sinks: Sequence[Sink],
        loss_divisor: float | None = None,
        comm_recorder: CommRecorder | None = None,
        first: int = 0,
    ) -> None:
        self._plan = plan
        self._comm = comm
        self._clock = clock
        self._sinks = sinks
        self._loss_divisor = comm.world_size if loss_divisor is None else loss_divisor
        self._collectives = comm_recorder
        self._micro_batches = plan.config.accumulate
        self._warm_from = first + plan.config.warmup_steps
        self._rows: list[Row] = []
        self._next_flush = 1
        self._flushed = 0
        self._flushed_at_s = timing.now_s()
        self._chunks: dict[int, tuple[int, ...]] = {}
        # Seconds of the measured steps by phase, one array per flush.
        self._seconds: dict[str, list[Spans]] = {p: [] for p in ("step", *PHASES, *DP_PARTS)}
        self.steps = 0
        self.epochs = 0  # begun
        self.measured_steps = 0
        self.rows_seen = 0
        self.measured_global_rows = 0
        self.recording_s = 0.0
        self.enough = False  # until.ci or until.max_s is reached: the same on every rank
        self.first_loss: float | None = None
        self.last_loss: float | None = None

    def add(self, row: Row) -> None:
        """Keep one step. Called in the step; must stay cheap."""
        self._rows.append(row)

    def flush_due(self) -> bool:
        """Whether to flush after the current step: the same answer on every rank."""
        return len(self._rows) >= self._next_flush

    def flush(self, *, together: bool = True) -> None:
        """Write what was collected. A synchronisation point of device and ranks.

        Args:
            together: every rank flushes now. False in an emergency, when others may be gone:
                then a loss over several ranks is not known and stays empty.

        Raises:
            NonFiniteLossError: a loss is NaN or infinite; everything up to it is written.
        """
        # A signal may have come between a row and its last mark: such a row is not whole.
        rows = [row for row in self._rows if len(row.marks) % 2 == 1]
        if not rows:
            return  # every rank has the same steps, so none of them waits for this one
        began_s = timing.now_s()
        self._clock.settle()
        elapsed_s = began_s - self._flushed_at_s
        records, agreed = self._records(rows, together, elapsed_s)
        with whole():  # a step is in every file of the run or in none
            # Only now: if a rank was gone or a signal came, the next flush has them still.
            self._rows = []
            for sink in self._sinks:
                sink.write(records)
            self._account(records)
        ended_s = timing.now_s()
        self.recording_s += ended_s - began_s
        if together:
            self._pace(len(rows), agreed)
        self._flushed_at_s = ended_s
        for record in records:
            if record.loss is not None and not math.isfinite(record.loss):
                raise NonFiniteLossError(record.step)

    def resume(self) -> None:
        """Go on after a pause, which counts for no pace."""
        self._flushed_at_s = timing.now_s()

    def timing(self) -> dict[str, PhaseSummary]:
        """Statistics of every phase over the measured steps; parts only where there are any."""
        phases = {
            phase: summarize(np.concatenate(seconds) if seconds else [])
            for phase, seconds in self._seconds.items()
            if phase not in DP_PARTS or seconds
        }
        return {**phases, **({} if self._collectives is None else self._collectives.timing())}

    def step_seconds(self) -> Spans:
        """Of each measured step, shape [measured steps]."""
        seconds = self._seconds["step"]
        return np.concatenate(seconds) if seconds else np.zeros(0)

    def end_notes(self) -> tuple[str, ...]:
        """That the steps ended before the mean step was known as well as ``until.ci`` asked for."""
        until = self._plan.config.until
        if until.ci is None or self._comm.rank or self._is_narrow(self.step_seconds()):
            return ()
        width = relative_half_width(self.step_seconds())
        known = "not known: too few steps" if width is None else f"known to within {width:.1%}"
        return (f"until.ci={until.ci:g} was not reached: the mean step is {known}",)

    def finish(self) -> None:
        """After the last step and its flush. Waits for all ranks."""
        if self._collectives is not None:
            self._collectives.finish()

    def comm_summary(self) -> dict[str, Any] | None:
        """What collectives cost; None where they are not timed."""
        return None if self._collectives is None else self._collectives.summary()

    @property
    def wall_s(self) -> float:
        """Sum of the measured steps."""
        return float(sum(chunk.sum() for chunk in self._seconds["step"]))

    def _pace(self, steps: int, agreed: Sequence[float]) -> None:
        # The slowest one's time on all ranks: they flush after the same step, and wait there.
        longest_s, stop = agreed
        self.enough = stop > 0
        aim = int(steps * FLUSH_EVERY_S / max(longest_s, 1e-6))
        self._next_flush = max(1, min(2 * max(steps, 1), aim))

    def _own_pace(self, elapsed_s: float, latest_s: Spans) -> list[float]:
        """What this rank brings to :meth:`_pace`.

        A mean of rank 0's steps decides for all when it is known well enough.

        Args:
            latest_s: of the measured steps of this flush.
        """
        return [elapsed_s, float(self._comm.rank == 0 and self._is_enough(latest_s))]

    def _is_enough(self, latest_s: Spans) -> bool:
        until = self._plan.config.until
        if until.ci is None:
            return False
        steps_s = np.concatenate([self.step_seconds(), latest_s])
        return bool(steps_s.sum() >= until.max_s) or self._is_narrow(steps_s)

    def _is_narrow(self, steps_s: Spans) -> bool:
        wanted, width = self._plan.config.until.ci, relative_half_width(steps_s)
        return wanted is not None and width is not None and width <= wanted

    def _losses(self, rows: list[Row], together: bool) -> Callable[[], list[float | None]]:
        """Begin to add up the losses over the ranks. The result waits for all."""
        if rows[0].loss is None:
            return lambda: [None] * len(rows)
        local = torch.stack([row.loss for row in rows if row.loss is not None])
        values = local.cpu().double()  # not there: some devices have no float64
        if self._comm.world_size == 1:
            return values.tolist
        if not together:
            return lambda: [None] * len(rows)
        total = self._comm.sum_later(values)
        # The strategies weigh so that the mean over ranks is the mean over the batch's rows.
        return lambda: [each / self._loss_divisor for each in total().tolist()]

    def _records(
        self, rows: list[Row], together: bool, elapsed_s: float
    ) -> tuple[list[StepRecord], list[float]]:
        """The records, and what :meth:`_pace` needs. Waits for all ranks if `together`."""
        losses = self._losses(rows, together)  # on its way while the times are exchanged
        spans = phase_spans(rows, self._clock, self._micro_batches)
        parts = part_spans(rows, self._clock, self._micro_batches)
        measured = [row.step >= self._warm_from for row in rows]
        steps_s = spans.sum(axis=1)
        phases = spans.tolist()
        absent: list[Any] = [[None] * len(DP_PARTS)] * len(rows)
        dp_parts = absent if parts is None else parts.tolist()
        pace = self._own_pace(elapsed_s, steps_s[measured])
        comm, agreed = self._comm_columns(rows, spans, measured, together, pace)
        values = (rows, measured, steps_s.tolist(), phases, dp_parts, comm, losses())
        self._keep(spans[measured], parts, measured)
        records = [
            StepRecord._make(
                [
                    row.step,
                    row.epoch,
                    not counted,
                    row.global_rows,
                    row.rows,
                    step,
                    *phase,
                    *parts_of,
                    *comm_of,
                    loss,
                    row.learning_rate,
                    row.peak_bytes,
                    self._chunk_sizes(row.global_rows),
                ]
            )
            for row, counted, step, phase, parts_of, comm_of, loss in zip(*values, strict=True)
        ]
        return records, agreed

    def _comm_columns(
        self,
        rows: list[Row],
        phases: Spans,
        measured: list[bool],
        together: bool,
        pace: list[float],
    ) -> tuple[list[Any], list[float]]:
        """For each row the values of the record from comm_exposed_s on. Waits for all ranks.

        Args:
            pace: this rank's; it travels with the times, so that it needs no exchange of its own.

        Returns:
            Them, and the highest pace of all ranks.
        """
        if self._collectives is None:
            if together:
                pace = self._comm.highest(torch.tensor(pace, dtype=torch.float64)).tolist()
            return [_NO_COMM] * len(rows), pace
        steps = Steps(
            [row.step for row in rows],
            [row.marks for row in rows],
            phases,
            np.array(measured),
            [row.collectives for row in rows],
        )
        found, agreed = self._collectives.account(steps, together=together, beside=pace)
        return list(zip(*found, strict=True)), agreed

    def _keep(self, phases: Spans, parts: Spans | None, measured: list[bool]) -> None:
        """Keep the seconds of measured steps for the summary."""
        self._seconds["step"].append(phases.sum(axis=1))
        for index, phase in enumerate(PHASES):
            self._seconds[phase].append(phases[:, index])
        if parts is not None:
            for index, part in enumerate(DP_PARTS):
                self._seconds[part].append(parts[measured][:, index])

    def _chunk_sizes(self, global_rows: int) -> tuple[int, ...]:
        if self._plan.by_host:
            return ()
        if global_rows not in self._chunks:
            self._chunks[global_rows] = chunk_sizes(global_rows, self._plan.num_devices)
        return self._chunks[global_rows]

    def _account(self, records: list[StepRecord]) -> None:
        self.steps += len(records)
        self.epochs = records[-1].epoch + 1
        self.rows_seen += sum(record.rows for record in records)
        counted = [record.global_rows for record in records if not record.warmup]
        self.measured_steps += len(counted)
        self.measured_global_rows += sum(counted)
        losses = [record.loss for record in records if record.loss is not None]
        if losses:
            self.first_loss = losses[0] if self.first_loss is None else self.first_loss
            self.last_loss = losses[-1]
