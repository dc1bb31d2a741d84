"""Cells and findings for the tests of the report's figures and page, with round numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dpexp.report.findings import BREAKDOWN_PARTS, Breakdown, Failure, MemoryPoint
from dpexp.report.scaling import Cell
from dpexp.report.waterfall import PARTS, Waterfall


def make_cell(
    parallel: str = "none", num_devices: int = 1, speedup: float | None = 1.0, **changes: Any
) -> Cell:
    """A cell of a sweep whose baseline does 100 samples/s on one device; without speed-up, none."""
    known: dict[str, Any] = {
        "folder": f"0_{parallel}_n{num_devices}",
        "label": f"{parallel}-n{num_devices}",
        "parallel": parallel,
        "num_devices": num_devices,
        "setting": "",
        "status": "ok",
        "reason": None,
        "emulated": parallel == "dp",
        "scaling": "strong",
        "batch_global": 16,
        "batch_per_device": 16 // num_devices,
        "step_p50_s": speedup and 0.16 / speedup,
        "samples_per_s": speedup and 100.0 * speedup,
        "speedup": speedup,
        "efficiency": speedup and speedup / num_devices,
        "baseline": "0_none_n1",
        "peak_bytes": 2**30,
        "notes": (),
    }
    return Cell(**{**known, **changes})


def interval_of(speedup: float, devices: int, scope: str = "3 repeats") -> dict[str, Any]:
    """The fields of intervals from 10 % below to 10 % above a cell's figures."""
    values = {
        "speedup": speedup,
        "efficiency": speedup / devices,
        "samples_per_s": 100.0 * speedup,
    }
    low = {f"{name}_low": 0.9 * value for name, value in values.items()}
    high = {f"{name}_high": 1.1 * value for name, value in values.items()}
    return {**low, **high, "speedup_scope": scope, "interval_scope": scope}


def make_breakdown(folder: str, emulated: bool = False, **parts_ms: float) -> Breakdown:
    """A mean step with the named parts; the others are zero."""
    parts = {part: parts_ms.get(part, 0.0) / 1e3 for part in BREAKDOWN_PARTS}
    return Breakdown(folder, folder, sum(parts.values()), parts, emulated)


def make_waterfall(ideal_ms: float, **parts_ms: float) -> Waterfall:
    parts = {part: parts_ms.get(part, 0.0) / 1e3 for part in PARTS}
    ideal_s, loss_s = ideal_ms / 1e3, sum(parts.values())
    return Waterfall(2 * ideal_s, ideal_s, ideal_s + loss_s, loss_s, parts, 0)


def make_point(
    parallel: str, num_devices: int, rows: int, peak_gib: float | None = 1.0, setting: str = ""
) -> MemoryPoint:
    """A cell's peak; None: it ran out of memory."""
    peak = None if peak_gib is None else int(peak_gib * 2**30)
    folder = f"0_{parallel}_n{num_devices}"
    out = peak_gib is None
    return MemoryPoint(folder, parallel, num_devices, setting, rows, peak, "process", out)


def make_failure(folder: str = "3_ddp_n4", **changes: Any) -> Failure:
    why, trace = "out of memory", "Traceback\n  in f\n"
    return replace(
        Failure(folder, "ddp-n4", "failed", "oom", 1, "forward", 3, why, trace), **changes
    )
