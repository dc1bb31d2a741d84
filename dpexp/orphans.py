"""Processes of an earlier start that still write into its folder. No torch."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from dpexp.errors import ConfigError

ORPHANS_S = 10.0


def wait_for_orphans(folder: Path, *, in_cells: bool, parent: int | None = None) -> None:
    """Wait until no process writes a file of the sweep or run any more.

    The ranks of one that was killed end by themselves, up to some seconds later; until then they
    write into their folder.

    Args:
        in_cells: of a sweep, whose own files do not count.
        parent: the process that has started the other ranks of this start, which do not count.

    Raises:
        ConfigError: one is still there.
    """
    holders = _holders(folder, in_cells=in_cells, parent=parent)
    _, alive = psutil.wait_procs(holders, timeout=ORPHANS_S) if holders else ([], [])
    if alive:
        raise ConfigError(
            "resume",
            str(folder),
            f"process {alive[0].pid} of the earlier start still runs",
            fix="wait for its end, or end it",
        )


def _holders(folder: Path, *, in_cells: bool, parent: int | None) -> list[psutil.Process]:
    inside = f"{folder.resolve()}{os.sep}"
    found = []
    for process in psutil.process_iter():
        try:
            files = [] if process.ppid() == parent else process.open_files()
        except (psutil.Error, OSError):  # ended meanwhile, or another user's
            continue
        # A viewer may read; what cannot be told (not on Linux) counts as reading.
        written = [file.path for file in files if getattr(file, "mode", "r") != "r"]
        held = [path for path in written if path.startswith(inside)]
        if in_cells:
            held = [path for path in held if os.sep in path.removeprefix(inside)]
        if process.pid != os.getpid() and held:
            found.append(process)
    return found
