"""The interface of a sink."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dpexp.records import RunResult, StepRecord


class Sink(ABC):
    """Takes step records between steps. After `write` returns, they survive the process.

    A sink of the config group `sinks` is made after the run, in a process of its own, as
    ``target(run=FinishedRun, **arguments)``.
    """

    @abstractmethod
    def write(self, records: Sequence[StepRecord]) -> None:
        """Write records, in the order of their steps, and flush them to the file."""

    @abstractmethod
    def close(self) -> None:
        """Nothing more will come."""


@dataclass(frozen=True)
class FinishedRun:
    """What a sink of the config group gets: a run that has ended, well or not."""

    folder: Path  # absolute; run.json, shapes.csv and the other files of the run
    result: RunResult  # as in run.json: status, error, config, num_devices, num_processes, ...
    sweep: Path | None  # the folder of the sweep that the run is a cell of
    begin_s: float  # Unix time, estimated: when the table of steps was written, less its steps
