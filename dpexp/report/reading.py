"""The results of sweeps and of single runs, read from their folders."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import yaml

from dpexp.records import FROM_OUTSIDE, read_run
from dpexp.report.cells import Run
from dpexp.report.numbers import count_of
from dpexp.sweep_lock import JOBS, RECORD

Value = TypeVar("Value")

# Folders below a sweep's that hold no cell: earlier attempts, what launchers leave, TensorBoard's.
NO_CELLS = ("earlier", "scaling")
# What a cell's folder has while it runs.
_TRACES = (".hydra", "dpexp.log", "steps.rank0.csv", "steps.host0.csv")
_PLAIN = re.compile(r"[\w./-]+")  # needs no quotes in an override
# Of no use in a report; they are most of a result.
_DROPPED = ("compute", "energy", "machine", "stragglers", "timing", "uncertainty")
_KEPT = {
    "stragglers": ("rank", "phase"),
    "timing": ("step",),
    "uncertainty": ("relative_standard_error",),
    "machine": ("warnings",),
}


@dataclass(frozen=True)
class Source:
    """A sweep, or a single run, as far as a report needs it."""

    folder: Path
    name: str  # unique among the sources of a report
    single: bool
    command: str  # what repeats it, "" where nothing says it
    runs: dict[str, Run]  # by folder name, in the order of the sweep
    unreadable: dict[str, str]  # by folder name why the result of a run cannot be used
    jobs: int | None = None  # how many runs the sweep was to have; None = nobody says
    # By folder name what there is of a run without a result: it was killed, or goes on.
    cut_off: dict[str, str] = field(default_factory=dict)
    resume: str = ""  # what goes on with a sweep that is not done, where its folder says it

    @property
    def missing(self) -> int:
        """Runs of the sweep that never began."""
        known = len(self.runs) + len(self.unreadable) + len(self.cut_off)
        return max(0, (self.jobs or 0) - known)

    @property
    def done(self) -> bool:
        """Whether every run has come to an end that can be read."""
        interrupted = any(run["status"] == "interrupted" for run in self.runs.values())
        return not (interrupted or self.unreadable or self.cut_off or self.missing)


def read_sources(
    folders: Sequence[Path],
    overrides: Sequence[str] | None = None,
    unwritten: Mapping[str, Run] = MappingProxyType({}),
) -> list[Source]:
    """Read sweeps and single runs.

    Args:
        overrides: what the user typed, for a sweep whose folder does not say it.
        unwritten: results by folder name, whose ``run.json`` could not be written.
    """
    shared: dict[str, Any] = {}
    names = _unique([folder.absolute() for folder in folders])
    return [
        _source(folder, name, overrides, shared, unwritten)
        for folder, name in zip(folders, names, strict=True)
    ]


def repeating(overrides: Sequence[str], *, single: bool = False) -> str:
    """The command that runs `overrides` again, quoted for a shell."""
    kept = [each for each in overrides if each.split("=")[0].lstrip("+") not in ("resume", "rerun")]
    return shlex.join(["python", "-m", "dpexp", *([] if single else ["-m"]), *kept])


def _source(
    folder: Path,
    name: str,
    overrides: Sequence[str] | None,
    shared: dict[str, Any],
    unwritten: Mapping[str, Run],
) -> Source:
    single = (folder / "run.json").exists()
    found = [folder] if single else list(_cells(folder))
    runs = {cell: _slim(run, shared) for cell, run in unwritten.items()}
    unreadable, cut_off = {}, {}
    for cell in found:
        own = cell.absolute().name
        if own in runs:
            continue
        try:
            runs[own] = _slim(read_run(cell / "run.json"), shared)
        except FileNotFoundError:
            cut_off[own] = _left_of(cell)
        except (OSError, ValueError) as problem:
            unreadable[own] = f"run.json cannot be read: {_told(problem)}"
    command = _command(folder, single, overrides)
    typed = _variables(runs) if command else ""
    record = None if single else _loaded(folder / RECORD)
    jobs = _at(record, JOBS)
    source = Source(
        folder,
        name,
        single,
        typed + command,
        _in_order(runs),
        _in_order(unreadable),
        jobs if isinstance(jobs, int) else None,
        _in_order(cut_off),
    )
    # A search has no number of runs, and another way to go on.
    if source.jobs is None or not command or (source.done and not _ended_from_outside(source)):
        return source
    place = _typed_from(folder, _at(record, "hydra", "runtime", "cwd"))
    return replace(source, resume=f"{typed}{command} {shlex.quote(f'resume={place}')}")


def _ended_from_outside(source: Source) -> bool:
    """Whether a run has failed that may do better the next time, as it is."""
    failed = [run for run in source.runs.values() if run["status"] == "failed"]
    return any((run.get("error") or {}).get("kind") in FROM_OUTSIDE for run in failed)


def _left_of(cell: Path) -> str:
    """What there is of a run without a result."""
    try:
        steps = _steps_of_rank_0(cell)
    except OSError:
        steps = 0
    left = f"; {count_of(steps, 'step')} of rank 0 can be read" if steps else ""
    return f"there is no run.json: the command was killed, or the run still goes on{left}"


def _steps_of_rank_0(cell: Path) -> int:
    """How many whole rows its table has, or that of its host, whose rows begin with the rank."""
    own = cell / "steps.rank0.csv"
    if own.exists():
        return max(0, own.read_bytes().count(b"\n") - 1)
    tables = sorted(cell.glob("steps.host*.csv"))
    whole = [line for table in tables for line in table.read_bytes().split(b"\n")[:-1]]
    return sum(line.startswith(b"0,") for line in whole)


def _typed_from(folder: Path, cwd: Any) -> str:
    """A folder as an override's value, for the place where the sweep was typed."""
    path = folder.absolute()
    if isinstance(cwd, str) and path.is_relative_to(cwd):
        path = path.relative_to(cwd)
    if _PLAIN.fullmatch(str(path)):
        return str(path)
    return "'{}'".format(str(path).replace("\\", "\\\\").replace("'", "\\'"))


