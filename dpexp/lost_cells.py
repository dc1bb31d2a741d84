"""The results of cells whose own process could not write them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dpexp import env, slurm
from dpexp.config import load, to_plain
from dpexp.errors import ConfigError
from dpexp.recording import write_result
from dpexp.records import (
    STEP_TABLES,
    STEPS_LEFT,
    ErrorRecord,
    RunResult,
    read_run,
    run_result_from,
)


def record_lost(
    folder: Path,
    status: str,
    message: str,
    config: dict[str, Any] | None = None,
    error: ErrorRecord | None = None,
) -> None:
    """Write the result of a cell whose own process cannot.

    Args:
        config: as composed; None takes it from the folder of a cell that has begun.
    """
    if config is None:
        loaded: Any = OmegaConf.to_container(OmegaConf.load(folder / ".hydra/config.yaml"))
        config = dict(loaded)
    with contextlib.suppress(ConfigError):  # as other cells have it, to be compared with them
        config = to_plain(load(OmegaConf.create(config)))
    strategy = str((config.get("parallel") or {}).get("strategy"))
    count = config.get("num_devices")
    kind = "interrupted" if status == "interrupted" else "crash"
    folder.mkdir(parents=True, exist_ok=True)
    result = RunResult(
        status=status,
        label=f"{strategy}-n{count}",
        config=config,
        environment={"variables": env.recorded()},
        parallel=strategy,
        num_devices=count if isinstance(count, int) else None,
        scaling=str(config.get("scaling")),
        error=error or ErrorRecord(kind, "Launcher", message, phase="launch"),
        repeat=config.get("repeat", 0),
        notes=[STEPS_LEFT] if any(folder.glob(STEP_TABLES)) else [],
    )
    write_result(result, folder)


def record_ended(folder: Path, ended: ErrorRecord, config: dict[str, Any]) -> None:
    """Write the result of a job that Slurm has ended, or what is missing in its own."""
    path = folder / "run.json"
    if not path.exists():
        record_lost(folder, slurm.status_of(ended), ended.message, config, ended)
        return
    if ended.type == slurm.OTHER_END:
        return  # the cell knows more
    own = run_result_from(read_run(path))
    if own.error is not None and own.error.kind in ("interrupted", "crash"):
        slurm.with_reason(own, ended).write(path)
