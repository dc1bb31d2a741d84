"""Damage to the files of a sweep that has ended, and two sweeps at once; with a try of each."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.reliability.command import Command
from benchmarks.reliability.looking import (
    cell_folder,
    finished,
    lost,
    statuses,
    steps_in_events,
    steps_in_table,
)
from benchmarks.reliability.misbehaving import STRUCK_CELL, mark
from benchmarks.reliability.tries import (
    CELLS,
    COMMON,
    IN_FOLDER,
    SPREAD,
    STEPS,
    SWEEP,
    Seen,
    resumed_well,
    scene_of,
    told_by,
)

APART_S = 0.1


@dataclass(frozen=True)
class Damage:
    """Damage to a file of a sweep that had ended well.

    Args:
        name: of the file, as a pattern in the struck cell's folder.
        keep: the share of its bytes that stay.
        garbage: put in their place.
        again: whether the cell has to run again when the sweep is resumed.
        words: in what the report says.
    """

    name: str
    file: str
    again: bool
    keep: float = 0.0
    garbage: bytes = b""
    words: str = ""

    def do(self, folder: Path) -> None:
        """To a cell's folder."""
        (path,) = folder.glob(self.file)
        whole = path.read_bytes()
        path.write_bytes(whole[: int(self.keep * len(whole))] + self.garbage)


@dataclass(frozen=True)
class Pair:
    """Two sweeps started at the same time, in one folder or each in one of its own."""

    name: str
    same: bool


DAMAGES = (
    Damage("garbage in run.json", "run.json", True, garbage=b"\x00\xff{]", words="run.json"),
    Damage("empty run.json", "run.json", True, words="run.json"),
    Damage("truncated run.json", "run.json", True, keep=0.5, words="run.json"),
    Damage("truncated steps CSV", "steps.rank0.csv", False, keep=0.53),
    Damage("truncated event file", "events.out.tfevents.*", False, keep=0.53),
)
PAIRS = (
    Pair("two sweeps started at once in one folder", same=True),
    Pair("two sweeps started at once without a folder", same=False),
)


@contextmanager
def sound_sweep() -> Iterator[Callable[[], Path]]:
    """A sweep that has ended well, made when it is first asked for."""
    with tempfile.TemporaryDirectory(prefix="reliability-") as name:
        place = Path(name)

        def made() -> Path:
            if not (place / SWEEP).exists():
                mark(name)
                arguments = [*COMMON, *SPREAD[1], IN_FOLDER]
                with Command("dpexp", arguments, place, {}) as command:
                    if command.wait() != 0:
                        raise RuntimeError(command.printed())
            return place / SWEEP

        yield made


def damage_try(damage: Damage, number: int, sound: Path) -> Seen:
    """Damage a file of the struck cell; make the report and resume."""
    with scene_of(number) as scene:
        mark(str(scene.place))
        shutil.copytree(sound, scene.sweep)
        struck = scene.struck
        assert struck is not None
        damage.do(struck)
        before = finished(scene.sweep)
        with Command("dpexp.report", [SWEEP], scene.place, {}) as report:
            status, printed, orphans = report.wait(), report.printed(), report.orphans()
        rows, events = steps_in_table(struck), steps_in_events(struck)
        resumed, more = resumed_well(scene, [*COMMON, *SPREAD[1], IN_FOLDER])
        orphans += more
        gone, cell = lost(before), cell_folder(scene.sweep, STRUCK_CELL)
        again = steps_in_table(cell) == list(range(STEPS)) and not damage.file.startswith("steps")
        wrong = [
            (status != 0, f"exit status {status} of the report"),
            (damage.words not in printed, f"told: {told_by(printed, '')}"),
            ("Traceback (most recent" in printed, "a traceback is shown"),
            (rows != list(range(len(rows))), "steps of the table are not in order"),
            (events != list(range(len(events))), "steps of the event file are not in order"),
            (not resumed, f"resumed: {statuses(scene.sweep)}"),
            (damage.again and not again, "the cell did not run again"),
            (bool(gone), f"{gone} lost"),
            (bool(orphans), f"{orphans} orphans"),
        ]
        kept = f"{len(rows)} of {STEPS} rows, {len(events)} events"
        what = "resumed: the cell runs again" if damage.again else "resumed: nothing runs again"
        told = told_by(printed, damage.words) if damage.words else ""
        named = tuple(text for is_wrong, text in wrong if is_wrong)
        return Seen(f"report made; {what}", None, kept, told, gone, orphans, resumed, named)


def pair_try(pair: Pair, number: int) -> Seen:
    """Start two sweeps at once."""
    with scene_of(number) as scene:
        mark(str(scene.place))
        arguments = [*COMMON, *SPREAD[1], *([IN_FOLDER] if pair.same else [])]
        with ExitStack() as ending:
            commands = []
            for _ in range(2):
                commands.append(ending.enter_context(Command("dpexp", arguments, scene.place, {})))
                time.sleep(APART_S * (number % 4))
            codes = [command.wait() for command in commands]
            orphans = sum(command.orphans() for command in commands)
            printed = [command.printed() for command in commands]
        folders = [scene.sweep] if pair.same else list(scene.place.glob("outputs/sweeps/*/*"))
        found = [statuses(folder) for folder in folders]
        expected = ([0, 1], 1) if pair.same else ([0, 0], 2)
        refused = "".join(text for text, status in zip(printed, codes, strict=True) if status != 0)
        words = "hydra.sweep.dir" if pair.same else ""
        wrong = [
            (sorted(codes, key=str) != expected[0], f"exit status {codes}"),
            (found != [["ok"] * CELLS] * expected[1], f"cells: {found}"),
            (words not in refused, f"told: {told_by(refused, '')}"),
            ("Traceback (most recent" in refused, "a traceback is shown"),
            (bool(orphans), f"{orphans} orphans"),
        ]
        ended = "one is refused, the other ends well" if pair.same else "both end well"
        named = tuple(text for is_wrong, text in wrong if is_wrong)
        told = told_by(refused, words) if pair.same else ""
        lost_results = expected[1] * CELLS - sum(each.count("ok") for each in found)
        return Seen(ended, None, "all", told, lost_results, orphans, None, named)
