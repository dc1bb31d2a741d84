"""Files written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

# What stands for half of a UTF-16 pair, which no encoding has; an error's text may hold one.
UNENCODABLE = "backslashreplace"


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader sees the old file or the new one, never a part.

    The temporary file lies in the same folder (a rename is atomic only within a file system).
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors=UNENCODABLE) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def claim(path: Path, text: str) -> bool:
    """Write `text` to `path` unless it exists; whether this call wrote it.

    Several processes may try at once: exactly one of them succeeds.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors=UNENCODABLE) as file:
            file.write(text)
        temporary.chmod(0o644)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        return True
    finally:
        temporary.unlink(missing_ok=True)
