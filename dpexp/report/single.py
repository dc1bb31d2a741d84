"""What the console shows of a single run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dpexp.records import DP_PARTS, PHASES
from dpexp.report.parity import parity_line
from dpexp.report.tables import number, pointers
from dpexp.report.trust import went_on
from dpexp.report.whereabouts import checkpoints_line, hosts_line, pinned_line
from dpexp.texts import visible

# Parts of forward and backward; the last one is no part of the step's time.
COMM_NAMES = {
    "comm_exposed": "exposed comm.",
    "straggler_wait": "straggler wait",
    "comm_overlapped": "overlapped comm.",
}


def print_run(run: dict[str, Any], folder: Path, console: Console) -> None:
    """A single run's summary: where the time of a step went."""
    timing = run.get("timing") or {}
    console.print(escape(visible(_run_title(run))), soft_wrap=True, highlight=False)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("phase")
    for head in ("mean ms", "p50 ms", "p95 ms", "max ms"):
        table.add_column(head, justify="right")
    for phase in ("step", *PHASES):
        _phase_row(table, phase, timing.get(phase))
        if phase == "forward":
            for part in DP_PARTS:
                if part in timing:
                    _phase_row(table, f"  {part}", timing[part])
    for part, name in COMM_NAMES.items():
        _phase_row(table, name, timing.get(part))
    console.print(table)
    for line in (_run_summary(run), *_remarks(run), *pointers("folder", folder, folder)):
        console.print(escape(visible(line)), soft_wrap=True, highlight=False)


def _remarks(run: dict[str, Any]) -> list[str]:
    """What else there is to say, a line each."""
    lines = [
        interval_line(run),
        straggler_line(run),
        clock_line(run),
        calibration_line(run),
        parity_line(run),
        hosts_line(run),
        pinned_line(run),
        checkpoints_line(run),
        went_on(run),
    ]
    return [line for line in lines if line is not None]


def interval_line(run: dict[str, Any]) -> str | None:
    """How well the mean step is known."""
    step = (run.get("uncertainty") or {}).get("step_mean_s")
    if not step or step.get("low") is None:
        return None
    low, high = step["low"] * 1e3, step["high"] * 1e3
    return f"mean step {step['mean'] * 1e3:.4g} ms ({low:.4g} to {high:.4g}, 95%, within this run)"


def calibration_line(run: dict[str, Any]) -> str | None:
    """What the exchange of gradients costs by leaving it out; None where that was not tried."""
    found = (run.get("comm") or {}).get("calibration") or {}
    if not found.get("pairs"):
        return None
    low, high = (each * 1e3 for each in found["exchange_quartiles_s"])
    return (
        f"calibration: {found['covers']}: {found['exchange_s'] * 1e3:.3g} ms a step (quartiles "
        f"{low:.3g} to {high:.3g}, {found['pairs']} pairs)"
    )


def straggler_line(run: dict[str, Any]) -> str | None:
    """Which rank the others wait for; None where there is none."""
    found = run.get("stragglers")
    if not found or found["rank"] is None:
        return None
    rank = found["ranks"][found["rank"]]
    wait_ms, share = rank["others_wait_mean_s"] * 1e3, rank["share_of_steps"]
    return (
        f"the other ranks wait for {_at(found)}: {wait_ms:.3g} ms a step, it comes last in "
        f"{share:.0%} of the steps; it loses its time in {found['phase']}"
    )


def _at(found: dict[str, Any]) -> str:
    host = found.get("host")
    return f"rank {found['rank']}" + (f" on {host}" if host else "")


def clock_line(run: dict[str, Any]) -> str | None:
    """How the clocks of the hosts differ; None where there is one clock."""
    found = run.get("stragglers") or {}
    if not found.get("clock_error_s"):
        return None
    most_s = max(found["clock_offsets_s"], key=abs)
    return (
        f"clocks: up to {most_s:.6g} s from rank 0's, allowed for; known within "
        f"{found['clock_error_s'] * 1e3:.2g} ms"
    )


def _phase_row(table: Table, name: str, summary: dict[str, Any] | None) -> None:
    if summary is None:
        return
    keys = ("mean_s", "p50_s", "p95_s", "max_s")
    cells = ("–" if summary[key] is None else f"{summary[key] * 1e3:.4f}" for key in keys)
    table.add_row(name, *cells)


def _run_title(run: dict[str, Any]) -> str:
    emulated = ", emulated" if run["emulated"] else ""
    steps, rank = run["steps"], ""
    if (run["num_processes"] or 1) > 1:
        rank = f"; times of rank {run['timing_rank']}, the slowest"
    return (
        f"{run['label']} on {run['device']}{emulated}: {steps['measured']} measured steps "
        f"after {steps['warmup']} of warm-up{rank}"
    )


def _run_summary(run: dict[str, Any]) -> str:
    batch, throughput = run["batch"], run["throughput"]
    parts = [
        f"batch {batch['global']} rows, {batch['per_device']} per device",
        f"{number(throughput['samples_per_s'], ',.0f')} samples/s over all devices",
        f"{run['samples_seen']} samples seen",
        f"peak memory {max(run['memory']['peak_bytes']) / 2**20:.0f} MiB per process",
    ]
    if run["loss"] is not None and run["loss"]["first"] is not None:
        parts.append(f"loss {run['loss']['first']:.4g} to {number(run['loss']['last'], '.4g')}")
    if run["metric"] is not None:
        metric = run["metric"]
        figure = number(metric["value"], ".6g")
        parts.append(f"{metric['name']} {figure} over {metric['samples']} samples")
    return "; ".join([*parts, *_efficiency(run)])


def _efficiency(run: dict[str, Any]) -> list[str]:
    """MFU and energy, where they are known."""
    compute, energy, parts = run.get("compute") or {}, run.get("energy") or {}, []
    if compute.get("mfu") is not None:
        least = "at least " if compute["flops_at_least"] else ""
        each = compute["achieved_flops_per_s_per_device"] / 1e9
        parts.append(
            f"MFU {least}{100 * compute['mfu']:.3g} % ({each:.3g} GFLOP/s of the model per device, "
            f"{compute['peak_source']} peak "
            f"{compute['peak_flops_per_s_per_device'] / 1e9:.3g} GFLOP/s)"
        )
    if energy.get("per_sample_j") is not None:
        parts.append(f"{energy['per_sample_j']:.3g} J per sample")
    return parts
