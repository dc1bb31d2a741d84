"""One try of a fault: what happened, and what of it is not as it has to be."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from benchmarks.reliability.command import Command, TookTooLongError
from benchmarks.reliability.faults import NONE, Fault
from benchmarks.reliability.looking import (
    Snapshot,
    finished,
    lost,
    result,
    seconds_between,
    statuses,
    steps_in_events,
    steps_in_table,
)
from benchmarks.reliability.misbehaving import STRUCK_CELL, mark
from benchmarks.reliability.scene import STEPS_BEFORE, Scene

STEPS = 40
CELLS = 3
SWEEP = "disk/sweep"
# As short as a cell can be, so that a try is: nothing but the steps.
COMMON = (
    "-m", "task=train", "model=custom", "model._target_=benchmarks.reliability.misbehaving.Model",
    "+model.cell=0,1,2", "+model.place=.", "batch_size=4", "shuffle=false",
    "epochs=null", f"steps={STEPS}", "check.parity=false", "measure.flops=false",
    "measure.calibration_pairs=0",
)  # fmt: skip
SPREAD = {1: ("parallel=none",), 2: ("parallel=ddp", "num_devices=2")}
IN_FOLDER = f"hydra.sweep.dir={SWEEP}"


@dataclass(frozen=True)
class Seen:
    """What a try came to.

    Args:
        ended: the struck cell and the command.
        end_s: from the fault to the end of what ends; None where nothing does.
        kept: of the struck cell.
        told: the line that says what has happened.
        lost: finished results that are gone or not as they were.
        orphans: processes that had to be ended.
        resumed: whether the sweep was complete after it was resumed; None = not tried.
        wrong: what is not as it has to be.
    """

    ended: str
    end_s: float | None
    kept: str
    told: str
    lost: int
    orphans: int
    resumed: bool | None
    wrong: tuple[str, ...]


@contextmanager
def scene_of(number: int) -> Iterator[Scene]:
    with tempfile.TemporaryDirectory(prefix="reliability-") as name:
        (Path(name) / "disk").mkdir()
        yield Scene(Path(name), number)


def sweep_try(fault: Fault, number: int, *, resume: bool) -> Seen:
    """Run a sweep under a fault.

    Args:
        resume: also where the sweep goes on without; where it does not it is resumed anyway.
    """
    with scene_of(number) as scene, (fault.around or _nothing)(scene) as variables:
        return _struck(fault, scene, {**fault.variables(number), **(variables or {})}, resume)


def _nothing(_scene: Scene) -> nullcontext[None]:
    return nullcontext()


def _struck(fault: Fault, scene: Scene, variables: dict[str, str], resume: bool) -> Seen:
    chosen = (f"+model.how={fault.how}", f"+model.rank={fault.rank}", *fault.overrides)
    arguments = [*COMMON, *SPREAD[fault.ranks], *chosen, IN_FOLDER]
    if fault.surroundings:
        mark(str(scene.place))  # all the time
    before: dict[Path, Snapshot] = {}
    wrong: list[str] = []
    with Command(
        "dpexp", arguments, scene.place, variables, background=fault.background
    ) as command:
        try:
            command.wait_until(lambda: scene.struck is not None)
            before = finished(scene.sweep, STRUCK_CELL)
            _strike(fault, scene, command)
            status = command.wait()
        except TookTooLongError:
            status = None
        if status is None:
            wrong.append("it did not end")
            command.end()
        orphans = command.orphans()
        (scene.place / "gone").touch()
        printed = command.printed()
    wrong += _not_as_expected(fault, scene, status, printed)
    if fault.ends.begins:
        wrong += _report_wrong(fault, scene)
    if fault.ends.begins and len(before) != STRUCK_CELL:
        wrong.append("the cell before did not end well")
    gone, kept, ended, end_s = lost(before), _kept(fault, scene), *_end(fault, scene, status)
    resumed = None
    if fault.ends.begins and (resume or not fault.ends.goes_on):
        if fault.mend is not None:
            fault.mend(scene)
        (scene.place / "disk" / "filler").unlink(missing_ok=True)
        before = {**before, **finished(scene.sweep)}
        resumed, more = resumed_well(scene, arguments)
        orphans += more
        gone += lost(before)
        if not resumed:
            wrong.append(f"resumed: {statuses(scene.sweep)}")
    wrong += [f"{gone} lost"] * bool(gone) + [f"{orphans} orphans"] * bool(orphans)
    told = told_by(printed, fault.ends.words) if fault.ends.words else ""
    return Seen(ended, end_s, kept, told, gone, orphans, resumed, tuple(wrong))


def _strike(fault: Fault, scene: Scene, command: Command) -> None:
    """From outside, after some steps or, if the model does something, after that."""
    if fault.strike is None:
        return
    calm = fault.how == "calm"
    command.wait_until(lambda: scene.steps() >= STEPS_BEFORE if calm else scene.fault.exists())
    fault.strike(scene, command)


def resumed_well(scene: Scene, arguments: list[str]) -> tuple[bool, int]:
    """Whether the sweep is complete after it; processes left."""
    with Command("dpexp", [*arguments, f"resume={SWEEP}"], scene.place, {}) as command:
        status = command.wait()
        if status is None:
            command.end()
        return status == 0 and statuses(scene.sweep) == ["ok"] * CELLS, command.orphans()


def _not_as_expected(fault: Fault, scene: Scene, status: int | None, printed: str) -> list[str]:
    ends, found = fault.ends, result(scene.struck)
    error = (found or {}).get("error") or {}
    wrong = [
        (status != ends.exit, f"exit status {status}"),
        (_status(scene) not in ends.struck.split("|"), f"cell: {_status(scene)}"),
        (ends.words not in printed, f"told: {told_by(printed, '')}"),
        ("Traceback (most recent" in printed, "a traceback is shown"),
        (ends.rank is not None and error.get("rank") != ends.rank, f"rank {error.get('rank')}"),
        (
            ends.goes_on and statuses(scene.sweep) != ["ok", statuses(scene.sweep)[1], "ok"],
            f"cells: {statuses(scene.sweep)}",
        ),
    ]
    if ends.begins and not fault.surroundings:
        kept, made = _readable(fault, scene), _made(fault, scene)
        wrong.append((not made - ends.unkept <= kept <= made + 1, f"{kept} of {made} steps kept"))
    return [text for is_wrong, text in wrong if is_wrong]


def _report_wrong(fault: Fault, scene: Scene) -> list[str]:
    """What is not as it has to be of the sweep's report."""
    there = (scene.sweep / "report.html").exists()
    if fault.ends.report:
        return [] if there else ["no report"]
    if fault.ends.exit != 128 + signal.SIGKILL:
        return []
    with Command("dpexp.report", [SWEEP], scene.place, {}) as command:
        status, printed = command.wait(), command.printed()
    told = ("the sweep is not done:", "to go on: python -m dpexp -m ")
    missing = [words for words in told if words not in printed]
    return [f"report: exit {status}, without {missing}"] if there or status or missing else []


