"""Whose the folder of a sweep or a run is: one process at a time writes into it. No torch."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from dpexp.cell import announce, claim_folder
from dpexp.errors import ConfigError
from dpexp.records import STEP_TABLES
from dpexp.resuming import LAST

JOBS = "dpexp_jobs"  # a key of the record: how many runs the sweep has
DRAW = "dpexp_draw"  # a key of the record: what the order of shuffle() was drawn from
RECORD = "multirun.yaml"
LOCK = ".lock"


@final
class SweepLock:
    """The right to write into a folder. The system gives it back when a process dies."""

    def __init__(self, path: Path, handle: int) -> None:
        self._path = path
        self._handle: int | None = handle

    def release(self) -> None:
        """Give it back and remove the file. Safe to call again."""
        if self._handle is not None:
            # Removed while it is still locked: who has opened it meanwhile sees that it is gone.
            with suppress(OSError):  # a disk that has become read-only; whoever comes may lock it
                if _same_file(self._handle, self._path):  # else the folder is somebody else's now
                    self._path.unlink()
            os.close(self._handle)
            self._handle = None


def lock(folder: Path, key: str) -> SweepLock:
    """Take a folder for this process; it is made if it is not there.

    Args:
        key: the config key that names the folder, for the refusal.

    Raises:
        ConfigError: another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    while True:
        # Not inherited by children: an orphan would keep it.
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise ConfigError(
                key,
                str(folder),
                "another process works in this folder",
                fix="wait for its end, or another folder",
            ) from None
        except OSError as error:  # a file system without locks
            announce(
                [f"{folder} cannot be locked ({error.strerror}): start one run or sweep in it only"]
            )
            return SweepLock(path, handle)
        if _same_file(handle, path):
            return SweepLock(path, handle)
        os.close(handle)  # removed by its owner between opening and locking


def _same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def claim_new(folder: Path) -> SweepLock:
    """Take a folder for a new sweep.

    Raises:
        ConfigError: it holds a sweep, or another process has just begun one there.
    """
    held = lock(folder, "hydra.sweep.dir")
    found = next(
        (each for name in (RECORD, "*/run.json", f"*/{STEP_TABLES}") for each in folder.glob(name)),
        None,
    )
    if found is not None:
        held.release()
        raise ConfigError(
            "hydra.sweep.dir",
            str(folder),
            f"already holds a sweep ({found.relative_to(folder).parts[0]})",
            fix=f"resume={folder} to go on with it, another hydra.sweep.dir for a new one, or none",
        )
    return held


def claim_run(folder: Path) -> SweepLock:
    """Take a folder for a new run that is not of a sweep.

    Raises:
        ConfigError: it holds a run, or another process has just begun one there.
    """
    held = lock(folder, "hydra.run.dir")
    try:
        claim_folder(folder)
    except BaseException:
        held.release()
        raise
    return held


def claim_earlier(asked: Any, usual: Path, default: Path) -> tuple[Path, SweepLock]:
    """Find and take the folder of the sweep that is to be gone on with.

    Args:
        asked: the value of `resume`.
        usual: where a new sweep would go.
        default: below which sweeps lie in ``<date>/<time>`` if no folder is set for them.

    Raises:
        ConfigError: there is no such sweep, or another process has it.
    """
    if not isinstance(asked, str) or not asked:
        raise ConfigError(
            "resume", asked, "is not a folder", allowed=f"the folder of a sweep, or {LAST}",
            fix=f"resume={LAST}",
        )  # fmt: skip
    folder = _newest(usual, default) if asked == LAST else Path(asked)
    if not _is_sweep(folder):
        raise ConfigError(
            "resume",
            asked,
            "there is no sweep in this folder",
            allowed=f"the folder of a sweep, or {LAST}",
            fix=f"resume={LAST}",
        )
    return folder, lock(folder, "resume")


def _newest(usual: Path, default: Path) -> Path:
    # Both may be relative, and are then so to the same folder.
    below_default = default.absolute() in usual.absolute().parents
    base, depth = (default, "*/*") if below_default else (usual.parent, "*")
    sweeps = [each for each in base.glob(depth) if each.is_dir() and _is_sweep(each)]
    if not sweeps:
        raise ConfigError(
            "resume", LAST, f"there is no sweep below {base}", fix="resume=<folder>, or resume=null"
        )
    return max(sweeps, key=lambda each: (_begun(each), each.name))


def _is_sweep(folder: Path) -> bool:
    names = (RECORD, LOCK, "sweep.json", "*/run.json")
    return any(True for name in names for _ in folder.glob(name))


def _begun(folder: Path) -> float:
    """When a sweep was started first: none of these files is written again."""
    times = [path.stat().st_mtime for path in (folder / RECORD, folder / LOCK) if path.exists()]
    return min(times, default=folder.stat().st_mtime)
