"""The faults, as data: how each is made, and how a sweep has to end under it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from benchmarks.reliability.scene import (
    Scene,
    Strike,
    becoming_read_only,
    ctrl_c,
    ctrl_c_then_terminate,
    ctrl_c_twice,
    kill_while_run_json_is_written,
    make_read_only,
    make_writable,
    ports_taken,
    read_only,
    small_disk,
    to_first,
)

TIME_S = 6
# Variables of a torchrun that is gone: nobody listens at that port.
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "gone",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "9",
}
NONE = "without a result"
SLURM = {
    "SLURM_JOB_ID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_NAME": "bash",
}


def stale(number: int) -> dict[str, str]:
    """All of torchrun's variables, as rank 0 and as rank 1."""
    return {**TORCHRUN, "RANK": str(number % 2), "LOCAL_RANK": str(number % 2)}


@dataclass(frozen=True)
class Ends:
    """How a try has to end.

    Args:
        exit: the command's exit status, as a shell shows it: 128 + n of a process that a signal
            ended.
        struck: status and kind of the struck cell as `failed (crash)`; NONE = no result. With a |
            between them, one of several.
        rank: that the result names; None = not looked at.
        words: in what the user reads; "" = nothing has to be told.
        goes_on: whether the cell after the struck one still runs.
        unkept: steps that may be missing of those made: those of the second between two
            writes, of a rank that had no time for the last one.
        begins: whether the sweep gets as far as a cell.
        report: whether there is a report at the end. Where the command was killed, one that is
            made afterwards has to say what was cut off.
    """

    exit: int
    struck: str
    words: str = ""
    rank: int | None = None
    goes_on: bool = True
    unkept: int = 0
    begins: bool = True
    report: bool = True


@dataclass(frozen=True)
class Fault:
    """A fault in the middle cell of a sweep of three.

    Args:
        how: of misbehaving.Model.
        rank: where; -1 = on all.
        ranks: 1 = under none, else under ddp.
        strike: from outside, once some steps are recorded.
        background: started as by a script's `&`.
        around: the surroundings of the command; may give variables.
        mend: before the sweep is resumed.
        variables: of the environment, by the number of the try.
    """

    name: str
    ends: Ends
    how: str = "calm"
    rank: int = 0
    ranks: int = 1
    overrides: tuple[str, ...] = ()
    strike: Strike | None = None
    background: bool = False
    around: Callable[[Scene], AbstractContextManager[dict[str, str] | None]] | None = None
    mend: Callable[[Scene], None] | None = None
    variables: Callable[[int], dict[str, str]] = field(default=lambda number: {})

    @property
    def surroundings(self) -> bool:
        """Whether the fault is there all the time, and no cell does anything wrong."""
        misbehaves = any("misbehaving.Rows" in each for each in self.overrides)
        return self.how == "calm" and self.strike is None and not misbehaves


def code(name: str, how: str, ends: Ends, **more: object) -> tuple[Fault, Fault]:
    """A fault that the user's model makes, under none and on rank 1 of ddp."""
    alone = Fault(name, ends, how=how, **more)  # type: ignore[arg-type]
    both = Fault(name, ends, how=how, rank=1, ranks=2, **more)  # type: ignore[arg-type]
    return alone, both


def rows(how: str, where: str, *more: str) -> tuple[str, ...]:
    """Overrides for misbehaving.Rows."""
    target = "dataset._target_=benchmarks.reliability.misbehaving.Rows"
    known = ("+dataset.cell=${model.cell}", "+dataset.place=${model.place}")
    return (
        "dataset=custom",
        target,
        *known,
        f"+dataset.how={how}",
        f"+dataset.where={where}",
        *more,
    )


def failed(kind: str, words: str, **more: object) -> Ends:
    """A cell that fails, in a sweep that goes on."""
    return Ends(1, f"failed ({kind})", words, **more)  # type: ignore[arg-type]


FINE = Ends(0, "ok")
STOPPED = Ends(143, "interrupted", "stopped by SIGTERM", goes_on=False)
CTRL_C = Ends(130, "interrupted", "stopped by SIGINT", goes_on=False)
UNWRITTEN = 11
GONE = Ends(137, NONE, goes_on=False, unkept=UNWRITTEN, report=False)
WORKER = ("loader.workers=1",)
NO_ROOM = Ends(1, NONE, "no space left on device", goes_on=False, unkept=UNWRITTEN, report=False)

