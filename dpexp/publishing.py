"""Writes a run's result, then has the sinks of its config written, by :mod:`dpexp.publish`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from dpexp import env
from dpexp.logs import LOG_NAME
from dpexp.records import RunResult

LIMIT_S = 300  # for all sinks of a run


def record(result: RunResult, folder: Path, user_dir: Path) -> RunResult:
    """Write ``run.json`` and have the run published.

    Args:
        user_dir: where the user started: her modules and relative paths are found there.

    Returns:
        The result as it is on disk: with a note for each sink that did not get the run. What was
        measured is in the folder all the same, so it is no failure of the run.
    """
    result.write(folder / "run.json")
    sinks = result.config.get("sinks")
    if not sinks:
        return result
    notes = _publish(folder, user_dir, list(sinks))
    if notes:
        result = replace(result, notes=[*result.notes, *notes])
        result.write(folder / "run.json")
    return result


def _publish(folder: Path, user_dir: Path, names: list[str]) -> list[str]:
    """One note per sink that did not get the run."""
    ended = subprocess.run(
        [sys.executable, "-m", "dpexp.publish", str(folder)],
        cwd=user_dir,
        # Modules are found where this process, and so the ranks, found them.
        env={**env.snapshot(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.DEVNULL,  # a tracker that asks for a key must not wait for an answer
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    told = {each["sink"]: each["failure"] for each in map(json.loads, ended.stdout.splitlines())}
    if ended.returncode == -signal.SIGALRM:
        silent = f"all sinks together took more than {LIMIT_S} s"
    else:
        silent = f"its process ended with exit status {ended.returncode}"
    failures = {name: told.get(name, silent) for name in names}
    again = f"see {LOG_NAME}; again: python -m dpexp.publish <folder>"
    return [
        f"sinks.{name}: not written: {reason.rstrip('.')} ({again})"
        for name, reason in failures.items()
        if reason is not None
    ]
