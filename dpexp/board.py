"""TensorBoard over a run or a sweep, on this machine only."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

from dpexp.console import leave_quietly, refuse
from dpexp.errors import ConfigError


def main() -> None:
    """Entry point. Exit status: 0 when it was stopped, 1 when it could not start."""
    signal.signal(signal.SIGINT, leave_quietly)  # what takes long to import comes later
    parser = argparse.ArgumentParser(prog="python -m dpexp.board", description=__doc__)
    parser.add_argument(
        "folder", nargs="?", type=Path, help="of runs or sweeps; by default the newest in outputs/"
    )
    parser.add_argument(
        "--port", type=int, help="to listen on; by default the first free one from 6006"
    )
    arguments = parser.parse_args()
    try:
        folder = newest(Path.cwd()) if arguments.folder is None else arguments.folder
        if not _has_events(folder):
            problem = "holds no event file" if folder.is_dir() else "there is no such folder"
            raise ConfigError(
                "folder", str(folder), problem, fix="the folder of a run or sweep, or one above it"
            )
        from dpexp.serving import serve

        serve(folder, arguments.port)
    except ConfigError as error:
        refuse(error)


def newest(base: Path) -> Path:
    """The run or sweep below `base` that was begun last and has something to show.

    Raises:
        ConfigError: there is none.
    """
    from dpexp.compose import RUNS, SWEEPS

    folders = [path for kind in (RUNS, SWEEPS) for path in (base / kind).glob("*/*")]
    shown = [path for path in folders if _has_events(path)]
    if not shown:
        raise ConfigError(
            "folder",
            str(base / Path(RUNS).parent),
            "holds no run and no sweep yet",
            fix="python -m dpexp, or name a folder: python -m dpexp.board <folder>",
        )
    # <date>/<time>-<id>
    return max(shown, key=lambda path: path.parts[-2:])


def _has_events(folder: Path) -> bool:
    from dpexp.events.file import PATTERN

    return next(folder.rglob(PATTERN), None) is not None


if __name__ == "__main__":
    main()
