"""Speed-up and efficiency over the cells of a sweep. Pure; works on plain run.json data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from dpexp.provenance import with_notes
from dpexp.report.cells import Run, group_of, members, settings_of
from dpexp.report.intervals import figures_against, own_figures, samples_of
from dpexp.report.parity import parity_failed
from dpexp.report.trust import untrusted, went_on
from dpexp.report.waterfall import Waterfall, waterfall

_WORST_FIRST = ("interrupted", "failed", "ok", "skipped")


@dataclass(frozen=True)
class Cell:
    """One row of a sweep's tables: a configuration, with all its repeats.

    `low` and `high` are the ends of 95 % intervals, None where nothing tells them.
    """

    folder: str  # name below the sweep's folder; of the first repeat that ended well
    label: str
    parallel: str
    num_devices: int | None
    setting: str  # the keys that vary in the sweep besides parallel and num_devices; a file name
    status: str  # of repeats the worst
    reason: str | None
    emulated: bool
    scaling: str | None
    batch_global: int | None
    batch_per_device: int | None
    step_p50_s: float | None  # of repeats the median of theirs
    samples_per_s: float | None  # all repeats' samples by all their seconds
    # Against the baseline: the ratio of throughputs, and that divided by the ratio of devices.
    speedup: float | None
    efficiency: float | None
    baseline: str | None  # the baseline's folder
    peak_bytes: int | None  # of the rank with the most
    notes: tuple[str, ...]
    repeats: int = 1  # that ended well
    folders: tuple[str, ...] = ()  # of all repeats
    failures: tuple[str, ...] = ()  # of repeats that did not end well, if there are several
    samples_per_s_low: float | None = None
    samples_per_s_high: float | None = None
    step_mean_s: float | None = None
    step_mean_low_s: float | None = None
    step_mean_high_s: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    efficiency_low: float | None = None
    efficiency_high: float | None = None
    interval_scope: str | None = None  # what the first two intervals come from
    speedup_scope: str | None = None
    verdict: str | None = None  # whether it is faster than the baseline; None for that itself
    noise_floor: float | None = None  # how much two of its runs differ by chance, as a share
    parity: str | None = None  # the verdict of the check; of repeats that of the first
    waterfall: Waterfall | None = None  # where it lost time against the baseline
    # Of the first repeat that failed: the error's kind, and where it happened.
    kind: str | None = None
    phase: str | None = None
    rank: int | None = None
    step: int | None = None
    straggler: str | None = None  # the rank that the others wait for, and its phase
    steady: bool = True  # its rate is of runs that went from their beginning to their end in one go


def analyse(runs: dict[str, Run]) -> list[Cell]:
    """The cells of a sweep with their speed-up and efficiency.

    Cells are compared only with cells whose config is the same but for `parallel` and
    `num_devices`. The baseline is the smallest `none` cell, or the strategy's own smallest device
    count where there is no `none`. Under strong scaling the global batch is the same, so the
    ratio of throughputs is T1/Tn; under weak scaling it is the ratio of rows done per second.
    A cell that failed its parity check, or did not run in one go, has no speed-up, and is no
    baseline.

    Args:
        runs: ``run.json`` data by folder name, in the order of the sweep.
    """
    runs = with_notes(runs)
    settings = settings_of(runs)
    cells = members(runs)
    baselines = _baselines([_rated(folders, runs) for folders in cells], runs)
    found = []
    for folders in cells:
        group, strategy = group_of(runs[folders[0]]), runs[folders[0]]["parallel"]
        base = baselines.get((group, "none")) or baselines.get((group, strategy), ())
        found.append(_cell(folders, settings[folders[0]], base, runs))
    return found


def _cell(
    folders: tuple[str, ...], setting: str, base: Sequence[str], runs: dict[str, Run]
) -> Cell:
    rated = _rated(folders, runs)
    ok = [name for name in folders if runs[name]["status"] == "ok"]
    failures = [name for name in folders if name not in ok]
    first = [*rated, *ok, *folders][0]
    run = runs[first]
    doubted = [*map(parity_failed, map(runs.__getitem__, ok)), *(went_on(runs[n]) for n in rated)]
    broken = next((why for why in doubted if why is not None), None)
    batch = run.get("batch") or {}
    done = [runs[name] for name in ok or folders]
    p50s = [p50 for each in done if (p50 := _p50(each)) is not None]
    peaks = [peak for each in done for peak in (each.get("memory") or {}).get("peak_bytes") or ()]
    notes = [note for name in folders for note in runs[name].get("notes") or ()]
    return Cell(
        folder=first,
        label=run["label"],
        parallel=run["parallel"],
        num_devices=run.get("num_devices"),
        setting=setting,
        status=min((runs[name]["status"] for name in folders), key=_WORST_FIRST.index),
        reason=_reason(runs[failures[0]]) if failures else broken,
        emulated=bool(run.get("emulated")),
        scaling=run.get("scaling"),
        batch_global=batch.get("global"),
        batch_per_device=batch.get("per_device"),
        step_p50_s=median(p50s) if p50s else None,
        baseline=base[0] if base else None,
        peak_bytes=max(peaks, default=None),
        notes=tuple(dict.fromkeys(notes)),
        repeats=len(ok),
        folders=folders,
        failures=_told(failures, runs) if len(folders) > 1 else (),
        **{"samples_per_s": None, **own_figures([runs[name] for name in rated])},
        parity=(run.get("parity") or {}).get("verdict"),
        straggler=_straggler(run),
        steady=all(went_on(runs[name]) is None for name in rated),
        **_end(runs[failures[0]] if failures else {}),
        waterfall=None if broken else waterfall([runs[n] for n in rated], [runs[n] for n in base]),
        **_against(() if broken else rated, base, runs),
    )


def _end(run: Run) -> dict[str, Any]:
    """How a run ended that did not end well; files of earlier versions have no phase."""
    error = run.get("error") or {}
    return {name: error.get(name) for name in ("kind", "phase", "rank", "step")}


def _straggler(run: Run) -> str | None:
    found = run.get("stragglers") or {}
    if found.get("rank") is None:
        return None
    host = f" on {found['host']}" if found.get("host") else ""
    return f"rank {found['rank']}{host}, in {found['phase']}"


def _against(own: Sequence[str], base: Sequence[str], runs: dict[str, Run]) -> dict[str, Any]:
    if not own or not base:
        return {"speedup": None, "efficiency": None}
    if own[0] == base[0]:
        return {"speedup": 1.0, "efficiency": 1.0}
    devices = runs[own[0]]["num_devices"] / runs[base[0]]["num_devices"]
    return figures_against([runs[name] for name in own], [runs[name] for name in base], devices)


def _baselines(
    rated: Sequence[tuple[str, ...]], runs: dict[str, Run]
) -> dict[tuple[str, str], tuple[str, ...]]:
    """The runs of the cell with the fewest devices, by group and strategy.

    Args:
        rated: of each cell the runs with a rate.
    """
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    for folders in rated:
        if not folders or any(untrusted(runs[name]) is not None for name in folders):
            continue
        run = runs[folders[0]]
        key = (group_of(run), run["parallel"])
        best = found.get(key)
        if best is None or int(run["num_devices"]) < int(runs[best[0]]["num_devices"]):
            found[key] = folders
    return found


def _rated(folders: Sequence[str], runs: dict[str, Run]) -> tuple[str, ...]:
    """The runs whose rate is the cell's: those that ran in one go, if there are any."""
    timed = [name for name in folders if samples_of(runs[name]) is not None]
    steady = [name for name in timed if went_on(runs[name]) is None]
    return tuple(steady or timed)


def _p50(run: Run) -> float | None:
    found: float | None = ((run.get("timing") or {}).get("step") or {}).get("p50_s")
    return found


def _reason(run: Run) -> str | None:
    found: str | None = (run.get("error") or {}).get("message")
    return found


def _told(failures: Sequence[str], runs: dict[str, Run]) -> tuple[str, ...]:
    """A line for each, with its reason; what is skipped is so in each repeat, and told once."""
    lines = [f"{name}: {runs[name]['status']}: {_reason(runs[name]) or ''}" for name in failures]
    skipped = all(runs[name]["status"] == "skipped" for name in failures)
    return tuple(lines[:1] if skipped else lines)
