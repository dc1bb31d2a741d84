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
from dpexp.records import RunResult

ANSWER_S = 1.0
LONG = 2000  # characters of a message that go to the console


def open_closed_streams() -> None:
    """Give stdin, stdout and stderr a place where there is none (`>&-`, a daemon).

    And let what the terminal's encoding does not have be written as stderr does it already.
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
        traceback.print_exception(cause or error)
        print(getattr(error, "trace", ""), file=sys.stderr)
    outer = env.outer_launcher()
    # All of torchrun's ranks come to the same refusal, if there are others.
    if outer is None or outer.rank == 0 or not _answers(outer):
        print(f"dpexp: {error}", file=sys.stderr)
    sys.exit(1)


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
    print(f"{result.label} {result.status}: {message}", file=sys.stderr)
    if error.user_frames:
        print(error.user_frames.rstrip(), file=sys.stderr)
    if env.full_errors() and error.traceback:
        print(error.traceback.rstrip(), file=sys.stderr)
    elif error.stacks:
        print(f"stacks of all ranks: {folder / 'dpexp.log'}", file=sys.stderr)
    elif error.traceback and error.kind not in ("config", "interrupted"):
        print(f"full traceback: {folder / 'dpexp.log'}", file=sys.stderr)


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
    print(f"{folder.name}: {result.status}{kind}{figure}", file=sys.stderr)
    if result.status == "failed":
        show_failure(result, folder)
