"""``steps.rank<r>.csv`` and ``shapes.csv``."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, fields
from functools import cache
from pathlib import Path
from typing import Any, final

from dpexp.files import write_whole
from dpexp.records import ShapeRecord, StepRecord
from dpexp.sinks.base import Sink

_SIMPLE = StepRecord._fields[:-1]  # all but replica_rows, which becomes one column per replica


_REAL = ("loss", "learning_rate")
# The columns that may be empty lie side by side.
_FIRST, _LAST = _SIMPLE.index("scatter_s"), _SIMPLE.index("learning_rate") + 1


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
    absent = tuple([value is None for value in record[_FIRST:_LAST]])
    values = [value for value in record[:-1] if value is not None]
    return _template(absent, len(record.replica_rows)) % (*values, *record.replica_rows)


@cache
def _template(absent: tuple[bool, ...], num_devices: int) -> str:
    """The format of a row; nanoseconds of a second, and more digits than a float32 loss has.

    Args:
        absent: which of the columns that may be empty are.
    """
    empty = {name for name, none in zip(_SIMPLE[_FIRST:_LAST], absent, strict=True) if none}
    cells = [
        "" if n in empty else "%.9g" if n.endswith("_s") or n in _REAL else "%d" for n in _SIMPLE
    ]
    return ",".join([*cells, *(["%d"] * num_devices)]) + "\n"


def read_steps(path: Path) -> Iterator[StepRecord]:
    """The records of a table of steps, with the digits that it has.

    A process that was killed may have left half a row at the end; that one is left out.
    """
    with path.open(encoding="utf-8", newline="") as file:
        heads = next(csv.reader([file.readline()]))
        for line in file:
            if not line.endswith("\n"):
                return
            cells = next(csv.reader([line]))
            simple = [read(cell) for read, cell in zip(_READERS, cells, strict=False)]
            replicas = tuple(int(cell) for cell in cells[len(_SIMPLE) : len(heads)])
            yield StepRecord._make([*simple, replicas])


def _reader(kind: str) -> Callable[[str], Any]:
    if kind == "bool":
        return lambda cell: cell == "1"
    number = float if "float" in kind else int
    return lambda cell: None if cell == "" else number(cell)


_READERS = [_reader(str(StepRecord.__annotations__[name])) for name in _SIMPLE]


def write_shapes(path: Path, records: Iterable[ShapeRecord]) -> None:
    """Write ``shapes.csv``, whole or not at all."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([spec.name for spec in fields(ShapeRecord)])
    writer.writerows(astuple(record) for record in records)
    write_whole(path, text.getvalue())
