"""Writes down how a run ended: its row in the event file, ``run.json``, then its sinks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dpexp.publishing import publish
from dpexp.records import RunResult


def record(result: RunResult, folder: Path, user_dir: Path) -> RunResult:
    """Write the result and have the run published.

    Args:
        user_dir: where the user started: her modules and relative paths are found there.

    Returns:
        The result as it is on disk: with a note for each sink that did not get the run. What was
        measured is in the folder all the same, so it is no failure of the run.
    """
    write_result(result, folder)
    sinks = result.config.get("sinks")
    notes = publish(folder, user_dir, list(sinks)) if sinks else []
    if notes:
        result = replace(result, notes=[*result.notes, *notes])
        result.write(folder / "run.json")
    return result


def write_result(result: RunResult, folder: Path) -> None:
    """Write the result. Of a run that ended well, its rank 0 has filled the event file."""
    try:
        if result.status != "ok":
            from dpexp.events.ended import record_ended

            record_ended(folder, result)
    finally:
        result.write(folder / "run.json")
