"""Claims of a machine's devices and cores, so that runs at the same time take different ones.

A claim is a lock (`flock`) on a file, one for each device or core, in a folder that is the user's
alone. The system gives it back when the process that holds it dies, however it dies. The files
stay: one that is removed while somebody else opens it could be locked twice.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final

from dpexp.errors import ConfigError

GATE = "gate"
POLL_S = 0.2
_NOFOLLOW = os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Wanted:
    """So many of these, whichever are free, the first ones first."""

    kind: str  # "core", "cuda": a part of the files' names
    names: tuple[str, ...]
    count: int

    def __str__(self) -> str:
        word = {"core": "core", "cuda": "CUDA device"}.get(self.kind, self.kind)
        return f"{self.count} {word}" + ("s" if self.count != 1 else "")


@final
class Claim:
    """What a process has taken; it is free again when released, or when the process is gone."""

    def __init__(self, handles: dict[str, int]) -> None:
        self._handles = handles
        self.names = tuple(handles)

    def release(self) -> None:
        """Give everything back. Safe to call again."""
        while self._handles:
            os.close(self._handles.popitem()[1])


def wait_for(wanted: Wanted, run_folder: Path, tell: Callable[[str], None]) -> Claim:
    """Take what is wanted; wait for it as long as it takes, or until a signal's handler raises.

    Args:
        run_folder: of the run, told to others that wait.
        tell: is given one line when there is something to wait for.

    Raises:
        ConfigError: the folder of the claims is not safe, or cannot be used.
    """
    assert wanted.count <= len(wanted.names), f"{wanted} can never be had"
    told = False
    while True:
        found = attempt(wanted, run_folder)
        if isinstance(found, Claim):
            return found
        if found and not told:
            told = True
            tell(
                f"waiting for {wanted}: {len(found)} of {len(wanted.names)} are taken; Ctrl-C ends "
                f"it. {'; '.join(found)}"
            )
        time.sleep(POLL_S)


def attempt(wanted: Wanted, run_folder: Path) -> Claim | list[str]:
    """Take all that is wanted or nothing, without waiting.

    Returns:
        The claim, or who holds what: ``core-1: pid 12 (outputs/…)``; [] when another process was
        just choosing.

    Raises:
        ConfigError: the folder of the claims is not safe, or cannot be used.
    """
    with _opened_folder() as place:
        # One at a time chooses, else two could each hold half of what both want.
        gate = _locked(place, GATE)
        if gate is None:
            return []
        try:
            return _chosen(place, wanted, run_folder)
        finally:
            os.close(gate)


def claims_folder() -> Path:
    """Where the files are: the same for all commands of a user with the same TMPDIR."""
    return Path(tempfile.gettempdir()) / f"dpexp-claims-{os.getuid()}"


def _chosen(place: int, wanted: Wanted, run_folder: Path) -> Claim | list[str]:
    handles: dict[str, int] = {}
    taken: list[str] = []
    try:
        for name in wanted.names:
            if len(handles) == wanted.count:
                break
            file = _file_of(wanted.kind, name)
            handle = _locked(place, file)
            if handle is None:
                taken.append(f"{file}: {_holder(place, file)}")
            else:
                handles[name] = handle
        if len(handles) < wanted.count:
            return taken
        note = json.dumps({"pid": os.getpid(), "folder": str(run_folder.absolute())}).encode()
        for handle in handles.values():
            os.ftruncate(handle, 0)
            os.pwrite(handle, note, 0)
        claim = Claim(dict(handles))
        handles.clear()
        return claim
    finally:
        for handle in handles.values():
            os.close(handle)


def _file_of(kind: str, name: str) -> str:
    # A name may come from CUDA_VISIBLE_DEVICES: "MIG-GPU-…/1/0" has slashes.
    return f"{kind}-{re.sub(r'[^A-Za-z0-9-]', '_', name)}"


def _locked(place: int, file: str) -> int | None:
    """The file, opened and locked; None while another process holds it."""
    # Not inherited by children that are started meanwhile: an orphan would keep the lock.
    handle = os.open(file, os.O_RDWR | os.O_CREAT | _NOFOLLOW, 0o600, dir_fd=place)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except BaseException:
        os.close(handle)
        raise
    if (
        os.fstat(handle).st_nlink == 0
    ):  # somebody has just tidied up: the next attempt finds a new one
        os.close(handle)
        return None
    return handle


def _holder(place: int, file: str) -> str:
    """Who holds it, as it says itself; it may just be about to say it."""
    try:
        handle = os.open(file, os.O_RDONLY | _NOFOLLOW, dir_fd=place)
        with os.fdopen(handle, encoding="utf-8") as opened:
            told = json.load(opened)
        return f"pid {int(told['pid'])} ({told['folder']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "a run that has just begun"


@contextmanager
def _opened_folder() -> Iterator[int]:
    """The folder, made if it is not there, as a descriptor: nobody can change it for another one.

    Raises:
        ConfigError: it belongs to somebody else, is open to others, or is no folder.
    """
    path = claims_folder()
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        place = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _NOFOLLOW)
    except OSError as error:
        linked = error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EEXIST)
        problem = "is no folder of its own" if linked else f"cannot be used ({error.strerror})"
        raise _unsafe(path, problem) from error
    try:
        status = os.fstat(place)
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise _unsafe(path, "is not this user's alone")
        yield place
    except OSError as error:
        raise _unsafe(path, f"cannot be locked ({error.strerror})") from error
    finally:
        os.close(place)


def _unsafe(path: Path, problem: str) -> ConfigError:
    return ConfigError(
        "TMPDIR",
        str(path.parent),
        f"{path.name}, in which runs note the devices and cores they have, {problem}",
        fix=f"remove {path}, or a TMPDIR of your own",
    )
