"""What is the same in every experiment tracker: which steps, names, tags and files of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

from dpexp.config import flat
from dpexp.events.hparams import hyperparameters, overrides_of
from dpexp.records import StepRecord
from dpexp.sinks.base import FinishedRun
from dpexp.sinks.tensorboard import ALL_STEPS, THIN_S

# Small ones, which say what the figures mean.
ARTIFACTS = ("run.json", "shapes.csv")


@final
class Thinned:
    """The steps that a tracker gets, as in TensorBoard: the first ones, the last, some between."""

    def __init__(self, run: FinishedRun) -> None:
        self._clock_s = run.begin_s
        self._taken_s = run.begin_s
        self._left: tuple[StepRecord, float] | None = None
        self.end_s = run.begin_s
        self.last_step = 0

    def take(self, records: Sequence[StepRecord]) -> Iterator[tuple[StepRecord, float]]:
        """Those of `records` that are written, with the Unix time of their end."""
        for record in records:
            self._clock_s += record.step_s
            self.end_s, self.last_step = self._clock_s, record.step
            if record.step >= ALL_STEPS and self._clock_s - self._taken_s < THIN_S:
                self._left = record, self._clock_s
                continue
            self._taken_s, self._left = self._clock_s, None
            yield record, self._clock_s

    def rest(self) -> Iterator[tuple[StepRecord, float]]:
        """The last step, if it was thinned out."""
        if self._left is not None:
            yield self._left


def parameters(run: FinishedRun) -> dict[str, bool | float | str]:
    """The whole config by dotted key, and the columns of TensorBoard's HParams."""
    known: dict[str, bool | float | str] = {}
    for key, value in flat(run.result.config).items():
        known[key] = value if isinstance(value, (bool, int, float, str)) else json.dumps(value)
    return {**known, **hyperparameters(run.result, overrides_of(run.folder))}


def tags(run: FinishedRun) -> dict[str, str]:
    """What tells runs apart, and what must be known with each figure."""
    result = run.result
    known = {
        "label": result.label,
        "strategy": result.parallel,
        "status": result.status,
        "emulated": str(bool(result.emulated)).lower(),
        "repeat": str(result.repeat),
        "folder": str(run.folder),
    }
    if run.sweep is not None:
        known["sweep"] = str(run.sweep)
    if result.injected:
        known["injected"] = "; ".join(result.injected)
    if result.error is not None:
        known["error"] = f"{result.error.kind}: {result.error.type}: {result.error.message}"
    return known


def artifacts(run: FinishedRun) -> list[Path]:
    """The files of the run that a tracker gets; a run that failed early has not all of them."""
    return [run.folder / name for name in ARTIFACTS if (run.folder / name).is_file()]
