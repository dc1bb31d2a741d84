"""The command line: ``python -m dpexp key=value …``."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any, NoReturn, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpexp import __version__, compose, console, env, launched_cell, launchers
from dpexp.careful import SweepStoppedError
from dpexp.cell import InterruptedRunError, announce, claim_folder, run_cell, unreadable
from dpexp.config import load
from dpexp.errors import ConfigError
from dpexp.records import RunResult
from dpexp.sweep import begun, finish, is_here


def run_job(composed: DictConfig) -> float | None:
    """One run, or one cell of a sweep. Returns its samples/s, which a sweeper may optimise."""
    settings = HydraConfig.get()
    folder = Path(settings.runtime.output_dir)
    in_sweep = settings.mode is RunMode.MULTIRUN
    if in_sweep and not is_here():
        launched_cell.settle(outlives_sweep=launchers.target_of(settings) == launchers.SLURM)
    try:
        config = load(composed)
    except ConfigError as error:
        if not in_sweep:
            console.refuse(error)  # not reached: the callback has refused it before
        raw = cast(dict[str, Any], OmegaConf.to_container(composed, resolve=False))
        console.show_cell(unreadable(raw, error, folder), folder)
        return None
    try:
        claim_folder(folder)
    except ConfigError as error:
        console.refuse(error)
    try:
        told = _launchers_notes(settings) if in_sweep else []
        user_dir = Path(settings.runtime.cwd)
        result = run_cell(config, folder, user_dir, in_sweep=in_sweep, told=told)
    except ConfigError as error:
        compose.discard(folder)
        console.refuse(error)
    except InterruptedRunError as stop:
        _interrupted(stop, folder, in_sweep)
    if result is None:
        return None
    _report(result, folder, in_sweep)
    return (result.throughput or {}).get("samples_per_s")


def _launchers_notes(settings: Any) -> list[str]:
    together, changed = launchers.simultaneous(settings), launchers.changed_variables(settings)
    announce(changed)
    return [*([together] if together else []), *changed]  # the sweep has told the first


def _report(result: RunResult, folder: Path, in_sweep: bool) -> None:
    if in_sweep:
        console.show_cell(result, folder)
    elif result.status == "ok":
        console.show_run(result, folder)
    else:
        console.show_failure(result, folder)
        sys.exit(1)


def main() -> None:
    """Entry point. Exit status: 0, 1 for any failure, 130 after Ctrl-C, 143 after SIGTERM."""
    outer = env.outer_launcher()
    console.open_closed_streams()
    signal.signal(signal.SIGINT, console.leave_quietly)
    env.take_over_hydra_errors()
    env.remember_typed()
    compose.register()
    arguments = sys.argv[1:]
    if "--version" in arguments:
        print(f"dpexp {__version__}")
        return
    try:
        if outer is not None:
            arguments = compose.arguments_under_torchrun(arguments, outer)
        sys.argv[1:] = arguments
        compose.refuse_bad_choices(arguments)
        hydra.main(
            version_base="1.3", config_path=str(compose.config_folder()), config_name="config"
        )(run_job)()
    except ConfigError as error:
        console.refuse(error)
    except (HydraException, OmegaConfBaseException) as error:
        folder = begun.get()
        if folder is not None:
            compose.discard(folder)  # no cell has run: Hydra composes all of them first
        console.refuse(compose.explain(error, arguments), cause=error)
    except OSError as error:
        console.refuse(compose.explain_os(error), cause=error)
    except SweepStoppedError as stop:
        print(f"dpexp: {stop}", file=sys.stderr)
        finish(stop.folder, stop.overrides)
        sys.exit(128 + stop.signum)
    except KeyboardInterrupt:
        sys.exit(130)
    if outer is not None:
        # Everything is written. An interpreter that unwinds after a process group was in it is
        # aborted now and then ("terminate called without an active exception").
        console.leave()


def _interrupted(stop: InterruptedRunError, folder: Path, in_sweep: bool) -> NoReturn:
    print(f"{stop.result.label}: {stop}; its steps so far are in {folder}", file=sys.stderr)
    settings = HydraConfig.get()
    if in_sweep and not is_here():
        alone = launchers.target_of(settings) in launchers.ONE_PROCESS_A_CELL
        launched_cell.end(stop.signum, alone=alone)
    if in_sweep:
        base = Path(settings.runtime.cwd) / settings.sweep.dir  # chdir may have moved us
        finish(base, [str(entry) for entry in settings.overrides.task])
    sys.exit(128 + stop.signum)


if __name__ == "__main__":
    main()
