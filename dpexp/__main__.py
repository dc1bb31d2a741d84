"""The command line: ``python -m dpexp key=value …``."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpexp import __version__, compose, console, env, launched_cell, launchers
from dpexp.cell import InterruptedRunError, announce, claim_folder, run_cell, unreadable
from dpexp.config import load
from dpexp.errors import ConfigError
from dpexp.going_on import tell_how_to_go_on
from dpexp.recording import UnwrittenResultError
from dpexp.records import RunResult
from dpexp.stopping import Stop, StopAtOnceError, answer_with
from dpexp.sweep import abandon, begun, finish, is_here, keep_unwritten


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
        _told(partial(unreadable, raw, error, folder), folder, in_sweep=True)
        return None
    try:
        if config.resume is None and env.outer_launcher() is None:
            # Else the callback has made room there, or see gathering.py.
            claim_folder(folder)
    except ConfigError as error:
        console.refuse(error)
    try:
        told = _launchers_notes(settings, pin=config.pin) if in_sweep else []
        user_dir = Path(settings.runtime.cwd)
        run = partial(run_cell, config, folder, user_dir, in_sweep=in_sweep, told=told)
        with _imports_kept() if in_sweep else nullcontext():
            result = _told(run, folder, in_sweep=in_sweep)
    except ConfigError as error:
        compose.discard(folder)
        console.refuse(error)
    except InterruptedRunError as stop:
        console.say(f"{stop.result.label}: {stop}; its steps so far are in {folder}")
        if not in_sweep:
            tell_how_to_go_on(folder)
        if in_sweep and not is_here():
            alone = launchers.target_of(settings) in launchers.ONE_PROCESS_A_CELL
            launched_cell.end(stop.signum, alone=alone)
        raise Stop(stop.signum) from None
    return None if result is None else _figure(result)


@contextmanager
def _imports_kept() -> Iterator[None]:
    """Around a sweep's first cell, in which torch is imported: that is never to be collected.

    A full collection would take 0.1 s after it, and the configs of many cells call for some. No
    steps run in this process.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _figure(result: RunResult) -> float | None:
    """What a search may prefer: no rate of a run that does not compute what one device does.

    Nor of one that did not run in one go.
    """
    again = result.restarts or (result.checkpoint or {}).get("gone_on_from") is not None
    if again or (result.parity or {}).get("verdict") == "fail":
        return None
    return (result.throughput or {}).get("samples_per_s")


def _launchers_notes(settings: Any, *, pin: bool) -> list[str]:
    together = launchers.simultaneous(settings, pin=pin, in_cell=True)
    changed = launchers.changed_variables(settings)
    announce(changed)
    return [*([together] if together else []), *changed]  # the sweep has told the first


def _told(
    make: Callable[[], RunResult | None], folder: Path, *, in_sweep: bool
) -> RunResult | None:
    """Show the result that is made, also one that cannot be written."""
    try:
        result = make()
    except UnwrittenResultError as error:
        if not in_sweep:
            _report(error.measured, folder, leave=False)
            console.refuse(compose.explain_os(error), cause=error)
        keep_unwritten(folder.name, error.result)
        console.say(f"{folder.name}: no result file: {error}")
        result = error.result
    if result is not None and in_sweep:
        console.show_cell(result, folder)
    elif result is not None:
        _report(result, folder)
    return result


def _report(result: RunResult, folder: Path, *, leave: bool = True) -> None:
    if result.status == "ok":
        console.show_run(result, folder)
        return
    console.show_failure(result, folder)
    tell_how_to_go_on(folder)
    if leave:
        sys.exit(1)


def main() -> None:
    """Entry point. Exit status: 0, 1 for any failure, 130 after Ctrl-C, 143 after SIGTERM."""
    outer = env.outer_launcher()
    console.prepare_streams()
    answer_with(console.leave_quietly)
    env.take_over_hydra_errors()
    env.remember_typed()
    compose.register()
    arguments = sys.argv[1:]
    if "--version" in arguments:
        print(f"dpexp {__version__}")
        return
    try:
        _run(arguments, outer)
    except KeyboardInterrupt as stop:  # a second one may come while the first is answered
        answer_with(console.leave_quietly)
        sys.exit(128 + (stop.signum if isinstance(stop, Stop) else signal.SIGINT))
    if env.outer_launcher() is not None:  # of torchrun, or since of Slurm
        # Everything is written. An interpreter that unwinds after a process group was in it is
        # aborted now and then ("terminate called without an active exception").
        console.leave()


def _run(arguments: list[str], outer: env.OuterLauncher | None) -> None:
    try:
        if outer is not None:
            arguments = compose.arguments_under_torchrun(arguments, outer)
        sys.argv[1:] = arguments
        compose.refuse_bad_choices(arguments)
        hydra.main(
            version_base="1.3", config_path=str(compose.config_folder()), config_name="config"
        )(run_job)()
    except ConfigError as error:
        abandon()
        console.refuse(error)
    except (HydraException, OmegaConfBaseException) as error:
        abandon()
        console.refuse(compose.explain(error, arguments), cause=error)
    except OSError as error:
        _finish_sweep()
        console.refuse(compose.explain_os(error), cause=error)
    except StopAtOnceError:
        raise
    except (Exception, KeyboardInterrupt):  # of the first kind only what nobody thought of
        _finish_sweep()
        raise


def _finish_sweep() -> None:
    """The report of the cells that have run, when a sweep ends before its last one."""
    sweep = begun.get()
    if sweep is not None and (sweep.unwritten or any(sweep.folder.glob("*/run.json"))):
        finish(sweep)


if __name__ == "__main__":
    main()
