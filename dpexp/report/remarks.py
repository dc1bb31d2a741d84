"""What makes a report's figures doubtful, each told once with the cells it is about. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from dpexp.report.cells import Run
from dpexp.report.numbers import percent
from dpexp.report.scaling import Cell
from dpexp.report.selection import MOST_BOARDS, SUSPECT, named
from dpexp.report.trust import went_on
from dpexp.report.whereabouts import checkpoints_line, hosts_line, pinned_line

EMULATED = (
    "dp ran on virtual devices that share the CPU (emulated): its times show what dp's four steps "
    "cost, not what several GPUs would give"
)
TOO_FAST = (
    f"an efficiency above {percent(SUSPECT)} says that the baseline was slowed down by something "
    "else; measure again on an idle machine, or with OMP_NUM_THREADS=1"
)
# What a launcher's warning says, a note of every cell that it ran beside others.
TOGETHER = "disturb each other's timing"
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def warnings_of(cells: Sequence[Cell], runs: Mapping[str, Run]) -> tuple[str, ...]:
    """A warning for each kind of doubt."""
    emulated = [cell.folder for cell in cells if cell.emulated]
    fast = [cell.folder for cell in cells if (cell.efficiency or 0.0) > SUSPECT]
    told = [(EMULATED, emulated), (TOO_FAST, fast), (_crowded(cells, runs))]
    lines = [f"{text}: {named(folders)}" for text, folders in told if folders]
    lines += _alike(_machine(cells, runs))
    lines += _alike(
        (cell.folder, note) for cell in cells for note in cell.notes if TOGETHER in note
    )
    lines += _alike(
        (cell.folder, f"disturbed on purpose: {text}")
        for cell in cells
        for text in runs[cell.folder].get("injected") or ()
    )
    lines += _alike(
        (name, f"{text}: its figures are not compared with those of others")
        for cell in cells
        for name in cell.folders
        if (text := went_on(runs[name])) is not None
    )
    return tuple(lines)


def machine_warnings(run: Run) -> list[str]:
    """What moved on the machine during the measured steps; these are among the run's notes."""
    return [str(text) for text in (run.get("machine") or {}).get("warnings") or ()]


def notes_of(cells: Sequence[Cell], runs: Mapping[str, Run]) -> tuple[tuple[str, str], ...]:
    """The notes of each cell that are no warnings, and where it was: its folder, the note."""
    found: dict[str, list[str]] = {}
    for cell in cells:
        warned = {text for name in cell.folders for text in machine_warnings(runs[name])}
        for note in cell.notes:
            if note not in warned and TOGETHER not in note:
                found.setdefault(note, []).append(cell.folder)
    for cell in cells:
        for about in (hosts_line, pinned_line, checkpoints_line):
            told = about(runs[cell.folder])
            if told is not None:
                found.setdefault(told, []).append(cell.folder)
    rows = [(named(folders), note) for note, folders in found.items()]
    if len({cell.setting for cell in cells}) > MOST_BOARDS:
        rows.append(("scaling", f"TensorBoard has the {MOST_BOARDS} settings that scale best"))
    return tuple(rows)


def environment_of(runs: Mapping[str, Run]) -> tuple[tuple[str, str], ...]:
    """The machine and the versions; where cells differ, what each value is of."""
    known = {id(run["environment"]): run["environment"] for run in _ran(runs)}
    names = {id(environment): [] for environment in known.values()}  # type: dict[int, list[str]]
    for name, run in runs.items():
        names.get(id(run["environment"]), []).append(name)
    flat = {key: _flat(environment) for key, environment in known.items()}
    rows = []
    for key in dict.fromkeys(key for row in flat.values() for key in row):
        values: dict[str, list[str]] = {}
        for where, row in flat.items():
            values.setdefault(row.get(key, "not set"), []).extend(names[where])
        if len(values) == 1:
            rows.append((key, next(iter(values))))
        else:
            parts = [f"{value} ({named(where, 2)})" for value, where in values.items()]
            rows.append((key, "; ".join(parts)))
    return tuple(rows)


def _ran(runs: Mapping[str, Run]) -> list[Run]:
    """A cell that was refused may not know the machine."""
    return [run for run in runs.values() if run["status"] == "ok"] or list(runs.values())


def _flat(environment: Mapping[str, object]) -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in environment.items():
        if isinstance(value, dict):
            flat |= {str(k): str(v) for k, v in value.items() if v not in (None, {})}
        else:
            flat[key] = "none" if value is None else str(value)
    return flat


def _crowded(cells: Sequence[Cell], runs: Mapping[str, Run]) -> tuple[str, list[str]]:
    crowded = []
    for cell in cells:
        run = runs[cell.folder]
        cores = (run.get("environment") or {}).get("cores")
        on_cpu = str(run.get("device") or "").startswith("cpu")
        threads = (run.get("threads_per_process") or 1) * (run.get("num_processes") or 1)
        needed = max(cell.num_devices or 0, threads)
        if on_cpu and isinstance(cores, int) and needed > cores:
            crowded.append(cell.folder)
    return ("more devices or threads than cores: their times include waiting for a core", crowded)


def _machine(cells: Sequence[Cell], runs: Mapping[str, Run]) -> Iterator[tuple[str, str]]:
    for cell in cells:
        for name in cell.folders:
            for text in machine_warnings(runs[name]):
                yield name, text


def _alike(found: Iterator[tuple[str, str]]) -> list[str]:
    """One line for texts that differ in their numbers only, with the first of them."""
    kinds: dict[str, list[tuple[str, str]]] = {}
    for folder, text in found:
        kinds.setdefault(_NUMBER.sub("0", text), []).append((folder, text))
    lines = []
    for same in kinds.values():
        folder, text = same[0]
        others = list(dict.fromkeys(each for each, _ in same if each != folder))
        more = f"; alike in {named(others, 4)}" if others else ""
        lines.append(f"{text} ({folder}{more})")
    return lines
