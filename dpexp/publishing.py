"""Has the sinks of a finished run written, by :mod:`dpexp.publish`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from dpexp import env
from dpexp.logs import LOG_NAME

LIMIT_S = 300  # for all sinks of a run


def publish(folder: Path, user_dir: Path, names: list[str]) -> list[str]:
    """Hand a finished run to its sinks.

    Args:
        user_dir: where the user started: her modules and relative paths are found there.

    Returns:
        One note per sink that did not get the run.
    """
    ended = subprocess.run(
        [sys.executable, "-m", "dpexp.publish", str(folder)],
        cwd=user_dir,
        # Modules are found where this process, and so the ranks, found them.
        env={**env.snapshot(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.DEVNULL,  # a tracker that asks for a key must not wait for an answer
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    told = _outcomes(ended.stdout)
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


def _outcomes(text: str) -> dict[str, str | None]:
    """By sink why it failed, of the lines that tell it: a sink may have written others there."""
    told = {}
    for line in text.splitlines():
        try:
            each = json.loads(line)
            told[str(each["sink"])] = each["failure"] and str(each["failure"])
        except (ValueError, TypeError, LookupError):
            continue
    return told
