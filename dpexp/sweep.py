"""Hydra's callback: refuses a bad config before a folder is made, ends a sweep with a report."""

from __future__ import annotations

import copy
import sys
from contextvars import ContextVar
from dataclasses import dataclass, field
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


@final
@dataclass(frozen=True)
class Begun:
    """A sweep that Hydra has begun."""

    folder: Path
    overrides: list[str]  # that the user typed
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
        try:
            refuse_other_sweepers(config)
            claim_sweep_folder(folder)
        except ConfigError as error:
            refuse(error)
        overrides = [str(override) for override in config.hydra.overrides.task]
        begun.set(Begun(folder, overrides))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        sweep = begun.get()
        if sweep is not None and not finish(sweep):
            sys.exit(1)


def without_hydra(config: DictConfig) -> DictConfig:
    """A copy of a composed config without Hydra's own node."""
    copied = copy.deepcopy(config)
    with open_dict(copied):
        copied.pop("hydra", None)
    return copied


def finish(sweep: Begun) -> bool:
    """Write a sweep's report and print its table.

    Returns:
        Whether every cell is ok or skipped, and the report is written.
    """
    from rich.console import Console
    from rich.markup import escape

    from dpexp.report.build import build, read_cells
    from dpexp.report.scaling import analyse
    from dpexp.report.tables import pointers, print_scaling, wide

    folder, console = sweep.folder, Console()
    unwritten: OSError | None = None
    try:
        cells = build(folder, sweep.overrides, sweep.unwritten)
    except OSError as error:  # a full disk: the table is shown all the same
        cells, unwritten = analyse(read_cells(folder) | sweep.unwritten), error
    print_scaling(cells, wide(console))
    if unwritten is not None:
        reason = (unwritten.strerror or str(unwritten)).lower()
        print(f"dpexp: the report cannot be written to {folder}: {reason}", file=sys.stderr)
        return False
    for line in pointers("report", folder / "report.md", folder):
        console.print(escape(line), soft_wrap=True, highlight=False)
    return bool(cells) and all(cell.status in ("ok", "skipped") for cell in cells)
