"""Cells of a sweep that nobody ran: derived from one real result, with other figures and noise."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# A setting's cells: strategy and devices. The last one runs out of memory.
GRID = (
    ("none", 1), ("dp", 2), ("dp", 4), ("dp", 8), ("ddp", 1), ("ddp", 2), ("ddp", 4), ("ddp", 8),
    ("ddp", 16), ("ddp", 32),
)  # fmt: skip
NOISE = 0.02
SHAPES = "module,replica,input_shape,output_shape,count,first_step,last_step\n"


def write_sweep(folder: Path, run: dict[str, Any], cells: int, repeats: int = 1) -> None:
    """Write the folders of a sweep of so many cells, that differ in batch size too.

    Args:
        run: ``run.json`` of a real run under ddp on 2 devices.
    """
    random_numbers = random.Random(0)
    for number, result in enumerate(results(run, cells, repeats, random_numbers)):
        cell = folder / f"{number}_{result['parallel']}_n{result['num_devices']}"
        (cell / ".hydra").mkdir(parents=True)
        (cell / "run.json").write_text(json.dumps(result, indent=2) + "\n")
        rows = [f',{replica},"[15, 5]","[15, 2]",20,0,19\n' for replica in range(2)]
        (cell / "shapes.csv").write_text(SHAPES + "".join(rows))
    typed = ["parallel=none,dp,ddp", "num_devices=1,2,4,8,16,32", f"repeats={repeats}"]
    record = {"hydra": {"overrides": {"task": typed}}}
    (folder / "multirun.yaml").write_text(json.dumps(record) + "\n")  # JSON is YAML


def results(
    run: dict[str, Any], cells: int, repeats: int, random_numbers: random.Random
) -> Iterator[dict[str, Any]]:
    """``run.json`` data of each run, round by round."""
    for repeat in range(repeats):
        for place in range(cells):
            setting, which = divmod(place, len(GRID))
            strategy, devices = GRID[which]
            yield _derived(run, strategy, devices, 8 * (setting + 1), repeat, random_numbers)


def _derived(
    run: dict[str, Any],
    strategy: str,
    devices: int,
    batch: int,
    repeat: int,
    random_numbers: random.Random,
) -> dict[str, Any]:
    """The run on so many devices, each of which wins 90 % of what it could."""
    made = copy.deepcopy(run)
    noise = random_numbers.gauss(1.0, NOISE)
    factor = noise / (1.0 if devices == 1 else 0.9 * devices)
    config = {"batch_size": batch, "num_devices": devices, "repeat": repeat}
    made["config"] |= config
    made["config"]["parallel"]["strategy"] = strategy
    made |= {
        "label": f"{strategy}-n{devices}", "parallel": strategy, "num_devices": devices,
        "emulated": strategy == "dp", "repeat": repeat,
        "batch": {"global": batch, "per_device": -(-batch // devices)},
    }  # fmt: skip
    made["num_processes"] = 1 if strategy in ("none", "dp") else devices
    _scale(made, factor)
    made["ranks"] = [{**made["ranks"][0], "rank": rank} for rank in range(made["num_processes"])]
    made["memory"]["peak_bytes"] = [made["memory"]["peak_bytes"][0]] * made["num_processes"]
    if strategy != "ddp":
        made["comm"] = made["stragglers"] = None
    else:
        own = made["comm"]["ranks"][0]
        made["comm"]["ranks"] = [{**own, "rank": rank} for rank in range(devices)]
    if devices == GRID[-1][1]:
        message = "CUDA out of memory. Tried to allocate 2.00 GiB"
        error = {"kind": "oom", "type": "OutOfMemoryError", "message": message, "rank": 0}
        trace = "\n".join(f'  File "model.py", line {line}, in forward' for line in range(30))
        made |= {"status": "failed", "throughput": None, "error": {**error, "traceback": trace}}
    return made


def _scale(run: dict[str, Any], factor: float) -> None:
    """All its times by a factor."""
    run["throughput"]["samples_per_s"] /= factor
    run["throughput"]["samples_per_s_per_device"] /= factor * run["num_devices"]
    run["throughput"]["wall_s"] *= factor
    for summary in run["timing"].values():
        for name in summary.keys() - {"count"}:
            summary[name] *= factor
    for rank in run["ranks"]:
        rank["wall_s"] *= factor
        rank["phase_mean_s"] = {key: s * factor for key, s in rank["phase_mean_s"].items()}
    for rank in (run["comm"] or {}).get("ranks", ()):
        for name in rank.keys() - {"rank"}:
            rank[name] = rank[name] and rank[name] * factor
