"""dpexp from Python and from notebooks: the same runs, as objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from dpexp import compose
from dpexp.cell import (
    InterruptedRunError,
    claim_folder,
    run_cell,
    unreadable,
)
from dpexp.check import check
from dpexp.config import load, plain_or_none
from dpexp.errors import NO_VALUE, ConfigError
from dpexp.going_on import folder_to_go_on_in, take_over
from dpexp.provenance import git_state
from dpexp.recording import UnwrittenResultError
from dpexp.records import RunResult, read_run, run_result_from
from dpexp.repeating import combinations, refuse_own_choices
from dpexp.repeats import with_repeats
from dpexp.report.build import build
from dpexp.report.scaling import Cell
from dpexp.resuming import Planned, refuse_rerun_alone, rerun_of, without_own
from dpexp.stopping import Stop, StopAtOnceError, listening
from dpexp.sweep_folder import (
    as_first_typed,
    draw_of,
    first_overrides,
    left_to_run,
    write_record,
)
from dpexp.sweep_lock import SweepLock, claim_earlier, claim_new, claim_run

Composed = Callable[[Sequence[str]], DictConfig]


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

    With ``"resume=true"`` or ``"resume=<folder>"`` it goes on with an earlier run in its folder.

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
    composed = compose.composed(overrides)
    config = load(composed)  # refused before a folder is made
    named = None if folder is None else Path(folder).absolute()
    if config.resume is not None:
        check(config)
        where = folder_to_go_on_in(config, named).absolute()
        held = take_over(where)
    else:
        where = compose.fresh_folder(compose.RUNS) if named is None else named
        held = claim_run(where)
    try:
        with listening():
            return _run(composed, overrides, where, in_sweep=False)
    finally:
        held.release()


def sweep(overrides: Sequence[str], folder: str | Path | None = None) -> Sweep:
    """Run every combination, as ``python -m dpexp -m <overrides>`` does.

    With ``"resume=<folder>"`` or ``"resume=last"`` it goes on with an earlier sweep; `runs` has
    those too that were done then.

    Args:
        overrides: with commas for choices, such as ``["parallel=none,dp", "num_devices=1,2"]``.
        folder: the sweep's folder; a new one below ``outputs/sweeps`` when None. With
            ``resume=last`` the newest beside this one counts.

    Raises:
        dpexp.ConfigError: an override cannot be composed. What a cell does is a result.
        KeyboardInterrupt: Ctrl-C; the report of what there is is written. After a second one it
            may not be.
        OSError: the sweep's folder cannot be written.
    """
    git_state.cache_clear()
    with compose.composer() as composed:
        cells = _combinations(overrides, 0)
        own = composed(cells[0])
        # What cannot be composed is told before there is a folder.
        _jobs(composed, without_own(overrides), 0)
        where, lock = _claim(own, folder)
        try:
            jobs, numbers = _planned(composed, overrides, own, where)
            with listening():
                runs, rows = _run_cells(composed, jobs, numbers, where, without_own(overrides))
        finally:
            lock.release()
    return Sweep(tuple(runs), tuple(rows), where)


def _run_cells(
    composed: Composed,
    jobs: Sequence[list[str]],
    numbers: set[int],
    where: Path,
    typed: list[str],
) -> tuple[list[Run], list[Cell]]:
    """The cells of a sweep one after the other, those with `numbers` anew, and its report."""
    runs: list[Run] = []
    unwritten: dict[str, dict[str, Any]] = {}
    try:
        for number, job in enumerate(jobs):
            config = composed(job)
            cell = where / _cell_name(number, config)
            try:
                kept = number not in numbers
                run = _kept(cell) if kept else _run(config, job, cell, in_sweep=True)
            except UnwrittenResultError as error:
                run = Run(error.result, cell)
                unwritten[cell.name] = error.result.to_dict()
            runs += [] if run is None else [run]
    except StopAtOnceError:
        raise
    except BaseException:  # after Ctrl-C too: nothing that is finished is lost
        build(where, typed, unwritten)
        raise
    return runs, list(build(where, typed, unwritten).content.cells)


def _claim(own: DictConfig, folder: str | Path | None) -> tuple[Path, SweepLock]:
    """The folder of a sweep, of which no other process has one meanwhile."""
    default = Path(compose.SWEEPS)
    if own.resume is None:
        refuse_rerun_alone(own.rerun)
        where = compose.fresh_folder(compose.SWEEPS) if folder is None else Path(folder).absolute()
        return where, claim_new(where)
    usual = default / "date" / "time" if folder is None else Path(folder)
    where, lock = claim_earlier(own.resume, usual, default)
    return where.absolute(), lock


def _planned(
    composed: Composed, overrides: Sequence[str], own: DictConfig, where: Path
) -> tuple[list[list[str]], set[int]]:
    """The jobs of a sweep, and the numbers of those that run."""
    typed = without_own(overrides)
    if own.resume is not None:
        typed = as_first_typed(where, typed)
    draw = draw_of(where)
    jobs = _jobs(composed, typed, draw)
    numbers = list(range(len(jobs)))
    if own.resume is not None:
        configs = [composed(job) for job in jobs]
        planned = [
            Planned(number, _cell_name(number, config), plain_or_none(config))
            for number, config in enumerate(configs)
        ]
        numbers = left_to_run(where, planned, rerun_of(own.rerun))
    if first_overrides(where) is None:
        record = {"hydra": {"overrides": {"task": typed}}}
        write_record(where, OmegaConf.create(record), len(jobs), draw)
    return jobs, set(numbers)


def _jobs(composed: Composed, overrides: Sequence[str], draw: int) -> list[list[str]]:
    cells = _combinations(overrides, draw)
    return with_repeats(cells, [composed(cell) for cell in cells])


def _cell_name(number: int, config: DictConfig) -> str:
    name = compose.cell_name(config.parallel.strategy, config.num_devices, config.device)
    return f"{number}_{name}"


def _kept(folder: Path) -> Run | None:
    """A cell that an earlier start of the sweep has run, if it has."""
    path = folder / "run.json"
    return Run(run_result_from(read_run(path)), folder) if path.exists() else None


def _run(composed: DictConfig, overrides: Sequence[str], folder: Path, *, in_sweep: bool) -> Run:
    folder.mkdir(parents=True, exist_ok=True)
    claim_folder(folder)
    # Before the run, as Hydra does it: the event file names what was typed.
    record = folder / ".hydra"
    record.mkdir(exist_ok=True)
    OmegaConf.save(composed, record / "config.yaml")
    OmegaConf.save(OmegaConf.create(list(overrides)), record / "overrides.yaml")
    try:
        result = _result(composed, folder, in_sweep)
    except ConfigError:
        compose.discard(folder)
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
    return Run(result, folder)


def _result(composed: DictConfig, folder: Path, in_sweep: bool) -> RunResult | None:
    try:
        config = load(composed)
    except ConfigError as error:
        if not in_sweep:
            raise
        raw = cast(dict[str, Any], OmegaConf.to_container(composed, resolve=False))
        return unreadable(raw, error, folder)
    return run_cell(config, folder, Path.cwd(), in_sweep=in_sweep)


def _combinations(overrides: Sequence[str], draw: int) -> list[list[str]]:
    """One list of overrides per cell, in the order of the command line's sweeps."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        refuse_own_choices(parsed)
        return combinations(parsed, draw)
    except HydraException as error:
        raise compose.explain(error, list(overrides)) from error
