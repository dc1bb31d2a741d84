"""Which cells of a sweep that is resumed run, and whether it is the same sweep, or the same run.

Pure; no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpexp.config import OF_THE_SWEEP
from dpexp.errors import ConfigError
from dpexp.identity import LIMITS, config_hash, differences
from dpexp.schema import Config, Task
from dpexp.schema_measuring import Rerun

LAST = "last"
# Of what is set for Hydra, only this changes what a cell does.
_HYDRA_COMPARED = ("hydra.job.env_set", "hydra.job.env_copy")


@dataclass(frozen=True)
class Planned:
    """A cell as the sweep would run it now. `config` is None where it is refused."""

    number: int
    folder: str  # its name below the sweep's folder
    config: dict[str, Any] | None  # as it will be in run.json


@dataclass(frozen=True)
class Found:
    """What an earlier start has left of a cell.

    `result` is None where ``run.json`` is missing, empty, cut off, or no result.
    """

    folder: str
    result: dict[str, Any] | None


# Keys, with those below them, that may change while a run is under way: what it trains does not
# depend on them, or only by rounding.
_FREE = (
    "parallel",
    "num_devices",
    "device",
    "epochs",
    "steps",
    "warmup_steps",
    "until",
    "loader",
    "watchdog_s",
    "process_memory_mib",
    "measure",
    "check",
    "checkpoint",
    "trace",
    "inject",
    "shapes",
    "save_weights",
    "sinks",
)
_ENDS_AT_LAST_STEP = ("cosine", "linear")


def check_resuming(config: Config) -> None:
    """What of `resume` and `rerun` a single run takes; the cells of a sweep come without them.

    Raises:
        ConfigError: they are those of a sweep.
    """
    asked = config.resume
    if asked is not None and (asked == LAST or not (asked is True or isinstance(asked, str))):
        raise ConfigError(
            "resume",
            asked,
            "does not say which run is to be gone on with",
            allowed="true (the newest one with a checkpoint), or a run's folder",
            fix="resume=true, or -m for a sweep",
        )
    if asked is not None and config.task is not Task.train:
        raise ConfigError(
            "resume", asked, "only training has checkpoints to go on from", fix="task=train"
        )
    if config.rerun is not None:
        refuse_rerun_alone(config.rerun.value)


def refuse_other_run(folder: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Refuse to go on with a run under a config that would train something else.

    Args:
        old: the config of its checkpoint, as in ``run.json``.
        new: as it will be there.

    Raises:
        ConfigError: names the keys.
    """
    free = [key for key in _FREE if key not in ("epochs", "steps")]
    if new.get("lr_scheduler") not in _ENDS_AT_LAST_STEP:
        free += ["epochs", "steps"]
    changed = [
        line
        for line in differences(old, new)
        if not any(line.startswith((f"{key}:", f"{key}.")) for key in free)
    ]
    if changed:
        raise ConfigError(
            "resume",
            folder,
            f"its checkpoint is of a run with another config: {_first(changed)}",
            fix="the config as it was, or a new run without resume",
        )


def refuse_rerun_alone(rerun: Any) -> None:
    """Refuse `rerun` without `resume`, for it says which cells of an earlier sweep run.

    Raises:
        ConfigError: it is set.
    """
    if rerun is not None:
        raise ConfigError(
            "rerun",
            rerun,
            "says what of an earlier sweep runs again, and none is given",
            fix=f"resume={LAST}, or rerun=null",
        )


def rerun_of(value: Any) -> Rerun | None:
    """The typed value of `rerun`.

    Raises:
        ConfigError: it is none of the choices.
    """
    known = {member.value: member for member in Rerun}
    if value is not None and value not in known:
        raise ConfigError(
            "rerun",
            value,
            "is none of the choices",
            allowed=f"{', '.join(known)}, or null for all cells that are not ok",
            fix="rerun=failed",
        )
    return known.get(value)


def without_own(overrides: Sequence[str]) -> list[str]:
    """The overrides of a sweep's cells: all but `resume` and `rerun`."""
    return [override for override in overrides if _key(override) not in OF_THE_SWEEP]


