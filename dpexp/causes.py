"""Of several ranks' ends, the one that caused the others. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from dpexp.beacon import Position
from dpexp.failures import LOST_PEER
from dpexp.records import ErrorRecord
from dpexp.stopping import STOP_SIGNALS


def root_cause(
    records: dict[int, ErrorRecord], codes: dict[int, int], positions: Sequence[Position]
) -> ErrorRecord:
    """Why a run failed.

    A rank that ended without a word was killed, or left by os._exit: the others then only lost
    their connection to it. The same holds of one that a signal has stopped. Errors of a rank's own
    come before that; lost connections last.

    Args:
        records: of the ranks that left one.
        codes: exit codes of the ranks that had ended by themselves when a failure was first seen.
        positions: of all ranks, in order.
    """
    silent = {rank: code for rank, code in codes.items() if rank not in records}
    own = [
        r for r in records.values() if r.type != LOST_PEER and r.kind not in ("interrupted", "hang")
    ]
    if own:
        return own[0]
    if silent:
        number, code = next(iter(silent.items()))
        return _silent_end(positions[number], code)
    for number, record in records.items():
        # Of ranks whose fork server was killed nobody can tell the exit code.
        if record.kind == "interrupted" and codes.get(number, 0) - 128 in STOP_SIGNALS:
            name = signal.Signals(codes[number] - 128).name
            return _ended_at(positions[number], name, f"rank {number} got {name} from outside")
    rest = sorted(records.values(), key=lambda r: ("hang", "crash", "interrupted").index(r.kind))
    if rest and rest[0].kind == "interrupted":
        text = "the ranks were ended from outside: the fork server that holds them was killed"
        return ErrorRecord("crash", "ForkServer", text, phase=rest[0].phase)
    if rest:
        return rest[0]
    return ErrorRecord("crash", "Unknown", "a rank ended and left no error", phase="launch")


def _silent_end(at: Position, code: int) -> ErrorRecord:
    if code < 0:
        name = signal.Signals(-code).name
        hint = "; the system may have run out of memory" if -code == signal.SIGKILL else ""
        text = f"rank {at.rank} was killed by {name}{hint}"
    else:
        name = f"exit {code}"
        text = f"rank {at.rank} ended with exit status {code} before it was done (os._exit?)"
    return _ended_at(at, name, text)


def _ended_at(at: Position, name: str, text: str) -> ErrorRecord:
    where = at.phase if at.step is None else f"step {at.step}, {at.phase}"
    during = f" of {at.during}" if at.during else ""
    return ErrorRecord(
        "crash",
        name,
        f"{text} [rank {at.rank}, {where}{during}]",
        at.rank,
        at.step,
        phase=at.phase,
        during=at.during,
    )
