"""A single run that goes on with an earlier one, in its folder. No torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dpexp import checkpoint, env
from dpexp.cell import announce
from dpexp.checkpoint import Checkpoint
from dpexp.compose import RUNS
from dpexp.config import to_plain
from dpexp.console import say
from dpexp.errors import ConfigError
from dpexp.orphans import wait_for_orphans
from dpexp.records import read_run
from dpexp.resuming import refuse_other_run
from dpexp.schema import Config
from dpexp.sweep_lock import SweepLock, lock

_LENGTH = ("epochs", "steps", "until")  # what says how long a run is
_WAY_OUT = "no resume, which begins anew, with checkpoint.every_s=… or checkpoint.every_steps=…"


def folder_to_go_on_in(config: Config, named: Path | None) -> Path:
    """The folder of the run that `resume` names, or the newest one that has a checkpoint.

    Args:
        named: the folder that the run is told to write to (``hydra.run.dir``), if it is. Where that
            has nothing to go on from, ``resume=true`` begins the run there: a script of a job may
            always say both.

    Raises:
        ConfigError: there is none, it has no checkpoint, or that is of a run with another config.
    """
    if isinstance(config.resume, str):
        run = Path(config.resume)
    else:
        run = _newest_run() if named is None else named
    found = checkpoint.newest(run)
    if found is None and config.resume is True and named is not None and not _ended_well(run):
        return run  # the first start of a job that is always told to resume, or one cut off early
    if found is None:
        what = "no whole checkpoint in this folder" if run.is_dir() else "no such folder"
        raise ConfigError("resume", str(run), f"there is {what}", fix=_WAY_OUT)
    refuse_other_run(str(run), found.state["config"], to_plain(config))
    _refuse_finished(run, to_plain(config))
    return run


def take_over(run: Path) -> SweepLock:
    """Make the folder of a run ready for another attempt: what there is of it lies aside.

    Returns:
        The right to work there, which no other process has until it is given back.

    Raises:
        ConfigError: another process works there.
    """
    held = lock(run, "resume")
    try:
        # A rank that was started sooner than this one may write its log already.
        parent = None if env.outer_launcher() is None else os.getppid()
        wait_for_orphans(run, in_cells=False, parent=parent)
        kept = checkpoint.put_aside(run, also=(".hydra",))
    except BaseException:
        held.release()
        raise
    found = checkpoint.newest(run)
    aside = "" if kept is None else f"; what it had written so far is in {kept}"
    if found is None:
        announce([f"{run} has no checkpoint to go on from: the run begins{aside}"])
    else:
        announce([f"{run} goes on from step {found.step}{aside}"])
    return held


def tell_how_to_go_on(run: Path) -> None:
    """Say that a run which has failed has a checkpoint, if it has."""
    saved = checkpoint.newest(run)
    if saved is not None:
        say(
            f"its state after {saved.step} steps is saved: the same command with resume={run} "
            "goes on from there"
        )


def _ended_well(run: Path) -> bool:
    try:
        return bool(read_run(run / "run.json")["status"] == "ok")
    except (OSError, ValueError):
        return False  # there is none, or it was cut off


def _refuse_finished(run: Path, config: dict[str, Any]) -> None:
    """Keep the result of a run that has done all its steps.

    Raises:
        ConfigError: it has, and no more are asked for.
    """
    try:
        result = read_run(run / "run.json")
    except (OSError, ValueError):
        return  # cut off
    asked = [config.get(key) == result["config"].get(key) for key in _LENGTH]
    if result["status"] == "ok" and all(asked):
        raise ConfigError(
            "resume",
            str(run),
            "this run has ended well, so nothing is left to do",
            fix="more epochs or steps, or no resume",
        )


def _newest_run() -> Path:
    """Of the runs that have a whole checkpoint."""
    base = Path(RUNS)
    found = [(run, whole) for run in base.glob("*/*") if (whole := checkpoint.newest(run))]
    if not found:
        raise ConfigError(
            "resume", True, f"there is no run with a checkpoint below {base}", fix=_WAY_OUT
        )
    return max(found, key=_begun)[0]


def _begun(found: tuple[Path, Checkpoint]) -> tuple[str, str, float]:
    run, newest = found
    # A folder is called by date and second; two of one second are told apart by their checkpoints.
    return run.parent.name, run.name[: len("00-00-00")], newest.state.get("taken_unix_s", 0.0)
