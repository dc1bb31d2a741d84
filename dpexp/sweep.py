"""Hydra's callback: refuses a bad config before a folder is made, ends a sweep with a report."""

from __future__ import annotations

import copy
import sys
from contextvars import ContextVar
from pathlib import Path
from typing import Any, final

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, open_dict

from dpexp.cell import claim_folder, claim_sweep_folder
from dpexp.check import check
from dpexp.config import load
from dpexp.console import refuse
from dpexp.errors import ConfigError
from dpexp.repeating import refuse_other_sweepers

# The folder of the sweep that Hydra has begun in this context, for one that ends before its cells.
begun: ContextVar[Path | None] = ContextVar("begun", default=None)


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
        try:
            refuse_other_sweepers(config)
            claim_sweep_folder(folder)
        except ConfigError as error:
            refuse(error)
        begun.set(folder)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        overrides = [str(override) for override in config.hydra.overrides.task]
        if not finish(folder, overrides):
            sys.exit(1)


def without_hydra(config: DictConfig) -> DictConfig:
    """A copy of a composed config without Hydra's own node."""
    copied = copy.deepcopy(config)
    with open_dict(copied):
        copied.pop("hydra", None)
    return copied


def finish(folder: Path, overrides: list[str]) -> bool:
    """Write a sweep's report and print it in short. Whether every cell is ok or skipped."""
    from dpexp.report.build import build
    from dpexp.report.tables import show

    report = build(folder, overrides)
    show(report.content, report.problems, folder)
    cells = report.content.cells
    return bool(cells) and report.content.status == "ok" and report.written