def _variables(runs: Mapping[str, Run]) -> str:
    """What the user had set that changes figures, before a command; what a launcher set is not."""
    told = []
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        values = {_at(run["environment"], "variables", name) for run in runs.values()}
        by_launcher = any(f"{name}=" in str(note) for run in runs.values() for note in run["notes"])
        value = values.pop() if len(values) == 1 else None
        if value is not None and not by_launcher:
            told.append(f"{name}={shlex.quote(str(value))} ")
    return "".join(told)


def _in_order(cells: Mapping[str, Value]) -> dict[str, Value]:
    """By folder name, in the order of the sweep."""
    return dict(sorted(cells.items(), key=lambda entry: _position(entry[0])))


def _cells(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name.startswith(".") or path.name in NO_CELLS or not path.is_dir():
            continue
        if (path / "run.json").exists() or any((path / trace).exists() for trace in _TRACES):
            yield path


def _slim(run: Run, shared: dict[str, Any]) -> Run:
    """`run` without what no report needs; what many runs have alike is held once."""
    kept = {key: value for key, value in run.items() if key not in _DROPPED}
    for key, names in _KEPT.items():
        if run.get(key) is not None:
            kept[key] = {name: run[key].get(name) for name in names}
    kept["config"] = {key: _once(value, shared) for key, value in run["config"].items()}
    kept["environment"] = _once(run.get("environment") or {}, shared)
    kept["notes"] = [_once(str(note), shared) for note in run.get("notes") or ()]
    return kept


def _once(value: Any, shared: dict[str, Any]) -> Any:
    return shared.setdefault(repr(value), value)


def _command(folder: Path, single: bool, overrides: Sequence[str] | None) -> str:
    """What repeats a sweep or a run: as its folder says, else of `overrides`."""
    if single:
        typed = _loaded(folder / ".hydra" / "overrides.yaml")
        return repeating(list(map(str, typed)), single=True) if isinstance(typed, list) else ""
    hydra = _at(_loaded(folder / "multirun.yaml"), "hydra")
    typed = _at(hydra, "overrides", "task")
    if isinstance(typed, list):
        return repeating([*_hydras(hydra), *map(str, typed)])
    if overrides is not None:
        return repeating(list(overrides))
    try:
        said = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(said.get("command") or "") if isinstance(said, dict) else ""


def _hydras(hydra: Any) -> list[str]:
    """The overrides of Hydra itself that another sweep needs too: launcher, sweeper, configs."""
    typed = _at(hydra, "overrides", "hydra")
    kept = [
        str(each)
        for each in (typed if isinstance(typed, list) else ())
        if str(each).lstrip("+").startswith(("hydra/", "hydra.launcher", "hydra.sweeper"))
    ]
    sources = _at(hydra, "runtime", "config_sources")
    folders = [
        str(each.get("path"))
        for each in (sources if isinstance(sources, list) else ())
        if isinstance(each, dict) and each.get("provider") == "command-line"
    ]
    return [*(f"--config-dir={folder}" for folder in folders), *kept]


def _at(node: Any, *keys: str) -> Any:
    for key in keys:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def _loaded(path: Path) -> Any:
    """What a YAML file says; None where there is none, or it is no YAML."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C is ten times as fast
    try:
        return yaml.load(path.read_text(encoding="utf-8"), loader)
    except (OSError, ValueError, yaml.YAMLError):
        return None


def _unique(folders: Sequence[Path]) -> list[str]:
    """Short names that tell the folders apart: as many of the last parts as that takes."""
    for depth in count(1):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names) or depth > max(len(each.parts) for each in folders):
            return names
    raise AssertionError("unreachable")


def _told(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {problem}".partition("\n")[0]


def _position(name: str) -> tuple[int, str]:
    """A cell's place in its sweep, which its folder's name begins with."""
    number = name.partition("_")[0]
    return (int(number) if number.isdecimal() else 0, name)
