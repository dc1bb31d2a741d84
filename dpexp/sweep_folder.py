"""What lies in the folder of a sweep: its record, its cells, and what is put aside. No torch."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from dpexp import checkpoint
from dpexp.cell import announce
from dpexp.checkpoint import EARLIER
from dpexp.config import OF_THE_SWEEP
from dpexp.errors import ConfigError
from dpexp.files import write_whole
from dpexp.identity import config_hash
from dpexp.orphans import wait_for_orphans
from dpexp.records import FROM_OUTSIDE, LaterSchemaError, read_run
from dpexp.resuming import Found, Planned, in_first_order, to_run, without_own
from dpexp.schema_measuring import Rerun
from dpexp.slurm import refuse_jobs_below
from dpexp.sweep_lock import DRAW, JOBS, RECORD

RECORD_END = "# the end\n"  # without it the record was cut off, or is not by dpexp
_NUMBERED = re.compile(r"(\d+)_")
# Temporary files of files.write_whole that a killed sweep has left.
_CUT_OFF = re.compile(r"\.(multirun\.yaml|sweep\.json|summary\.csv|report\.(md|html))\.")


def write_record(
    folder: Path, config: DictConfig, jobs: int | None = None, draw: int | None = None
) -> None:
    """Write ``multirun.yaml``, once: at a sweep's first start.

    Args:
        config: of the sweep, with at least ``hydra.overrides``; `resume` and `rerun` are left out.
        jobs: how many runs the sweep has; None = nobody knows yet.
        draw: what the order of `shuffle()` was drawn from.
    """
    plain: Any = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    plain.update({key: None for key in OF_THE_SWEEP if key in plain})
    if jobs is not None:
        plain[JOBS] = jobs
    if draw is not None:
        plain[DRAW] = draw
    overrides = plain["hydra"]["overrides"]
    overrides["task"] = without_own(overrides["task"])
    write_whole(folder / RECORD, OmegaConf.to_yaml(plain) + RECORD_END)


def as_first_typed(folder: Path, typed: Sequence[str], hydra: Sequence[str] = ()) -> list[str]:
    """The overrides of a sweep's cells in the order of its first start.

    Args:
        typed: without `resume` and `rerun`.
        hydra: overrides of Hydra's own keys.

    Raises:
        ConfigError: they are not those of the first start.
    """
    first = first_overrides(folder)
    if first is None:
        return list(typed)
    in_first_order(str(folder), hydra, first[1])
    return in_first_order(str(folder), typed, first[0], meaning)


def meaning(override: str) -> str:
    """An override without what makes no difference: ``x=[1, 'a']`` and ``x=[1,"a"]`` are one."""
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:  # refused where it is composed
        return override
    value: Any = parsed.value()
    if isinstance(value, ChoiceSweep):
        value = value.shuffle, [Override._convert_value(each) for each in value.list]
    return f"{parsed.type} {parsed.get_key_element()} {value!r}"


def first_overrides(folder: Path) -> tuple[list[str], list[str]] | None:
    """The overrides of a sweep's first start: of the cells, and Hydra's own.

    With the choices of a preset (``hydra.sweeper.params``) before those that were typed. None if
    the record is missing, cut off or no record, then each cell's own config must do.
    """
    record = _record(folder)
    try:
        hydra = record["hydra"]
        params = (hydra.get("sweeper") or {}).get("params") or {}
        preset = [f"{key}={value}" for key, value in params.items()]
        return [*preset, *hydra["overrides"]["task"]], list(hydra["overrides"].get("hydra") or [])
    except (LookupError, TypeError, AttributeError):
        return None  # somebody has changed it


def draw_of(folder: Path) -> int:
    """What the order of `shuffle()` is drawn from: as at the sweep's first start, if that is known.

    Where it is not, cells that are done will have another config than they would have now.
    """
    draw = (_record(folder) or {}).get(DRAW)
    return draw if isinstance(draw, int) else secrets.randbits(32)


def _record(folder: Path) -> Any:
    """``multirun.yaml`` as it was written; None where it is missing, cut off or no record."""
    try:
        text = (folder / RECORD).read_text(encoding="utf-8")
        if not text.endswith(RECORD_END):
            return None
        record = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException):
        return None
    return record if isinstance(record, dict) else None


def found_cells(folder: Path) -> dict[int, Found]:
    """What lies in a sweep's folder, by the number of the cell.

    Raises:
        ConfigError: a result is of a later version.
    """
    cells = {}
    for path in sorted(folder.iterdir()):
        number = _NUMBERED.match(path.name)
        if number is not None and path.is_dir():
            cells[int(number[1])] = Found(path.name, _result(path))
    return cells


def _in_place(folder: Path, planned: Sequence[Planned]) -> dict[int, Found]:
    """What lies where the cells will be, also if it is no folder.

    It counts more than what else begins with a cell's number, such as a copy of the cell.
    """
    return {
        cell.number: Found(cell.folder, _result(folder / cell.folder))
        for cell in planned
        if os.path.lexists(folder / cell.folder)
    }


def _result(folder: Path) -> dict[str, Any] | None:
    try:
        return read_run(folder / "run.json")
    except LaterSchemaError as error:
        raise ConfigError(
            "resume",
            str(folder.parent),
            str(error),
            fix="the version of dpexp that the sweep was started with",
        ) from error
    except (OSError, ValueError):
        return None


def left_to_run(folder: Path, planned: Sequence[Planned], rerun: Rerun | None) -> list[int]:
    """The numbers of the cells that run; what was left of them lies in ``earlier/`` afterwards.

    Raises:
        ConfigError: see :func:`dpexp.resuming.to_run`; nothing is moved then.
    """
    refuse_jobs_below(folder)
    wait_for_orphans(folder, in_cells=True)
    found = found_cells(folder) | _in_place(folder, planned)
    numbers = to_run(str(folder), planned, found, rerun)
    _tidy(folder)
    configs = {cell.number: cell.config for cell in planned}
    saved = 0
    for number in numbers:
        if number in found:
            goes_on = rerun is not Rerun.all and _was_cut_off(found[number])
            saved += _put_aside(folder, found[number], configs[number] if goes_on else None)
    _hide_events(folder)
    kept = sum(1 for number in found if number not in numbers)
    notes = [
        f"{folder} goes on: {kept} of {len(planned)} cells stay as they are, {len(numbers)} run"
        + (f", {saved} of them from a checkpoint" if saved else "")
    ]
    absent = len(planned) - kept - len(numbers)
    if absent:
        notes.append(f"{absent} cells have not begun; resume without rerun={rerun and rerun.value}")
    announce(notes)
    return numbers


def _was_cut_off(cell: Found) -> bool:
    """Whether a cell ended for a reason from outside, so that it may go on where it was."""
    if cell.result is None:
        return True
    kind = (cell.result.get("error") or {}).get("kind")
    return cell.result["status"] != "ok" and kind in FROM_OUTSIDE


def _put_aside(folder: Path, cell: Found, config: dict[str, Any] | None = None) -> bool:
    """Move what an earlier attempt has left of a cell to ``earlier/<cell>-<k>``.

    Checkpoints of a run with just this `config` stay: the cell goes on from the newest one. Whether
    there are some.

    There it is no cell for the report. Its event file gets another name, so that it is no run for
    TensorBoard: ``events.out.earlier.*``, which becomes one again with ``tfevents`` in its place.
    """
    linked = (folder / cell.folder).is_symlink()
    if not linked and (cell.result or {}).get("status") == "skipped":  # nothing was run
        shutil.rmtree(folder / cell.folder)
        return False
    kept = folder / EARLIER
    kept.mkdir(exist_ok=True)
    taken = {path.name for path in kept.iterdir()}
    k = next(k for k in range(1, len(taken) + 2) if f"{cell.folder}-{k}" not in taken)
    newest = checkpoint.newest(folder / cell.folder)
    (folder / cell.folder).rename(kept / f"{cell.folder}-{k}")
    goes_on = (
        newest is not None
        and config is not None
        and config_hash(newest.state["config"]) == config_hash(config)
    )
    if goes_on:
        (folder / cell.folder).mkdir()
        saved = checkpoint.folder_of(kept / f"{cell.folder}-{k}")
        saved.rename(checkpoint.folder_of(folder / cell.folder))
    _hide_events(folder)
    return goes_on


def _hide_events(folder: Path) -> None:
    """Rename the event files of earlier attempts (again: a kill may have come before)."""
    for path in (folder / EARLIER).glob("**/*tfevents*"):
        path.rename(path.with_name(path.name.replace("tfevents", EARLIER)))


def _tidy(folder: Path) -> None:
    """Remove temporary files in a sweep's folder that a killed process has left."""
    for path in folder.iterdir():
        if _CUT_OFF.match(path.name):
            path.unlink(missing_ok=True)
