"""Hydra's callback: refuses a bad config before a folder is made, ends a sweep with a report."""

from __future__ import annotations

import copy
import sys
from contextvars import ContextVar
from pathlib import Path
from typing import Any, final

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, open_dict

from dpexp.cell import announce, claim_folder, claim_sweep_folder
from dpexp.check import check
from dpexp.config import load
from dpexp.console import refuse
from dpexp.errors import ConfigError
from dpexp.launchers import refuse_launcher, simultaneous, typed
from dpexp.repeating import refuse_other_sweepers
from dpexp.searching import OPTUNA

# The folder of the sweep that Hydra has begun in this context, for one that ends before its cells.
begun: ContextVar[Path | None] = ContextVar("begun", default=None)


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
            check(load(without_hydra(config)))
            claim_folder(Path(config.hydra.run.dir))
        except ConfigError as error:
            refuse(error)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        try:
            refuse_other_sweepers(config)
            refuse_launcher(config.hydra)
            claim_sweep_folder(folder)
        except ConfigError as error:
            refuse(error)
        begun.set(folder)
        together = simultaneous(config.hydra)
        if together is not None:
            announce([together])

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        search = config.hydra.sweeper.get("_target_") == OPTUNA
        if not finish(folder, typed(config.hydra), search=search):
            sys.exit(1)


def without_hydra(config: DictConfig) -> DictConfig:
    """A copy of a composed config without Hydra's own node."""
    copied = copy.deepcopy(config)
    with open_dict(copied):
        copied.pop("hydra", None)
    return copied


def finish(folder: Path, overrides: list[str], *, search: bool = False) -> bool:
    """Write a sweep's report and print its table.

    Returns:
        Whether every cell is ok or skipped; of a search, whether one is ok.
    """
    from rich.console import Console
    from rich.markup import escape

    from dpexp.report.build import build
    from dpexp.report.tables import pointers, print_scaling, wide

    cells = build(folder, overrides)
    console = Console()
    print_scaling(cells, wide(console))
    for line in pointers("report", folder / "report.md", folder):
        console.print(escape(line), soft_wrap=True, highlight=False)
    if search:
        return any(cell.status == "ok" for cell in cells)
    return bool(cells) and all(cell.status in ("ok", "skipped") for cell in cells)