def _status(scene: Scene) -> str:
    """Of the struck cell, with the kind of its failure."""
    found = result(scene.struck)
    if found is None:
        return NONE
    kind = f" ({found['error']['kind']})" if found["status"] == "failed" else ""
    return f"{found['status']}{kind}"


def _made(fault: Fault, scene: Scene) -> int:
    """Steps that all ranks have completed."""
    ticks = [scene.place / f"ticks.{rank}" for rank in range(fault.ranks)]
    return min(len(path.read_text()) if path.exists() else 1 for path in ticks) - 1


def _readable(fault: Fault, scene: Scene) -> int:
    """Steps that are whole in every rank's table and in the event file."""
    tables = [steps_in_table(scene.struck, rank) for rank in range(fault.ranks)]
    series = [*tables, steps_in_events(scene.struck)]
    for steps in series:
        if steps != list(range(len(steps))):
            return -1
    return min(map(len, series))


def _kept(fault: Fault, scene: Scene) -> str:
    if not fault.ends.begins:
        return "nothing was begun"
    if fault.surroundings:
        return "all"
    made, kept = _made(fault, scene), _readable(fault, scene)
    return f"{min(kept, made)} of {made} steps"


def _end(fault: Fault, scene: Scene, status: int | None) -> tuple[str, float | None]:
    """What ended, as text, and how many seconds after the fault."""
    found = result(scene.struck)
    error = (found or {}).get("error") or {}
    where = [
        f"rank {error['rank']}" if error.get("rank") is not None else "",
        str(error.get("phase") or ""),
        f"step {error['step']}" if error.get("step") is not None else "",
    ]
    place = ", ".join(filter(None, where))
    cell = f"cell {_status(scene)}{f': {place}' if place else ''}"
    if not fault.ends.begins and found is None:
        cell = "no cell begins"
    on = "the sweep goes on, " if fault.ends.goes_on else ""
    last = "run.json" if fault.ends.goes_on and not fault.surroundings else "gone"
    path = scene.place / last if last == "gone" else (scene.struck or scene.place) / last
    return f"{cell}; {on}exit {status}", seconds_between(scene.fault, path)


def told_by(printed: str, words: str) -> str:
    """The line that has these words, or the last one."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    found = [line for line in lines if words and words in line]
    return (found or lines[-1:] or [""])[0]
