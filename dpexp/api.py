"""dpexp from Python and from notebooks: the same runs, as objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from dpexp import compose
from dpexp.cell import (
    InterruptedRunError,
    UnwrittenResultError,
    claim_folder,
    claim_sweep_folder,
    run_cell,
    unreadable,
)
from dpexp.config import load
from dpexp.errors import NO_VALUE, ConfigError
from dpexp.records import RunResult
from dpexp.repeating import combinations
from dpexp.repeats import with_repeats
from dpexp.report.build import build
from dpexp.report.scaling import Cell
from dpexp.stopping import Stop, StopAtOnceError, listening


@final
@dataclass(frozen=True)
class Run:
    """A finished run. `result.status` says how it ended."""

    result: RunResult
    folder: Path

    @property
    def samples_per_s(self) -> float | None:
        """Global throughput over the measured steps, or None."""
        return (self.result.throughput or {}).get("samples_per_s")


@final
@dataclass(frozen=True)
class Sweep:
    """A finished sweep: `runs` in order; `cells` with speed-up and efficiency, repeats as one."""

    runs: tuple[Run, ...]
    cells: tuple[Cell, ...]
    folder: Path


def run(overrides: Sequence[str] = (), folder: str | Path | None = None) -> Run:
    """Run one configuration, as ``python -m dpexp <overrides>`` does.

    Classes are named through `_target_` and must be importable: one defined in a notebook's cell
    or in a script read from stdin does not exist in the processes of the run.

    Args:
        overrides: as on the command line, such as ``["parallel=ddp", "num_devices=2"]``.
        folder: the run's folder; a new one below ``outputs/runs`` when None.

    Raises:
        dpexp.ConfigError: the config is refused. A failure in the run is a result.
        KeyboardInterrupt: Ctrl-C; what there is of the run is in its folder.
        OSError: the run's folder cannot be written.
    """
    where = None if folder is None else Path(folder).absolute()
    with listening():
        return _run(list(overrides), where, in_sweep=False)


def sweep(overrides: Sequence[str], folder: str | Path | None = None) -> Sweep:
    """Run every combination, as ``python -m dpexp -m <overrides>`` does.

    Args:
        overrides: with commas for choices, such as ``["parallel=none,dp", "num_devices=1,2"]``.
        folder: the sweep's folder; a new one below ``outputs/sweeps`` when None.

    Raises:
        dpexp.ConfigError: an override cannot be composed. What a cell does is a result.
        KeyboardInterrupt: Ctrl-C; the report of what there is is written. After a second one it
            may not be.
        OSError: the sweep's folder cannot be written.
    """
    cells = _combinations(overrides)
    # What cannot be composed is told before the first cell runs.
    jobs = with_repeats(cells, [compose.composed(cell) for cell in cells])
    where = compose.fresh_folder(compose.SWEEPS) if folder is None else Path(folder).absolute()
    claim_sweep_folder(where)
    where.mkdir(parents=True, exist_ok=True)
    record = OmegaConf.create({"hydra": {"overrides": {"task": list(overrides)}}})
    OmegaConf.save(record, where / "multirun.yaml")
    with listening():
        runs, unwritten = [], {}
        try:
            for number, job in enumerate(jobs):
                node = compose.composed(job)
                name = compose.cell_name(node.parallel.strategy, node.num_devices, node.device)
                cell = where / f"{number}_{name}"
                try:
                    runs.append(_run(job, cell, in_sweep=True))
                except UnwrittenResultError as error:
                    runs.append(Run(error.result, cell))
                    unwritten[cell.name] = error.result.to_dict()
        except StopAtOnceError:
            raise
        except BaseException:  # after Ctrl-C too: nothing that is finished is lost
            build(where, list(overrides), unwritten)
            raise
        rows = build(where, list(overrides), unwritten)
    return Sweep(tuple(runs), tuple(rows), where)


def _run(overrides: list[str], folder: Path | None, *, in_sweep: bool) -> Run:
    composed = compose.composed(overrides)
    if not in_sweep:
        load(composed)  # refused before a folder is made
    where = compose.fresh_folder(compose.RUNS) if folder is None else folder
    where.mkdir(parents=True, exist_ok=True)
    claim_folder(where)
    try:
        result = _result(composed, where, in_sweep)
    except ConfigError:
        compose.discard(where)
        raise
    except InterruptedRunError as stop:
        raise Stop(stop.signum) from stop
    if result is None:
        raise ConfigError(
            "torchrun",
            NO_VALUE,
            "dpexp.run starts its own processes",
            fix="python -m dpexp under torchrun",
        )
    record = where / ".hydra"
    record.mkdir(exist_ok=True)
    OmegaConf.save(composed, record / "config.yaml")
    OmegaConf.save(OmegaConf.create(overrides), record / "overrides.yaml")
    return Run(result, where)


def _result(composed: DictConfig, folder: Path, in_sweep: bool) -> RunResult | None:
    try:
        config = load(composed)
    except ConfigError as error:
        if not in_sweep:
            raise
        raw = cast(dict[str, Any], OmegaConf.to_container(composed, resolve=False))
        return unreadable(raw, error, folder)
    return run_cell(config, folder, Path.cwd(), in_sweep=in_sweep)


def _combinations(overrides: Sequence[str]) -> list[list[str]]:
    """One list of overrides per cell, in the order of the command line's sweeps."""
    try:
        return combinations(OverridesParser.create().parse_overrides(list(overrides)))
    except HydraException as error:
        raise compose.explain(error, list(overrides)) from error