SWEEPS = (
    *code("kill -9 of a rank", "kill", failed("crash", "killed by SIGKILL", unkept=UNWRITTEN)),
    Fault("kill -9 of the parent", GONE, strike=to_first(signal.SIGKILL)),
    Fault("kill -9 of the parent", GONE, ranks=2, strike=to_first(signal.SIGKILL)),
    Fault(
        "kill -9 of the parent, with loader workers", GONE, ranks=2, overrides=WORKER,
        strike=to_first(signal.SIGKILL),
    ),
    Fault(
        "kill -9 of the parent while it writes run.json", replace(GONE, struck=f"{NONE}|ok"),
        strike=kill_while_run_json_is_written,
    ),
    *code("SIGTERM to one rank", "terminate", failed("crash", "got SIGTERM from outside")),
    Fault(
        "kill -9 of a loader worker", failed("crash", "a loader process died"),
        overrides=rows("kill", "worker", *WORKER),
    ),
    Fault(
        "kill -9 of a loader worker", failed("crash", "a loader process died"), ranks=2,
        overrides=rows("kill", "worker", *WORKER),
    ),
    Fault("SIGTERM", STOPPED, strike=to_first(signal.SIGTERM)),
    Fault("SIGTERM", STOPPED, ranks=2, strike=to_first(signal.SIGTERM)),
    Fault("SIGINT (Ctrl-C)", CTRL_C, strike=ctrl_c),
    Fault("SIGINT (Ctrl-C)", CTRL_C, ranks=2, strike=ctrl_c),
    Fault(
        "SIGINT in the background, where it is ignored; then SIGTERM", STOPPED, ranks=2,
        strike=ctrl_c_then_terminate, background=True,
    ),
    Fault(
        "SIGINT twice, a rank stuck in C code",
        Ends(130, f"{NONE}|interrupted", goes_on=False, unkept=UNWRITTEN, report=False),
        how="stuck", rank=1, ranks=2, strike=ctrl_c_twice,
    ),
    Fault(
        "SIGINT twice, 0.6 s apart",
        Ends(130, f"{NONE}|interrupted", goes_on=False, unkept=UNWRITTEN, report=False), ranks=2,
        strike=ctrl_c_twice,
    ),
    *code("sys.exit(0) in a rank", "exit", failed("crash", "called sys.exit(0)")),
    *code(
        "os._exit(0) in a rank", "exit_at_once", failed("crash", "exit status 0", unkept=UNWRITTEN)
    ),
    *code("KeyboardInterrupt in a rank", "interrupt", failed("user_error", "KeyboardInterrupt")),
    *code("exception in the model", "boom", failed("user_error", "ValueError: boom")),
    *code("exception in a hook of backward", "hook", failed("user_error", "ValueError: boom")),
    Fault(
        "exception in the dataset", failed("user_error", "cannot be read"),
        overrides=rows("raise", "rank"),
    ),
    Fault(
        "exception in the dataset", failed("user_error", "cannot be read"), ranks=2,
        overrides=rows("raise", "rank"),
    ),
    Fault(
        "exception in a loader worker", failed("user_error", "cannot be read"),
        overrides=rows("raise", "worker", *WORKER),
    ),
    Fault(
        "exception in a loader worker", failed("user_error", "cannot be read"), ranks=2,
        overrides=rows("raise", "worker", *WORKER),
    ),
    Fault(
        f"hang in a collective that others do not join (parallel.timeout_s={TIME_S})",
        failed("hang", "rank 1 hangs in forward of step 12", rank=1), how="collective", rank=1,
        ranks=2, overrides=(f"parallel.timeout_s={TIME_S}",),
    ),
    Fault(
        f"hang in user code on one rank (parallel.timeout_s={TIME_S})",
        failed("hang", "rank 1 hangs in forward of step 12", rank=1), how="hang", rank=1, ranks=2,
        overrides=(f"parallel.timeout_s={TIME_S}",),
    ),
    Fault(
        f"hang in user code on one rank (watchdog_s={TIME_S})",
        failed("hang", "rank 1 hangs in forward of step 12", rank=1, unkept=UNWRITTEN), how="hang",
        rank=1, ranks=2, overrides=(f"watchdog_s={TIME_S}",),
    ),
    Fault(
        f"hang in user code on all ranks (watchdog_s={TIME_S})",
        failed("hang", "hangs in forward of step 12", unkept=UNWRITTEN), how="hang", rank=-1,
        ranks=2, overrides=(f"watchdog_s={TIME_S}",),
    ),
    Fault(
        f"stuck in C code (watchdog_s={TIME_S})",
        failed("hang", "hangs in forward of step 12", unkept=UNWRITTEN), how="stuck",
        overrides=(f"watchdog_s={TIME_S}",),
    ),
    *code(
        f"hang in the model's constructor (watchdog_s={TIME_S})", "hang_at_start",
        failed("hang", "hangs in set-up"), overrides=(f"watchdog_s={TIME_S}",),
    ),
    Fault(
        f"hang in the dataset (watchdog_s={TIME_S})", failed("hang", "hangs in data of step 11"),
        overrides=rows("hang", "rank", f"watchdog_s={TIME_S}"),
    ),
    Fault(
        f"hang in a loader worker (watchdog_s={TIME_S})", failed("hang", "hangs in data of step"),
        ranks=2, overrides=rows("hang", "worker", *WORKER, f"watchdog_s={TIME_S}"),
    ),
    *code(
        "out of memory (process_memory_mib=2000)", "memory",
        failed("oom", "process_memory_mib=2000", unkept=UNWRITTEN),
        overrides=("process_memory_mib=2000",),
    ),
    Fault("disk full during the steps", NO_ROOM, how="fill", around=small_disk),
    Fault("disk full during the steps", NO_ROOM, how="fill", ranks=2, rank=1, around=small_disk),
    Fault(
        "disk full at run.json", NO_ROOM, how="fill_at_the_end", around=small_disk,
    ),
    Fault(
        "the folder becomes read-only during the steps",
        Ends(1, NONE, "read-only file system", goes_on=False, unkept=UNWRITTEN, report=False),
        strike=make_read_only, around=becoming_read_only, mend=make_writable,
    ),
    Fault(
        "read-only folder", Ends(1, NONE, "read-only file system", goes_on=False, begins=False),
        around=read_only,
    ),
    Fault("a port in use (29500, MASTER_PORT)", FINE, ranks=2, around=ports_taken),
    Fault(
        "stale torchrun variables, each alone", FINE, ranks=2,
        variables=lambda number: dict([list(TORCHRUN.items())[number % len(TORCHRUN)]]),
    ),
    Fault(
        "stale torchrun variables, all but TORCHELASTIC_RUN_ID", FINE, ranks=2,
        variables=lambda number: {k: v for k, v in TORCHRUN.items() if "ELASTIC" not in k},
    ),
    Fault("stale torchrun variables, all of them", FINE, ranks=2, variables=stale),
    Fault("stale Slurm variables", FINE, ranks=2, variables=lambda number: SLURM),
)  # fmt: skip
