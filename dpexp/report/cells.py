"""Which runs of a sweep are one cell, and which cells may be compared. Pure."""

from __future__ import annotations

import json
import re
from typing import Any

from dpexp.identity import identifying
from dpexp.schema import StrategyName

Run = dict[str, Any]  # ``run.json`` data

_STRATEGIES = [each.value for each in StrategyName]  # the order of the rows


def members(runs: dict[str, Run]) -> list[tuple[str, ...]]:
    """The folders of each cell: runs whose config differs by `repeat` alone.

    Runs that also have the same `repeat` are cells of their own: a configuration that was typed
    twice is compared with itself. Without repeats the cells stay in the order of the sweep; with
    them that order was drawn, so they are sorted by setting, strategy and number of devices.

    Args:
        runs: by folder name, in the order of the sweep.
    """
    cells: dict[tuple[str, int], list[str]] = {}
    seen: dict[tuple[str, Any], int] = {}
    for name, run in runs.items():
        key = json.dumps(_without(run, "repeat"), sort_keys=True)
        once = (key, run["config"].get("repeat"))
        twin = seen[once] = seen.get(once, -1) + 1
        cells.setdefault((key, twin), []).append(name)
    found = [tuple(folders) for folders in cells.values()]
    if all(len(folders) == 1 for folders in found):
        return found
    settings = settings_of(runs)
    return sorted(found, key=lambda folders: _place(runs[folders[0]], settings[folders[0]]))


def group_of(run: Run) -> str:
    """What two runs must share for their rates to be compared: all but strategy and devices."""
    return json.dumps(_without(run, "parallel", "num_devices", "repeat"), sort_keys=True)


def settings_of(runs: dict[str, Run]) -> dict[str, str]:
    """What tells each run's group from the others: ``batch_size=50``, or "" for a single group."""
    group = {name: group_of(run) for name, run in runs.items()}
    flat = {key: _flat(json.loads(key)) for key in dict.fromkeys(group.values())}
    keys = sorted({key for row in flat.values() for key in row})
    varying = [key for key in keys if len({row.get(key) for row in flat.values()}) > 1]
    texts = {
        name: ",".join(f"{key}={row[key]}" for key in varying if key in row)
        for name, row in flat.items()
    }
    short: dict[str, str] = {}
    for name, text in texts.items():
        plain = re.sub(r"[^A-Za-z0-9=.,_-]+", "-", text)[:120]
        # Two settings that differ in what was replaced or cut off stay two.
        alike = sum(each.partition("~")[0] == plain for each in short.values())
        short[name] = f"{plain}~{alike + 1}" if alike else plain
    return {name: short[key] for name, key in group.items()}


def _without(run: Run, *keys: str) -> dict[str, Any]:
    return {key: value for key, value in identifying(run["config"]).items() if key not in keys}


def _flat(node: Any, prefix: str = "") -> dict[str, str]:
    if isinstance(node, dict):
        pairs = [_flat(value, f"{prefix}{key}.") for key, value in node.items()]
        return {key: value for pair in pairs for key, value in pair.items()}
    return {prefix.rstrip("."): str(node)}


def _place(run: Run, setting: str) -> tuple[Any, ...]:
    """Numbers in a setting count as numbers: batch_size=8 comes before batch_size=16."""
    parts = re.split(r"(\d+)", setting)
    natural = tuple((part.isdigit(), part.zfill(20) if part.isdigit() else part) for part in parts)
    strategy = run["parallel"]
    known = _STRATEGIES.index(strategy) if strategy in _STRATEGIES else len(_STRATEGIES)
    return (natural, known, run.get("num_devices") or 0)
