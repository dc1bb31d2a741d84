"""``python -m dpexp.publish FOLDER``: hand a run that has ended to the sinks of its config.

A process of its own, after the steps: what trackers import, start and send is in no measurement,
and ends with this process.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from dpexp import console, env
from dpexp.build import UserCodeError
from dpexp.errors import ConfigError
from dpexp.logs import close_log, open_log
from dpexp.publishing import LIMIT_S
from dpexp.records import STEP_TABLES, read_run, run_result_from
from dpexp.sinks import FinishedRun, open_sink, steps_of

USAGE = """\
Hand a run that has ended to the sinks of its config, once more: into a tracker that could not be
reached, for example.

  python -m dpexp.publish FOLDER

FOLDER is a run's folder. Type it where the run was typed: paths in the config are relative to that.
"""
RECORDS_PER_WRITE = 1000

log = logging.getLogger(__name__)


def main() -> None:
    """Entry point. Exit status: 0, or 1 when a sink did not get the run.

    Prints one line of JSON per sink: its name, and why it failed (null = it has the run).
    """
    arguments = sys.argv[1:]
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(USAGE, end="")
        sys.exit(0 if {"-h", "--help"} & set(arguments) else 1)
    # Also for the case that whoever started this process is gone: a tracker's server that does
    # not answer must not keep it for ever.
    signal.alarm(LIMIT_S)
    env.quiet_trackers()
    told = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no outcome
    try:
        run = finished(Path(arguments[0]).absolute())
    except (OSError, ValueError) as error:
        fix = "the folder of a run that has ended"
        console.refuse(ConfigError("FOLDER", arguments[0], str(error), fix=fix))
    handlers = open_log(run.folder, "sinks", logging.WARNING)
    failed = False
    for name, node in (run.result.config.get("sinks") or {}).items():
        failure = publish(name, node, run)
        failed = failed or failure is not None
        print(json.dumps({"sink": name, "failure": failure}), file=told, flush=True)
    close_log(handlers)
    sys.exit(1 if failed else 0)


def finished(folder: Path) -> FinishedRun:
    """What the files of a run's folder tell of it.

    Raises:
        OSError, ValueError: it has no readable ``run.json``.
    """
    result = run_result_from(read_run(folder / "run.json"))
    sweep = folder.parent if (folder.parent / "multirun.yaml").is_file() else None
    written = min(folder.glob(STEP_TABLES), default=folder / "run.json")  # the first rank's
    total_s = sum(record.step_s for record in steps_of(folder))
    return FinishedRun(folder, result, sweep, written.stat().st_mtime - total_s)


def publish(name: str, node: dict[str, Any], run: FinishedRun) -> str | None:
    """Let one sink write the run. Returns why it could not, or None."""
    try:
        sink = open_sink(name, node, run)
        steps = steps_of(run.folder)
        while records := list(islice(steps, RECORDS_PER_WRITE)):
            sink.write(records)
        sink.close()
    except ConfigError as error:
        return str(error)
    except (Exception, SystemExit) as error:  # whatever a sink of the user's may raise
        log.exception("sink %s", name, extra={"file_only": True})
        text = " ".join(str(error).split())
        return text if isinstance(error, UserCodeError) else f"{type(error).__name__}: {text}"
    return None


if __name__ == "__main__":
    main()