def in_first_order(
    folder: str,
    typed: Sequence[str],
    first: Sequence[str],
    meaning: Callable[[str], str] = str,
) -> list[str]:
    """What is typed now, in the order in which it was typed at the sweep's first start.

    The order of keys decides which job has which number.

    Args:
        typed: overrides of the sweep, without `resume` and `rerun`.
        first: those of the first start.
        meaning: what is compared of an override: quotes and spaces are no difference.

    Raises:
        ConfigError: they are not the same. Not compared are time limits, and what is Hydra's own
            but for the environment of the jobs.
    """
    old, new = _by_key(first), _by_key(typed)
    keys = [*old, *(key for key in new if key not in old)]
    lines = [
        f"{sign} {line}"
        for key in keys
        # The same text is the same, whatever it draws (`shuffle([1,2])`).
        if old.get(key) != new.get(key)
        and [*map(meaning, old.get(key, ()))] != [*map(meaning, new.get(key, ()))]
        and _compared(key, [*old.get(key, ()), *new.get(key, ())])
        for sign, side in (("-", old), ("+", new))
        for line in side.get(key, ())
    ]
    if lines:
        raise ConfigError(
            "resume",
            folder,
            "this sweep was started with other overrides: " + ", ".join(lines),
            fix="the same overrides, or a new sweep without resume",
        )
    return [line for key in keys for line in new.get(key, ())]


def to_run(
    sweep: str, planned: Sequence[Planned], found: Mapping[int, Found], rerun: Rerun | None
) -> list[int]:
    """The numbers of the cells that run, ascending.

    Without `rerun` those without an ``ok`` result; `failed`: of these, those that began (a cell
    that was under way when the sweep was killed did) and were not skipped; `all`: every one.

    Args:
        sweep: its folder, for messages.
        found: by the number of the cell.

    Raises:
        ConfigError: a cell that would be kept has another config than it would have now, or is no
            cell of this sweep.
    """
    known = {cell.number for cell in planned}
    strange = [each.folder for number, each in found.items() if number not in known]
    if strange:
        raise ConfigError(
            "resume",
            sweep,
            f"{strange[0]} is no cell of the sweep that is typed",
            fix="the overrides that it was started with",
        )
    numbers = []
    for cell in planned:
        earlier = found.get(cell.number)
        status = None if earlier is None else (earlier.result or {}).get("status")
        if rerun is Rerun.all:
            numbers.append(cell.number)
        elif earlier is not None and status == "ok":
            _refuse_changed(sweep, earlier, cell)
        elif rerun is None or (earlier is not None and status != "skipped"):
            numbers.append(cell.number)
    return numbers


def contiguous(numbers: Sequence[int], most: int | None = None) -> Iterator[list[int]]:
    """Ascending numbers in groups without a gap, of at most so many each."""
    group: list[int] = []
    for number in numbers:
        if group and (number != group[-1] + 1 or len(group) == most):
            yield group
            group = []
        group.append(number)
    if group:
        yield group


def _refuse_changed(sweep: str, earlier: Found, cell: Planned) -> None:
    result = earlier.result or {}
    known = result.get("config") or {}
    now = cell.config or {}
    if result.get("config_hash") == config_hash(now):
        return
    changed = differences(known, now)
    if changed:
        raise ConfigError(
            "resume",
            sweep,
            f"{earlier.folder} is done, with another config: {_first(changed)}",
            fix="the config as it was, a new sweep, or rerun=all",
        )


def _first(changed: Sequence[str]) -> str:
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return "; ".join(changed[:3]) + more


def _by_key(overrides: Sequence[str]) -> dict[str, list[str]]:
    lines: dict[str, list[str]] = {}
    for override in overrides:
        lines.setdefault(_key(override), []).append(override)
    return lines


def _compared(key: str, lines: Sequence[str]) -> bool:
    if key.startswith(("hydra.", "hydra/")):
        return key.startswith(_HYDRA_COMPARED)
    # A choice of several limits makes more cells.
    return key not in LIMITS or any("," in line or "(" in line for line in lines)


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")
