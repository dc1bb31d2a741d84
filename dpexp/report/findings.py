"""What a report shows of each run besides the scaling figures. Pure; works on run.json data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpexp.report.cells import Run
from dpexp.report.parity import parity_row
from dpexp.report.scaling import Cell
from dpexp.report.waterfall import WAITING, mean_of, spent

# In place of a status, of a run whose result cannot be read, and of one that has none.
UNREADABLE = "unreadable"
CUT_OFF = "cut off"


@dataclass(frozen=True)
class Failure:
    """One run that did not end well; also one that was skipped, or has no readable result."""

    folder: str
    label: str
    status: str  # failed | interrupted | skipped | unreadable | cut off
    kind: str | None  # one of records.KINDS
    rank: int | None
    phase: str | None
    step: int | None
    message: str
    traceback: str | None


@dataclass(frozen=True)
class ShapeRow:
    """How often one replica of a cell saw one pair of shapes."""

    folder: str
    label: str
    module: str  # "" for the model itself
    replica: int
    input_shape: str
    output_shape: str
    count: int


@dataclass(frozen=True)
class Breakdown:
    """Where a cell's mean step goes, in seconds; the parts add up to `step_s`.

    As the rank sees it that waited most for others. `forward` and `backward` are without what is
    exposed communication or waiting; `other` includes what the observer does not see of the slowest
    rank's step, so it may be a little negative.
    """

    folder: str
    label: str
    step_s: float
    parts_s: dict[str, float]
    emulated: bool


@dataclass(frozen=True)
class MemoryPoint:
    """The peak memory of a cell, for memory over devices and the out-of-memory frontier."""

    folder: str
    parallel: str
    num_devices: int
    setting: str
    batch_per_device: int | None
    peak_bytes: int | None  # of the process or the device with the most; None if it is not known
    scope: str  # "process" (resident memory) or "device"
    out_of_memory: bool


BREAKDOWN_PARTS = (
    "data",
    "transfer",
    "forward",
    "backward",
    "exposed_communication",
    "waiting",
    "optimizer",
    "other",
)
_SHORT = {WAITING: "waiting"}


def failures_of(cells: Sequence[Cell], runs: Mapping[str, Run]) -> Iterator[Failure]:
    """The runs that did not end well, in the order of the cells.

    A cell that is skipped is so in each of its repeats, and told once.
    """
    for cell in cells:
        ended = [name for name in cell.folders if runs[name]["status"] != "ok"]
        skipped = [name for name in ended if runs[name]["status"] == "skipped"]
        for name in ended:
            if name in skipped[1:]:
                continue
            run = runs[name]
            error = run.get("error") or {}
            yield Failure(
                name,
                run["label"],
                run["status"],
                error.get("kind"),
                error.get("rank"),
                error.get("phase"),
                error.get("step"),
                error.get("message") or "no reason recorded",
                error.get("traceback"),
            )


def breakdowns_of(cells: Sequence[Cell], runs: Mapping[str, Run]) -> Iterator[Breakdown]:
    """The mean step of each cell that has timings; of repeats the mean."""
    for cell in cells:
        done = [runs[name] for name in cell.folders if runs[name]["status"] == "ok"]
        found = [each for each in map(spent, done) if each is not None]
        if not found:
            continue
        mean = {_SHORT.get(name, name): part_s for name, part_s in mean_of(found).items()}
        step_s = mean["step"]
        parts = {name: mean[name] for name in BREAKDOWN_PARTS[:-1]}
        parts["other"] = step_s - sum(parts.values())
        yield Breakdown(cell.folder, cell.label, step_s, parts, cell.emulated)


def memory_of(cells: Sequence[Cell], runs: Mapping[str, Run]) -> Iterator[MemoryPoint]:
    """The peak of each cell that ran, and the cells that ran out of memory."""
    for cell in cells:
        full = any((runs[name].get("error") or {}).get("kind") == "oom" for name in cell.folders)
        peak, scope = _peak([runs[name] for name in cell.folders])
        if cell.num_devices is None or (peak is None and not full):
            continue
        yield MemoryPoint(
            cell.folder,
            cell.parallel,
            cell.num_devices,
            cell.setting,
            cell.batch_per_device,
            peak,
            scope,
            full,
        )


def _peak(runs: Sequence[Run]) -> tuple[int | None, str]:
    memories: list[dict[str, Any]] = [run.get("memory") or {} for run in runs]
    devices = [peak for each in memories for peak in (each.get("peak_device_bytes") or {}).values()]
    if devices:
        return max(devices), "device"
    return max((p for each in memories for p in each.get("peak_bytes") or ()), default=None), (
        "process"
    )


def parity_of(cells: Sequence[Cell], runs: Mapping[str, Run]) -> Iterator[tuple[str, ...]]:
    """A row for each cell whose first steps were compared with those of a single device.

    Also for a repeat whose verdict is not that of the first.
    """
    for cell in cells:
        seen: set[str] = set()
        for name in cell.folders:
            row = parity_row(runs[name])
            if row is not None and row[0] not in seen:
                seen.add(row[0])
                yield (name, *row)
