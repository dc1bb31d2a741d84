"""The folder of a run's checkpoints: which there are, which are whole. No torch.

``checkpoints/step-<k>/`` holds the state after k steps: files of torch's distributed checkpoint
with all tensors, and ``state.json`` with all else. It gets its name when all of it is written, so
what has another name was cut off. ``state.json`` says which files there are and how long they are.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpexp.records import STEP_TABLES

FOLDER = "checkpoints"
STATE = "state.json"
EARLIER = "earlier"
FORMAT = 1
_NAME = re.compile(r"step-(\d+)")
_CUT_OFF = ".step-*"
# What one attempt at a run writes; the log goes on.
_OF_ATTEMPT = (
    "run.json",
    STEP_TABLES,
    "shapes.csv",
    "timeline.json",
    "trace.rank*.json",
    "weights.pt",
    "*tfevents*",
)


@dataclass(frozen=True)
class Checkpoint:
    """A whole one."""

    path: Path
    step: int  # steps done; the run goes on with this one, since they are counted from 0
    state: dict[str, Any]  # of state.json


def folder_of(run: Path) -> Path:
    """Where the checkpoints of the run in this folder lie."""
    return run / FOLDER


def name_of(step: int) -> str:
    """The name of the checkpoint after so many steps."""
    return f"step-{step}"


def newest(run: Path) -> Checkpoint | None:
    """The last checkpoint of the run in this folder that is whole; None if there is none.

    One that is torn (a file is missing or too short) is passed over for the one before.
    """
    return next((found for path in _by_age(run) if (found := _whole(path)) is not None), None)


def no_room(run: Path, needed_bytes: int) -> str:
    """That the disk is full, if it is: torch says no more of it than "unexpected pos"."""
    with suppress(OSError):
        free = shutil.disk_usage(run).free
        if free < needed_bytes:
            return f"the disk has {free >> 10} KiB left: "
    return ""


def prune(run: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints."""
    for path in list(_by_age(run))[keep:]:
        # Another name first: half of a checkpoint must not pass for one.
        going = path.with_name(f".{path.name}.going")
        path.rename(going)
        shutil.rmtree(going, ignore_errors=True)


def forget_later(run: Path, step: int) -> None:
    """Remove the checkpoints after `step`, which are torn where it is the newest whole one."""
    for path in list(_by_age(run)):
        if _step(path) > step:
            shutil.rmtree(path, ignore_errors=True)


def clear(run: Path) -> None:
    """Remove what a save that was cut off has left."""
    for path in folder_of(run).glob(_CUT_OFF):
        shutil.rmtree(path, ignore_errors=True)


def put_aside(run: Path, also: tuple[str, ...] = ()) -> Path | None:
    """Move what an attempt at a run has written to ``earlier/attempt-<k>``; checkpoints stay.

    There its event file gets another name, so that it is no run for TensorBoard.

    Args:
        also: names of more that is moved.

    Returns:
        Where it lies now; None if there was nothing.
    """
    written = [path for pattern in (*_OF_ATTEMPT, *also) for path in sorted(run.glob(pattern))]
    if not written:
        return None
    earlier = run / EARLIER
    earlier.mkdir(exist_ok=True)
    taken = {path.name for path in earlier.iterdir()}
    k = next(k for k in range(1, len(taken) + 2) if f"attempt-{k}" not in taken)
    kept = earlier / f"attempt-{k}"
    kept.mkdir()
    for path in written:
        path.rename(kept / path.name.replace("tfevents", EARLIER))
    return kept


def attempts_before(run: Path) -> int:
    """How many attempts at this run lie aside."""
    return sum(1 for _ in (run / EARLIER).glob("attempt-*"))


def _by_age(run: Path) -> Iterator[Path]:
    """Newest first: the one with the most steps.

    Not what only has such a name: the folder may be one that the user has named.
    """
    named = [path for path in folder_of(run).glob("step-*") if _NAME.fullmatch(path.name)]
    found = [path for path in named if (path / STATE).is_file()]
    return iter(sorted(found, key=_step, reverse=True))


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _whole(path: Path) -> Checkpoint | None:
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        sizes = {name: (path / name).stat().st_size for name in state["files"]}
        whole = state["format"] == FORMAT and state["step"] == _step(path)
        whole = whole and sizes == state["files"] and isinstance(state["config"], dict)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return Checkpoint(path, _step(path), state) if whole else None
