"""What the command line prints of a run's end. No torch."""

from __future__ import annotations

import io
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from dpexp import env, server
from dpexp.errors import ConfigError
from dpexp.files import UNENCODABLE
from dpexp.outlets import outlive_readers
from dpexp.records import RunResult
from dpexp.texts import visible

ANSWER_S = 1.0
LONG = 2000  # characters of a message that go to the console


def say(text: str) -> None:
    """Write to stderr what may hold words of others: nothing in it reaches a terminal raw."""
    print(visible(text), file=sys.stderr)


def prepare_streams() -> None:
    """Give stdin, stdout and stderr a place where there is none (`>&-`, a daemon).

    Let what the terminal's encoding does not have be written as stderr does it already. And who
    reads them may leave.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            handle = os.open(os.devnull, os.O_RDWR)
            if handle != number:
                os.dup2(handle, number)
                os.close(handle)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=UNENCODABLE)
    outlive_readers()


def leave() -> NoReturn:
    """End this process with status 0, now."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def leave_quietly(signum: int, _frame: Any) -> NoReturn:
    """A signal before anything runs: nothing has to be kept. As a handler.

    An exception would not do: imports are under way, and some of them swallow it.
    """
    server.stop_for_good()
    os._exit(128 + signum)


def refuse(error: ConfigError, cause: BaseException | None = None) -> NoReturn:
    """Show a refusal as one paragraph and end with status 1."""
    if env.full_errors():
        say("".join(traceback.format_exception(cause or error)))
        say(getattr(error, "trace", ""))
    outer = env.outer_launcher()
    # All ranks of an outer launcher on a host come to the same refusal, if there are others.
    if outer is None or outer.local_rank == 0 or not _others(outer):
        say(f"dpexp: {error}")
    sys.exit(1)


def _others(outer: env.OuterLauncher) -> bool:
    """Whether there are other ranks: srun starts all of its tasks."""
    return env.ranks_are_slurms() or _answers(outer)


def _answers(outer: env.OuterLauncher) -> bool:
    """Whether the outer launcher lives: its variables may be left over in a shell."""
    try:
        with socket.create_connection((outer.master_addr, outer.master_port), ANSWER_S):
            return True
    except OSError:
        return False


def show_failure(result: RunResult, folder: Path) -> None:
    """Why a run failed: one paragraph, the user's own frames, and where the rest is."""
    error = result.error
    if error is None:
        return
    message = error.message
    if len(message) > LONG:
        message = message[:LONG] + "… (all of it in dpexp.log)"
    say(f"{result.label} {result.status}: {message}")
    if error.user_frames:
        say(error.user_frames.rstrip())
    if env.full_errors() and error.traceback:
        say(error.traceback.rstrip())
    elif error.stacks:
        say(f"stacks of all ranks: {folder / 'dpexp.log'}")
    elif error.traceback and error.kind not in ("config", "interrupted"):
        say(f"full traceback: {folder / 'dpexp.log'}")


def show_run(result: RunResult, folder: Path) -> None:
    """A single run's table."""
    from rich.console import Console

    from dpexp.report.single import print_run

    print_run(result.to_dict(), folder, Console())


def show_cell(result: RunResult, folder: Path) -> None:
    """One line for a cell of a sweep that has just ended."""
    rate: Any = (result.throughput or {}).get("samples_per_s")
    figure = f", {rate:,.0f} samples/s" if rate else ""
    kind = f" ({result.error.kind})" if result.status == "failed" and result.error else ""
    say(f"{folder.name}: {result.status}{kind}{figure}")
    if result.status == "failed":
        show_failure(result, folder)
