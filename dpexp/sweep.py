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

from dpexp.cell import claim_folder
from dpexp.check import check
from dpexp.compose import SWEEPS, discard, explain_os
from dpexp.config import load, without_hydra
from dpexp.console import refuse
from dpexp.errors import ConfigError
from dpexp.repeating import refuse_other_sweepers
from dpexp.resuming import refuse_rerun_alone, without_own
from dpexp.sweep_lock import SweepLock, claim_earlier, claim_new


@final
@dataclass(frozen=True)
class Begun:
    """A sweep that has its folder."""

    folder: Path
    overrides: list[str]  # that the user typed, but for those of the sweep itself
    lock: SweepLock
    new: bool  # not an earlier one that goes on
    # Results by folder name whose run.json could not be written.
    unwritten: dict[str, dict[str, Any]] = field(default_factory=dict)


# That of this context, for one that ends before its last cell.
begun: ContextVar[Begun | None] = ContextVar("begun", default=None)


@final
class DpexpCallback(Callback):
    """Hooks into Hydra's life of a run and of a sweep.

    Hydra swallows what a callback raises unless it is not an Exception, hence SystemExit.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        try:
            check(load(without_hydra(config)))
            claim_folder(Path(config.hydra.run.dir))
        except ConfigError as error:
            refuse(error)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        asked = config.get("resume")
        try:
            refuse_other_sweepers(config)
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
        overrides = without_own([str(override) for override in config.hydra.overrides.task])
        begun.set(Begun(folder, overrides, lock, new=asked is None))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        sweep = begun.get()
        if sweep is None:
            return
        well = finish(sweep)
        sweep.lock.release()
        if not well:
            sys.exit(1)


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


def finish(sweep: Begun) -> bool:
    """Write a sweep's report and print it in short.

    Returns:
        Whether every cell is ok or skipped, and a report is written.
    """
    from dpexp.report.build import build
    from dpexp.report.tables import show

    report = build(sweep.folder, sweep.overrides, sweep.unwritten)
    show(report.content, sweep.folder, report.problems, written=report.written)
    return bool(report.content.cells) and report.content.status == "ok" and report.written
