"""Speed-up and efficiency over the cells of a sweep. Pure; works on plain run.json data."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from dpexp.report.parity import parity_failed


@dataclass(frozen=True)
class Cell:
    """One run of a sweep, as the tables show it."""

    folder: str  # name below the sweep's folder
    label: str
    parallel: str
    num_devices: int | None
    setting: str  # the keys that vary in the sweep besides parallel and num_devices; a file name
    status: str
    reason: str | None
    emulated: bool
    scaling: str | None
    batch_global: int | None
    batch_per_device: int | None
    step_p50_s: float | None
    samples_per_s: float | None
    # Against the baseline: the ratio of throughputs, and that divided by the ratio of devices.
    speedup: float | None
    efficiency: float | None
    baseline: str | None  # the baseline's folder
    peak_bytes: int | None  # of the rank with the most
    notes: tuple[str, ...]


def analyse(runs: dict[str, dict[str, Any]]) -> list[Cell]:
    """The cells of a sweep with their speed-up and efficiency.

    Cells are compared only with cells whose config is the same but for `parallel` and
    `num_devices`. The baseline is the smallest `none` cell, or the strategy's own smallest device
    count where there is no `none`. Under strong scaling the global batch is the same, so the
    ratio of throughputs is T1/Tn; under weak scaling it is the ratio of rows done per second.
    A cell that failed its parity check has no speed-up, and is no baseline.

    Args:
        runs: ``run.json`` data by folder name, in the order of the sweep.
    """
    settings = _settings(runs)
    return [
        _cell(name, run, settings[name], _baseline(run, runs), runs) for name, run in runs.items()
    ]


def _cell(
    folder: str,
    run: dict[str, Any],
    setting: str,
    baseline: str | None,
    runs: dict[str, dict[str, Any]],
) -> Cell:
    rate = _rate(run)
    speedup = efficiency = None
    broken = parity_failed(run)
    if baseline is not None and rate is not None and broken is None:
        base = runs[baseline]
        base_rate = _rate(base)
        assert base_rate is not None  # or it would not be a baseline
        speedup = rate / base_rate
        efficiency = speedup / (run["num_devices"] / base["num_devices"])
    batch = run.get("batch") or {}
    step = (run.get("timing") or {}).get("step") or {}
    error = run.get("error") or {}
    return Cell(
        folder=folder,
        label=run["label"],
        parallel=run["parallel"],
        num_devices=run.get("num_devices"),
        setting=setting,
        status=run["status"],
        reason=error.get("message") or broken,
        emulated=bool(run.get("emulated")),
        scaling=run.get("scaling"),
        batch_global=batch.get("global"),
        batch_per_device=batch.get("per_device"),
        step_p50_s=step.get("p50_s"),
        samples_per_s=rate,
        speedup=speedup,
        efficiency=efficiency,
        baseline=baseline,
        peak_bytes=max((run.get("memory") or {}).get("peak_bytes") or [0]) or None,
        notes=tuple(run.get("notes") or ()),
    )


def _rate(run: dict[str, Any]) -> float | None:
    if run["status"] != "ok":
        return None
    rate = (run.get("throughput") or {}).get("samples_per_s")
    return float(rate) if rate else None


def _settings(runs: dict[str, dict[str, Any]]) -> dict[str, str]:
    """What tells each run's group from the others: ``batch_size=50``, or "" for a single group."""
    flat = {name: _flat(json.loads(_group(run))) for name, run in runs.items()}
    keys = sorted({key for row in flat.values() for key in row})
    varying = [key for key in keys if len({row.get(key) for row in flat.values()}) > 1]
    texts = {
        name: ",".join(f"{key}={row[key]}" for key in varying if key in row)
        for name, row in flat.items()
    }
    return {name: re.sub(r"[^A-Za-z0-9=.,_-]+", "-", text)[:120] for name, text in texts.items()}


def _flat(node: Any, prefix: str = "") -> dict[str, str]:
    if isinstance(node, dict):
        pairs = [_flat(value, f"{prefix}{key}.") for key, value in node.items()]
        return {key: value for pair in pairs for key, value in pair.items()}
    return {prefix.rstrip("."): str(node)}


def _group(run: dict[str, Any]) -> str:
    rest = {k: v for k, v in run["config"].items() if k not in ("parallel", "num_devices")}
    return json.dumps(rest, sort_keys=True)


def _baseline(run: dict[str, Any], runs: dict[str, dict[str, Any]]) -> str | None:
    group = _group(run)
    peers = {
        k: r
        for k, r in runs.items()
        if _rate(r) is not None and parity_failed(r) is None and _group(r) == group
    }
    singles = {k: r for k, r in peers.items() if r["parallel"] == "none"}
    own = {k: r for k, r in peers.items() if r["parallel"] == run["parallel"]}
    candidates = singles or own
    return min(candidates, key=lambda k: candidates[k]["num_devices"]) if candidates else None
