"""``steps.rank<r>.csv`` and ``shapes.csv``."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import astuple, fields
from functools import cache
from pathlib import Path
from typing import final

from dpexp.files import write_whole
from dpexp.records import DP_PARTS, ShapeRecord, StepRecord
from dpexp.sinks.base import Sink

_SIMPLE = StepRecord._fields[:-1]  # all but replica_rows, which becomes one column per replica


_COMM = ("comm_exposed_s", "comm_overlapped_s", "comm_bytes")
_REAL = ("loss", "learning_rate")


@final
class CsvSink(Sink):
    """One row per step of one rank. Every flush leaves whole rows behind.

    Args:
        path: created or emptied.
        num_devices: as many ``replica_<i>_rows`` columns.
    """

    def __init__(self, path: Path, num_devices: int) -> None:
        self._file = path.open("w", encoding="utf-8", newline="")
        heads = [*_SIMPLE, *(f"replica_{i}_rows" for i in range(num_devices))]
        csv.writer(self._file, lineterminator="\n").writerow(heads)
        self._file.flush()

    def write(self, records: Sequence[StepRecord]) -> None:
        self._file.writelines(_line(record) for record in records)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _line(record: StepRecord) -> str:
    """One row. Formatted at once: the csv module takes four times as long for plain numbers."""
    template = _template(
        record.scatter_s is None,
        record.comm_exposed_s is None,
        record.straggler_wait_s is None,
        record.comm_arrival_s is None,
        record.bus_bytes_per_s is None,
        record.loss is None,
        record.learning_rate is None,
        len(record.replica_rows),
    )
    values = [value for value in record[:-1] if value is not None]
    return template % (*values, *record.replica_rows)


@cache
def _template(
    no_parts: bool,
    no_comm: bool,
    no_waiting: bool,
    no_arrival: bool,
    no_bus: bool,
    no_loss: bool,
    no_rate: bool,
    num_devices: int,
) -> str:
    """The format of a row; nanoseconds of a second, and more digits than a float32 loss has."""
    absent = {
        *((f"{part}_s" for part in DP_PARTS) if no_parts else ()),
        *(_COMM if no_comm else ()),
        *(("straggler_wait_s",) if no_waiting else ()),
        *(("comm_arrival_s",) if no_arrival else ()),
        *(("bus_bytes_per_s",) if no_bus else ()),
        *(("loss",) if no_loss else ()),
        *(("learning_rate",) if no_rate else ()),
    }
    cells = [
        "" if n in absent else "%.9g" if n.endswith("_s") or n in _REAL else "%d" for n in _SIMPLE
    ]
    return ",".join([*cells, *(["%d"] * num_devices)]) + "\n"


def write_shapes(path: Path, records: Iterable[ShapeRecord]) -> None:
    """Write ``shapes.csv``, whole or not at all."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([spec.name for spec in fields(ShapeRecord)])
    writer.writerows(astuple(record) for record in records)
    write_whole(path, text.getvalue())
