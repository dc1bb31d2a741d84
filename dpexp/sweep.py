"""Hydra's callback: refuses a bad config before a folder is made, ends a sweep with a report."""

from __future__ import annotations

import atexit
import sys
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, open_dict

from dpexp import env, slurm
from dpexp.cell import announce
from dpexp.check import check
from dpexp.compose import SWEEPS, discard, explain_os
from dpexp.config import load, without_hydra
from dpexp.console import refuse
from dpexp.errors import ConfigError
from dpexp.gathering import run_folder
from dpexp.going_on import folder_to_go_on_in, take_over
from dpexp.launchers import refuse_launcher, simultaneous, typed
from dpexp.records import RunResult
from dpexp.repeating import refuse_other_sweepers
from dpexp.resuming import refuse_rerun_alone, without_own
from dpexp.schema import Config
from dpexp.schema_measuring import RanksFrom
from dpexp.searching import OPTUNA
from dpexp.sweep_lock import SweepLock, claim_earlier, claim_new, claim_run


@final
@dataclass(frozen=True)
class Begun:
    """A sweep that has its folder."""

    folder: Path
    overrides: list[str]  # that the user typed, but for those of the sweep itself
    lock: SweepLock
    new: bool  # not an earlier one that goes on
    search: bool = False  # Optuna's, in which a cell that fails is a pruned trial
    # Results by folder name whose run.json could not be written.
    unwritten: dict[str, dict[str, Any]] = field(default_factory=dict)


# That of this context, for one that ends before its last cell.
begun: ContextVar[Begun | None] = ContextVar("begun", default=None)


def is_here() -> bool:
    """Whether this process is the sweep's own, and not one that a launcher started for cells."""
    return begun.get() is not None


@final
class DpexpCallback(Callback):
    """Hooks into Hydra's life of a run and of a sweep.

    Hydra swallows what a callback raises unless it is not an Exception, hence SystemExit.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        try:
            if config.parallel.get("ranks_from") == RanksFrom.slurm.value:
                slurm.take_rank()
            own = load(without_hydra(config))
            check(own)
            outer = env.outer_launcher()
            if own.resume is not None:
                _put_run(config, _go_on_with_run(own, config))
            elif outer is None:
                atexit.register(claim_run(Path(config.hydra.run.dir)).release)
            else:
                _put_run(config, run_folder(outer, _typed(config), own))
            if outer is not None and outer.rank != 0:
                with open_dict(config.hydra):
                    config.hydra.output_subdir = None  # .hydra/ is written once
        except ConfigError as error:
            refuse(error)
        except OSError as error:  # else Hydra would go on, with a run in a new folder
            refuse(explain_os(error), cause=error)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        asked = config.get("resume")
        try:
            refuse_other_sweepers(config)
            refuse_launcher(config.hydra)
            if asked is None:
                refuse_rerun_alone(config.get("rerun"))
                lock = claim_new(folder)
            else:
                folder, lock = claim_earlier(asked, folder, Path(SWEEPS))
                go_on_in(config, folder)
        except ConfigError as error:
            refuse(error)
        except OSError as error:
            refuse(explain_os(error), cause=error)
        atexit.register(lock.release)  # Hydra has no hook for a sweep that is refused or stopped
        search = config.hydra.sweeper.get("_target_") == OPTUNA
        overrides = without_own(typed(config.hydra))
        begun.set(Begun(folder, overrides, lock, new=asked is None, search=search))
        together = simultaneous(config.hydra, pin=config.get("pin") is True)
        if together is not None:
            announce([together])

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        sweep = begun.get()
        if sweep is None:
            return
        well = finish(sweep)
        sweep.lock.release()
        if not well:
            sys.exit(1)


def _typed(config: DictConfig) -> Path | None:
    """The folder of the run, where the user has said it."""
    named = any(
        each.lstrip("+").startswith("hydra.run.dir=") for each in config.hydra.overrides.hydra
    )
    return Path(config.hydra.run.dir) if named else None


def _put_run(config: DictConfig, folder: Path) -> None:
    """Let the run that begins write to this folder."""
    with open_dict(config.hydra):
        config.hydra.run.dir = str(folder)


def _go_on_with_run(own: Config, config: DictConfig) -> Path:
    """The folder of an earlier run in which this one goes on."""
    folder = folder_to_go_on_in(own, _typed(config))
    outer = env.outer_launcher()
    if outer is None or outer.rank == 0:
        atexit.register(take_over(folder).release)
    return folder


def go_on_in(config: DictConfig, folder: Path) -> None:
    """Let the cells of a sweep run in the folder of an earlier one."""
    path = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    with open_dict(config.hydra):
        config.hydra.sweep.dir = str(folder)
        # Each job is composed anew, from these.
        config.hydra.overrides.hydra.append(f"hydra.sweep.dir='{path}'")


def abandon() -> None:
    """Give back the folder of a sweep that was refused; a new one is removed."""
    sweep = begun.get()
    if sweep is not None:
        sweep.lock.release()
        if sweep.new:  # no cell has run: all are composed first
            discard(sweep.folder)
        begun.set(None)


def keep_unwritten(name: str, result: RunResult) -> None:
    """A cell's result that has no file: for the report, where the sweep is of this process.

    Args:
        name: of the cell's folder.
    """
    sweep = begun.get()
    if sweep is not None:
        sweep.unwritten[name] = result.to_dict()


def finish(sweep: Begun) -> bool:
    """Write a sweep's report and print it in short.

    Returns:
        Whether every cell is ok or skipped, of a search whether one is ok; and a report is written.
    """
    from dpexp.report.build import build
    from dpexp.report.tables import show

    report = build(sweep.folder, sweep.overrides, sweep.unwritten)
    show(report.content, sweep.folder, report.problems, written=report.written)
    cells = report.content.cells
    if sweep.search:
        return any(cell.status == "ok" for cell in cells) and report.written
    return bool(cells) and report.content.status == "ok" and report.written
