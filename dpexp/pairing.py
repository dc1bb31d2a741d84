"""Which cells of two sets of runs are the same, and by which keys two others differ.

Two runs belong to the same cell if their configs agree in all keys that can change what a measured
step does. Code, versions and machine may differ: that is what one compares. A key that a run does
not have, since the version that wrote it did not know it, counts as left alone: it has the value of
``conf/``, which is what the same command line means to the version that knows it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from omegaconf import OmegaConf

from dpexp.builtin import GROUPS
from dpexp.compose import config_folder
from dpexp.config import flat
from dpexp.schema import StrategyName

Run = dict[str, Any]  # ``run.json`` data
Differences = dict[str, tuple[Any, Any]]  # by key, what A and B have

# Keys, with those below them, that change no measured step: they number or limit runs, act before
# the first or after the last measured step, or name files.
WITHOUT_EFFECT = (
    "batch_search",
    "check",
    "checkpoint.keep",
    "loader.timeout_s",
    "measure.calibration_pairs",
    "measure.flops",
    "measure.peak_flops_per_device",
    "process_memory_mib",
    "parallel.max_restarts",
    "parallel.ranks_from",
    "parallel.timeout_s",
    "repeat",
    "repeats",
    "save_weights",
    "sinks",
    "trace",
    "watchdog_s",
)
# What makes two figures differ in kind; nobody may ask to look past it.
IN_KIND = ("device", "emulated", "task")
_ORDER = [strategy.value for strategy in StrategyName]


@dataclass(frozen=True)
class CellRuns:
    """All runs of one cell on one side."""

    name: str  # ``ddp-n2``, and what tells it from cells of the same label
    runs: tuple[Run, ...]
    values: dict[str, Any]  # its config by dotted key, without what has no effect and without nulls

    @property
    def label(self) -> str:
        """Strategy and number of devices."""
        return str(self.runs[0]["label"])


@dataclass(frozen=True)
class Pair:
    """A cell of A and the one of B that it is compared with."""

    a: CellRuns
    b: CellRuns
    differing: Differences  # {} = they are the same cell


@dataclass(frozen=True)
class Pairs:
    """Two sides, cell by cell."""

    matched: tuple[Pair, ...]
    only_a: tuple[CellRuns, ...]
    only_b: tuple[CellRuns, ...]


def cells_of(runs: Sequence[Run]) -> list[CellRuns]:
    """The cells of one side, by strategy and devices.

    Runs of one cell are pooled, whether they are a sweep's repeats or were started one by one: each
    had processes of its own. (A sweep's own report keeps a configuration that was typed twice as
    two cells, to compare it with itself.)
    """
    found: dict[str, list[Run]] = {}
    values: dict[str, dict[str, Any]] = {}
    for run in runs:
        own = _values(run["config"])
        key = json.dumps([run["label"], own], sort_keys=True, default=str)
        values[key] = own
        found.setdefault(key, []).append(run)
    alike: dict[str, list[dict[str, Any]]] = {}
    for key, members in found.items():
        alike.setdefault(members[0]["label"], []).append(values[key])
    cells = [
        CellRuns(_name(members[0]["label"], values[key], alike), tuple(members), values[key])
        for key, members in found.items()
    ]
    return sorted(cells, key=_place)


def pair(a: Sequence[CellRuns], b: Sequence[CellRuns], ignored: Collection[str] = ()) -> Pairs:
    """Match the cells of two sides one to one.

    Two cells are matched if neither has a nearer one on the other side, counted in differing keys.
    Cells that do differ have to agree at least in strategy and number of devices, unless they are
    all there is. Where two are equally near none is chosen.

    Args:
        ignored: keys, with those below them, that may differ; of cells that are equally near
            without them the one that is nearer with them is taken.
    """
    all_there_is = len(a) == 1 and len(b) == 1
    found: dict[tuple[int, int], Differences] = {}
    distance: dict[tuple[int, int], tuple[int, int]] = {}
    for i, own in enumerate(a):
        for j, other in enumerate(b):
            differing = differences(own, other)
            counted = {k: v for k, v in differing.items() if not _is_below(k, ignored)}
            if not counted or own.label == other.label or all_there_is:
                found[i, j] = counted
                distance[i, j] = (len(counted), len(differing))
    matched: list[tuple[int, int]] = []
    while near := _nearest_of_both(distance):
        matched += near
        taken_a, taken_b = {i for i, _ in near}, {j for _, j in near}
        distance = {
            (i, j): d for (i, j), d in distance.items() if i not in taken_a and j not in taken_b
        }
    in_a, in_b = {i for i, _ in matched}, {j for _, j in matched}
    return Pairs(
        tuple(Pair(a[i], b[j], found[i, j]) for i, j in sorted(matched)),
        tuple(cell for i, cell in enumerate(a) if i not in in_a),
        tuple(cell for j, cell in enumerate(b) if j not in in_b),
    )


def differences(a: CellRuns, b: CellRuns) -> Differences:
    """The keys in which two cells differ, with both values; None = not set.

    `auto` differs from a value only where it came out as another one.
    """
    found = {}
    for key in sorted({*a.values, *b.values, "emulated"}):
        own, other = a.values.get(key), b.values.get(key)
        outcomes = _outcome(a, key), _outcome(b, key)
        searched = "auto" in (own, other) if key == "batch_size" else True
        if searched and all(outcomes):
            own, other = (_told(outcome) for outcome in outcomes)
        if own != other:
            found[key] = (own, other)
    for group in GROUPS:
        mark = f"{group}.{_mark(group)}"
        if mark in found:  # the arguments that only one of two options has go with the choice
            found = {
                key: both
                for key, both in found.items()
                if None not in both or not key.startswith(f"{group}.")
            }
    return found


def has_key(cells: Sequence[CellRuns], key: str) -> bool:
    """Whether some cell has the key, or keys below it."""
    return any(_is_below(own, (key,)) for cell in cells for own in cell.values)


def _nearest_of_both(distance: dict[tuple[int, int], tuple[int, int]]) -> list[tuple[int, int]]:
    """Of each side's cells those that are the one nearest to each other."""

    def nearest(side: int, index: int) -> tuple[int, int] | None:
        mine = {ends: far for ends, far in distance.items() if ends[side] == index}
        best = min(mine.values())
        closest = [ends for ends, far in mine.items() if far == best]
        return closest[0] if len(closest) == 1 else None

    return [ends for ends in distance if nearest(0, ends[0]) == ends == nearest(1, ends[1])]


