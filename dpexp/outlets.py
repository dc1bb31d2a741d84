"""Standard streams that may be closed at the other end while a run or a sweep goes on."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, final


def outlive_readers() -> None:
    """Let stdout and stderr lose what is written after their reader is gone (``| head -1``).

    What is measured is in files, so nobody's leaving is a reason to end.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        # Not those that a test or a notebook has put in their place.
        if type(stream) is not io.TextIOWrapper or stream.fileno() != number:
            continue
        raw = _Outlet(number, "w", closefd=False)
        # Unbuffered with `python -u`.
        buffer: Any = raw if stream.write_through else io.BufferedWriter(raw)
        lasting = io.TextIOWrapper(
            buffer,
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        stream.flush()
        setattr(sys, name, lasting)


@final
class _Outlet(io.FileIO):
    """A descriptor that becomes ``/dev/null`` when nobody reads it any more."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return super().write(data)
