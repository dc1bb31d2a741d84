"""``python -m dpexp.report``: a report again, from the results alone."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dpexp import console

DESCRIPTION = """\
Write the report of a sweep again, from the results in its folder alone: report.html, report.md,
summary.csv, sweep.json and the TensorBoard run "scaling". Several sweeps and single runs make one
report, in a folder of its own; each sweep is compared within itself, single runs with one
another."""
EPILOG = """\
A result that cannot be read is named in the report; the others are reported. Exit status: 0 if a
report was written, 1 if there is nothing to report or nowhere to write it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Build a report as `arguments` say, and print it in short. The exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m dpexp.report", description=DESCRIPTION, epilog=EPILOG
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER",
                        help="of a sweep (outputs/sweeps/...) or of a run")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help="where to write; the folder itself if there is only one")  # fmt: skip
    given = parser.parse_args(arguments)
    console.prepare_streams()
    folders = list(dict.fromkeys(folder.resolve() for folder in given.folders))
    if given.out is None and len(folders) > 1:
        parser.error("several folders make a report of their own: where to? --out DIR")
    held = _source_of(given.out, folders)
    if held is not None:
        parser.error(
            f"--out {given.out} is in {held}, whose results are not touched: a folder apart"
        )
    try:
        return _report(folders, given.out)
    except OSError as problem:
        return _refuse(f"{problem.filename or ''}: {problem.strerror or problem}".lstrip(": "))


def _source_of(out: Path | None, folders: Sequence[Path]) -> Path | None:
    """The folder of results that a report would be written into; its own report may be."""
    if out is None or folders == [out.resolve()]:
        return None
    where = out.resolve()
    return next((each for each in folders if each in (where, *where.parents)), None)


def _report(folders: Sequence[Path], out: Path | None) -> int:
    from dpexp.report.build import write
    from dpexp.report.content import content_of
    from dpexp.report.tables import show

    there = [folder for folder in folders if folder.is_dir()]
    for folder in folders:
        if folder not in there:
            _refuse(f"{folder}: {'no folder' if folder.exists() else 'there is no such folder'}")
    if not there:
        return 1
    content = content_of(there)
    if not content.cells:
        lost = content.failures
        why = f"; {lost[0].folder}: {lost[0].message}" if lost else ""
        on = f"; to go on: {content.resume}" if content.resume else ""
        named = ", ".join(str(folder) for folder in there)
        return _refuse(f"{named}: nothing to report: no run's result can be read here{why}{on}")
    where = there[0] if out is None else out
    where.mkdir(parents=True, exist_ok=True)
    board = out is not None or not (where / "run.json").exists()
    report = write(content, where, boards=board)
    show(content, where, report.problems, written=report.written, board=board)
    return 0 if report.written else 1


def _refuse(text: str) -> int:
    console.say(f"python -m dpexp.report: {text}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
