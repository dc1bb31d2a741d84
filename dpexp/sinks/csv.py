"""``steps.rank<r>.csv`` or ``steps.host<h>.csv``, and ``shapes.csv``."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, fields
from functools import cache
from pathlib import Path
from typing import Any, final

from dpexp import env
from dpexp.files import SharedLines, write_whole
from dpexp.plan import RunPlan
from dpexp.records import ShapeRecord, StepRecord
from dpexp.sinks.base import Sink

_RANK = "rank"  # the first column of a table of several ranks
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


@final
class HostCsvSink(Sink):
    """One row per step of each rank of a host, in a table for all of them.

    Each rank appends its own at every flush, without the others: so a rank that ends early still
    writes what it has. The rows of a rank are in order; those of several are mixed.

    Args:
        path: made by the first of the ranks.
        rank: what the rows begin with.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self._lines = SharedLines(path, ",".join((_RANK, *_SIMPLE)) + "\n")
        self._rank = rank

    def write(self, records: Sequence[StepRecord]) -> None:
        self._lines.append("".join([f"{self._rank},{_line(record)}" for record in records]))

    def close(self) -> None:
        self._lines.close()


def step_table(folder: Path, plan: RunPlan, rank: int) -> Sink:
    """Where a rank's steps go: a table of its own, or among very many ranks its host's."""
    if not plan.by_host:
        return CsvSink(folder / f"steps.rank{rank}.csv", plan.num_devices)
    outer = env.outer_launcher()  # dpexp's own agent says it as torchrun does
    host = 0 if outer is None else outer.host
    return HostCsvSink(folder / f"steps.host{host}.csv", rank)


def steps_of(folder: Path, rank: int = 0) -> Iterator[StepRecord]:
    """The records of one rank of a run, from whichever table has them; none without a table."""
    own = folder / f"steps.rank{rank}.csv"
    for table in [own] if own.is_file() else sorted(folder.glob("steps.host*.csv")):
        found = False
        for number, record in _rows(table):
            if number in (None, rank):
                found = True
                yield record
        if found:
            return  # a rank is on one host


def read_steps(path: Path) -> Iterator[StepRecord]:
    """The records of a table of steps, of all ranks that are in it, with the digits that it has.

    A process that was killed may have left half a row; that one is left out.
    """
    return (record for _, record in _rows(path))


def _rows(path: Path) -> Iterator[tuple[int | None, StepRecord]]:
    """The rank, where the table names it, and the record of each whole row."""
    with path.open(encoding="utf-8", newline="") as file:
        heads = next(csv.reader([file.readline()]))
        shared = heads[0] == _RANK
        for line in file:
            cells = next(csv.reader([line]))
            if not line.endswith("\n") or len(cells) != len(heads):
                continue
            rank = int(cells.pop(0)) if shared else None
            simple = [read(cell) for read, cell in zip(_READERS, cells, strict=False)]
            replicas = tuple(int(cell) for cell in cells[len(_SIMPLE) :])
            yield rank, StepRecord._make([*simple, replicas])


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