def _outcome(cell: CellRuns, key: str) -> list[Any]:
    """What the key came to in the runs that know it; [] for keys that are what was typed."""
    if key == "device":
        known = [(run["device"] or "").partition(":")[0] or None for run in cell.runs]
    elif key == "batch_size":
        known = [(run["batch"] or {}).get("global") for run in cell.runs]
    elif key in ("num_devices", "emulated"):
        known = [run[key] for run in cell.runs]
    else:
        return []
    return sorted({value for value in known if value is not None})


def _told(outcome: list[Any]) -> Any:
    return outcome[0] if len(outcome) == 1 else ", ".join(str(value) for value in outcome)


def _values(config: dict[str, Any]) -> dict[str, Any]:
    filled = {**_left_alone(config), **flat(config)}
    return {
        key: value
        for key, value in filled.items()
        if value is not None and not _is_below(key, WITHOUT_EFFECT)
    }


def _left_alone(config: dict[str, Any]) -> dict[str, Any]:
    """The values of ``conf/`` for the options that a config has chosen."""
    known = dict(_file("config.yaml"))
    for group in GROUPS:
        node = config.get(group)
        mark = _mark(group)
        chosen = node.get(mark) if isinstance(node, dict) else None
        options = [
            _file(f"{group}/{path.name}")
            for path in sorted((config_folder() / group).glob("*.yaml"))
            if chosen is not None and _file(f"{group}/{path.name}").get(mark) == chosen
        ]
        for option in options:
            for key, value in option.items():
                # Two options of one class may differ: then neither is what was left alone.
                if all(other.get(key) == value for other in options):
                    known[f"{group}.{key}"] = value
    return {key: value for key, value in known.items() if "${" not in str(value)}


def _mark(group: str) -> str:
    """The key that tells a group's options apart."""
    return "strategy" if group == "parallel" else "_target_"


@cache
def _file(name: str) -> dict[str, Any]:
    plain = OmegaConf.to_container(OmegaConf.load(config_folder() / name), resolve=False)
    assert isinstance(plain, dict)
    return flat({k: v for k, v in plain.items() if k not in ("defaults", "hydra")})


def _is_below(key: str, nodes: Collection[str]) -> bool:
    return any(key == node or key.startswith(f"{node}.") for node in nodes)


def _name(label: str, own: dict[str, Any], alike: dict[str, list[dict[str, Any]]]) -> str:
    others = alike[label]
    keys = sorted({key for each in others for key in each})
    varying = [key for key in keys if any(each.get(key) != own.get(key) for each in others)]
    return " ".join([label, *(f"{key}={own.get(key, 'null')}" for key in varying)])


def _place(cell: CellRuns) -> tuple[int, int, str]:
    run = cell.runs[0]
    strategy = run["parallel"]
    known = _ORDER.index(strategy) if strategy in _ORDER else len(_ORDER)
    return (known, run["num_devices"] or 0, cell.name)
