"""One log per run, with the rank on every line."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import final

from dpexp.files import UNENCODABLE

LOG_NAME = "dpexp.log"
_FORMAT = "[%(asctime)s][%(where)s][%(name)s][%(levelname)s] %(message)s"


@final
class _Where(logging.Filter):
    """Tells which process wrote a line."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def filter(self, record: logging.LogRecord) -> bool:
        if not hasattr(record, "where"):
            record.where = self._where
        return True


def open_log(folder: Path, where: str, console_level: int) -> list[logging.Handler]:
    """Send this process's log to ``dpexp.log`` (all of INFO) and to the console.

    Several processes append to one file; a line is one write, so lines stay whole.

    Args:
        where: shown on every line, such as ``rank=1``.
        console_level: what the console gets; INFO on rank 0, WARNING elsewhere.

    Returns:
        The handlers, for :func:`close_log`.
    """
    file = logging.FileHandler(folder / LOG_NAME, encoding="utf-8", errors=UNENCODABLE)
    file.setLevel(logging.INFO)
    file.setFormatter(logging.Formatter(_FORMAT))
    console = logging.StreamHandler(sys.stderr)
    console.setLevel(console_level)
    console.setFormatter(logging.Formatter(f"%(levelname)s [{where}] %(message)s"))
    # A line that is meant for the file alone says so.
    console.addFilter(lambda record: not getattr(record, "file_only", False))
    logging.raiseExceptions = False  # a full disk must not bury the message that says so
    root = logging.getLogger()
    for handler in (file, console):
        handler.addFilter(_Where(where))
        root.addHandler(handler)
    root.setLevel(min(logging.INFO, root.level or logging.INFO))
    logging.captureWarnings(True)
    return [file, console]


def append(folder: Path, text: str) -> None:
    """Add to a run's log from the launching process, when its ranks are gone.

    Raises:
        OSError: it cannot be written.
    """
    with (folder / LOG_NAME).open("a", encoding="utf-8", errors=UNENCODABLE) as file:
        file.write(f"[launcher] {text.rstrip()}\n")


def close_log(handlers: list[logging.Handler]) -> None:
    """Take the handlers off again."""
    for handler in handlers:
        logging.getLogger().removeHandler(handler)
        handler.close()
    logging.captureWarnings(False)


def quiet_torch() -> None:
    """Keep the launcher's own narration off the console: its outcome is reported by dpexp."""
    # Each of torch's loggers has a level and handlers of its own, so each is told.
    for name in logging.root.manager.loggerDict:
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing", "torchelastic")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
