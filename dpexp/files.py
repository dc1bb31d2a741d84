"""Files written whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

# What stands for half of a UTF-16 pair, which no encoding has; an error's text may hold one.
UNENCODABLE = "backslashreplace"


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader sees the old file or the new one, never a part.

    The temporary file lies in the same folder (a rename is atomic only within a file system).
    """
    handle, temporary = _beside(path)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors=UNENCODABLE) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _beside(path: Path) -> tuple[int, Path]:
    """A new file in the folder of `path`, opened for writing: readable by whom the umask lets."""
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            return os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), temporary
        except FileExistsError:
            continue


def claim(path: Path, text: str) -> bool:
    """Write `text` to `path` unless it exists; whether this call wrote it.

    Several processes may try at once: exactly one of them succeeds.
    """
    handle, temporary = _beside(path)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors=UNENCODABLE) as file:
            file.write(text)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        return True
    finally:
        temporary.unlink(missing_ok=True)


# What a file system says that has no locks (some of clusters', as they are mounted).
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@final
class SharedLines:
    """A file to which several processes of one host append lines, each of them whole.

    Args:
        head: the first line; the process that comes first writes it.
    """

    def __init__(self, path: Path, head: str) -> None:
        claim(path, head)
        self._handle = os.open(path, os.O_RDWR | os.O_APPEND)

    def append(self, lines: str) -> None:
        """Add whole lines. They survive this process, but not the machine's end."""
        left = memoryview(lines.encode("utf-8", UNENCODABLE))
        with self._alone():
            while left:
                left = left[os.write(self._handle, left) :]

    def close(self) -> None:
        """Nothing more will come."""
        os.close(self._handle)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process appends meanwhile, and the file ends with a whole line."""
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            # One write that appends is not mixed with another one of the same host. But what is
            # left of a killed one stays, and readers must do without that line.
            yield
            return
        try:
            self._cut()
            yield
        finally:
            fcntl.flock(self._handle, fcntl.LOCK_UN)

    def _cut(self) -> None:
        """Take away the half line that a process has left which was killed in a write."""
        size, span = os.fstat(self._handle).st_size, 1
        while size:
            begin = max(0, size - span)
            whole = os.pread(self._handle, size - begin, begin).rfind(b"\n") + 1
            if whole or not begin:
                if begin + whole < size:
                    os.ftruncate(self._handle, begin + whole)
                return
            span *= 4096
