"""Writes down how a run ended: its row in the event file, ``run.json``, then its sinks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dpexp.publishing import publish
from dpexp.records import ErrorRecord, RunResult
from dpexp.stopping import holding


class UnwrittenResultError(OSError):
    """A run has come to its end, and its ``run.json`` cannot be written.

    Args:
        measured: the result as it was.
        path: of the file.
        cause: what the system said.
    """

    def __init__(self, measured: RunResult, path: Path, cause: OSError) -> None:
        reason = (cause.strerror or str(cause)).lower()
        super().__init__(cause.errno, reason, str(path))
        self.measured = measured
        told = f"the result cannot be written to {path}: {reason}"
        # What a sweep goes on with: without a file there is no result to rely on.
        error = measured.error or ErrorRecord("crash", "OSError", told, phase="finish")
        self.result = replace(measured, status="failed", error=error, throughput=None)


def record(result: RunResult, folder: Path, user_dir: Path) -> RunResult:
    """Write the result and have the run published.

    Args:
        user_dir: where the user started: her modules and relative paths are found there.

    Returns:
        The result as it is on disk: with a note for each sink that did not get the run. What was
        measured is in the folder all the same, so it is no failure of the run.

    Raises:
        UnwrittenResultError: ``run.json`` cannot be written.
    """
    with holding():  # a signal that comes now must not cost the result
        result = write_result(result, folder)
    sinks = result.config.get("sinks")
    notes = publish(folder, user_dir, list(sinks)) if sinks else []
    if notes:
        result = replace(result, notes=[*result.notes, *notes])
        _write(result, folder)
    return result


def write_result(result: RunResult, folder: Path) -> RunResult:
    """Write the result. Of a run that ended well, its rank 0 has filled the event file.

    Returns:
        The result as it is on disk: with a note if the event file cannot be written.

    Raises:
        UnwrittenResultError: ``run.json`` cannot be written.
    """
    if result.status != "ok":
        from dpexp.events.ended import record_ended

        try:
            record_ended(folder, result)
        except OSError as error:
            note = f"the event file does not say how the run ended: {error}"
            result = replace(result, notes=[*result.notes, note])
    _write(result, folder)
    return result


def _write(result: RunResult, folder: Path) -> None:
    path = folder / "run.json"
    try:
        result.write(path)
    except OSError as error:
        raise UnwrittenResultError(result, path, error) from error
