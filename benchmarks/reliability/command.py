"""Starting dpexp as a user does, and finding every process that it has started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import psutil

from benchmarks.common import child_environment

MARK = "DPEXP_RELIABILITY"
# Far more than anything should take: what is not over then has hung.
LIMIT_S = 180.0
ORPHAN_S = 5.0
# Variables of launchers that this process may have itself; a command gets those of its fault only.
LAUNCHERS = ("SLURM_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "GROUP_")


class TookTooLongError(Exception):
    """Something that was waited for did not come."""


def _heed_sigint() -> None:
    """As in a foreground command, also where these tries were started in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@final
class Command:
    """One `python -m …` with a session of its own.

    Args:
        background: as a script's shell starts it behind `&`: with SIGINT ignored.
    """

    def __init__(
        self,
        module: str,
        arguments: list[str],
        folder: Path,
        variables: dict[str, str],
        *,
        background: bool = False,
    ) -> None:
        command = [sys.executable, "-m", module, *arguments]
        if background:
            command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command]
        self.mark = uuid.uuid4().hex
        inherited = {
            name: value
            for name, value in child_environment().items()
            if not name.startswith(LAUNCHERS)
        }
        # Files, not pipes: who inherits one could keep it open.
        self._out = tempfile.TemporaryFile("w+")  # noqa: SIM115  # as long as the command
        self._err = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={**inherited, "COLUMNS": "200", **variables, MARK: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
            preexec_fn=_heed_sigint,  # noqa: PLW1509  # no threads here
        )

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *exc: object) -> None:
        """End what is left, also when a try is broken off."""
        self.end()
        self._out.close()
        self._err.close()

    def wait(self) -> int | None:
        """Its exit status as a shell shows it, None when it does not end."""
        try:
            status = self.process.wait(LIMIT_S)
            return status if status >= 0 else 128 - status
        except subprocess.TimeoutExpired:
            return None

    def wait_until(self, condition: Callable[[], Any], every_s: float = 0.02) -> None:
        """Until something holds or the command has ended.

        Raises:
            TookTooLongError: neither.
        """
        deadline = time.monotonic() + LIMIT_S
        while not condition() and self.process.poll() is None:
            if time.monotonic() > deadline:
                raise TookTooLongError
            time.sleep(every_s)

    def family(self) -> list[psutil.Process]:
        """All living processes of its session, or with its mark in their environment."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                mine = os.getsid(process.pid) == self.process.pid
                mine = mine or process.environ().get(MARK) == self.mark
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def orphans(self) -> int:
        """How many live on too long after its end. Those are ended here."""
        deadline = time.monotonic() + ORPHAN_S
        while self.family() and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.end()

    def end(self) -> int:
        """End whatever is left of it. How many processes that were."""
        left = self.family()
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()
        return len(left)

    def printed(self) -> str:
        """What it wrote to stderr, and after it what to stdout."""
        texts = []
        for file in (self._err, self._out):
            file.seek(0)
            texts.append(file.read())
        return "\n".join(texts)
