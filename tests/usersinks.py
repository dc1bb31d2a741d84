"""Sinks as a user writes them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from dpexp.records import StepRecord
from dpexp.sinks import FinishedRun, Sink


class Diary(Sink):
    """Writes what it gets into diary.json, and what is loaded around it."""

    def __init__(self, run: FinishedRun, title: str) -> None:
        self._path = run.folder / "diary.json"
        self._entry = {
            "title": title,
            "status": run.result.status,
            "error": run.result.error and asdict(run.result.error),
            "world": run.result.num_processes,
            "sweep": run.sweep and str(run.sweep),
            "begin_s": run.begin_s,
            "pid": os.getpid(),
            "here": str(Path.cwd()),
            "steps": [],
            "replica_rows": [],
            "losses": [],
        }

    def write(self, records: Sequence[StepRecord]) -> None:
        self._entry["steps"] += [record.step for record in records]
        self._entry["replica_rows"] += [list(record.replica_rows) for record in records]
        self._entry["losses"] += [record.loss for record in records]
        print("a sink may print")

    def close(self) -> None:
        self._path.write_text(json.dumps(self._entry), encoding="utf-8")


class Unreachable(Diary):
    """Its server does not answer."""

    def __init__(self, run: FinishedRun) -> None:
        super().__init__(run, "never")

    def close(self) -> None:
        raise ConnectionError("no answer\nfrom example.invalid")


class Gone(Unreachable):
    """Ends its process without a word."""

    def close(self) -> None:
        sys.stdout.flush()
        os._exit(7)


class NoSink:
    """Looks like one, and is none."""

    def __init__(self, run: FinishedRun) -> None:
        pass
