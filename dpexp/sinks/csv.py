"""``steps.rank<r>.csv`` and ``shapes.csv``."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import final

from dpexp.files import write_whole
from dpexp.records import ShapeRecord, StepRecord
from dpexp.sinks.base import Sink

_SIMPLE = StepRecord._fields[:-1]  # all but replica_rows, which becomes one column per replica


@final
class CsvSink(Sink):
    """One row per step of one rank. Every flush leaves whole rows behind.

    Args:
        path: created or emptied.
        num_devices: as many ``replica_<i>_rows`` columns.
    """

    def __init__(self, path: Path, num_devices: int) -> None:
        self._file = path.open("w", encoding="utf-8", newline="")
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._writer.writerow([*_SIMPLE, *(f"replica_{i}_rows" for i in range(num_devices))])
        self._file.flush()

    def write(self, records: Sequence[StepRecord]) -> None:
        self._writer.writerows(
            (*map(_cell, record[:-1]), *record.replica_rows) for record in records
        )
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _cell(value: object) -> object:
    if isinstance(value, float):
        return f"{value:.9g}"  # nanoseconds of a second, and more digits than a float32 loss has
    return int(value) if isinstance(value, bool) else value


def write_shapes(path: Path, records: Iterable[ShapeRecord]) -> None:
    """Write ``shapes.csv``, whole or not at all."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([spec.name for spec in fields(ShapeRecord)])
    writer.writerows(astuple(record) for record in records)
    write_whole(path, text.getvalue())
