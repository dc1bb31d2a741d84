"""Finds that a run hangs, and where: the launching process's look at its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from dpexp.beacon import TICKS, WAITED, Position, own_cells, position
from dpexp.failures import is_user
from dpexp.plan import MOST_RANK_FILES
from dpexp.rank import STACKS
from dpexp.records import ErrorRecord
from dpexp.stacks import Frame, collect, threads
from dpexp.timing import now_s

# Where the innermost Python frame of a rank lies that waits for others, or for backward's hooks.
_WAITING = ("/torch/distributed/", "/torch/autograd/", "/dpexp/comm.py")
MOST_TOLD = 4
LONGEST_GAP_S = 2.0


@final
class Watchdog:
    """Looks at the beacon of a run (beacon.py).

    A run hangs when none of its ranks has come to another phase for `watchdog_s`: while one goes
    on, the others may be waiting for it.

    Args:
        beacon: the memory that the ranks write to.
        watchdog_s: None = never.
    """

    def __init__(self, beacon: Any, ranks: int, scratch: Path, watchdog_s: float | None) -> None:
        self._cells = [own_cells(beacon, rank) for rank in range(ranks)]
        self._scratch, self._limit_s = scratch, watchdog_s
        self._ticks: list[int] = []
        self._looked_s = now_s()
        self._still_s = 0.0  # without a change, as far as this process was running itself
        self._seen: list[Position] = []  # when the stacks were taken
        self._stacks: dict[int, str] = {}
        self.found_hanging = False

    def positions(self) -> list[Position]:
        """Where each rank stands; of one that is gone, where it ended."""
        return [position(cells, rank) for rank, cells in enumerate(self._cells)]

    def hung(self) -> bool:
        """Whether the run's time without progress is up."""
        ticks, now = [cells[TICKS] for cells in self._cells], now_s()
        # A longer gap between two looks means that this process was stopped (Ctrl-Z), and with it
        # most likely all of the run.
        self._still_s += min(now - self._looked_s, LONGEST_GAP_S)
        self._looked_s = now
        if ticks != self._ticks:
            self._ticks, self._still_s = ticks, 0.0
        self.found_hanging = self._limit_s is not None and self._still_s > self._limit_s
        return self.found_hanging

    def late(self) -> bool:
        """Whether a rank has waited for another one until its time was up, and not yet been seen.

        It waits to be seen, so that the one it waited for can be looked at before it is ended.
        """
        return any(cells[WAITED] for cells in self._cells)

    def look(self, pids: dict[int, int]) -> None:
        """Keep positions and stacks of all ranks; of very many, the stacks of those behind.

        Args:
            pids: of the living ones.
        """
        self._seen = self.positions()
        offered = {rank: pid for rank, pid in pids.items() if self._seen[rank].ticks}
        behind = sorted(offered, key=lambda rank: self._seen[rank].ticks)[:MOST_RANK_FILES]
        asked = {rank: offered[rank] for rank in behind}
        self._stacks = collect(asked, self._scratch / STACKS)
        for cells in self._cells:
            cells[WAITED] = 0

    def culprit(self) -> Position:
        """The rank that the others wait for: the one furthest behind.

        All ranks go through the same phases, so their number is a clock. Of ranks that are equally
        far, as in fsdp's forward, it is one that is not inside of a collective.
        """
        seen = self._seen or self.positions()
        able = [each for each in seen if not each.waited] or seen
        least = min(each.ticks for each in able)
        behind = [each for each in able if each.ticks == least]
        return next((each for each in behind if not self._waits(each.rank)), behind[0])

    def hang(self) -> ErrorRecord:
        """The error of a run whose time without progress is up."""
        text = f"no rank made progress for {self._limit_s:g} s (watchdog_s={self._limit_s:g})"
        return self.located(ErrorRecord("hang", "Watchdog", text))

    def located(self, error: ErrorRecord) -> ErrorRecord:
        """The same error, with the place that it comes from and the stacks of all ranks."""
        found = self.culprit()
        text = self._stacks.get(found.rank, "")
        frames = _place(text)
        users = [frame for frame in frames if is_user(frame.file)]
        at = f", at {(users or frames)[0]}" if frames else ""
        others = [each for each in self._seen if each.rank != found.rank]
        return replace(
            error,
            message=f"rank {found.rank} hangs in {_where(found)}{at}{_rest(others)}: "
            f"{error.message}",
            rank=found.rank,
            step=found.step,
            phase=found.phase,
            during=found.during,
            traceback=text or error.traceback,
            user_frames="".join(frame.shown() for frame in reversed(users)) or None,
            stacks={str(rank): text for rank, text in sorted(self._stacks.items())} or None,
        )

    def _waits(self, rank: int) -> bool:
        found = threads(self._stacks.get(rank, ""))
        innermost = found[0][0].file if found and found[0] else ""
        return any(sign in innermost for sign in _WAITING)


def _place(text: str) -> list[Frame]:
    """The frames that tell most: those of a thread with user code, the main thread's first."""
    found = threads(text)
    telling = (frames for frames in found if any(is_user(frame.file) for frame in frames))
    return next(telling, found[0] if found else [])


def _where(place: Position) -> str:
    step = "" if place.step is None else f" of step {place.step}"
    return f"{place.phase}{step}{f' of {place.during}' if place.during else ''}"


def _rest(others: Sequence[Position]) -> str:
    if not others:
        return ""
    told = [f"rank {each.rank} is in {_where(each)}" for each in others[:MOST_TOLD]]
    more = len(others) - len(told)
    return f" ({', '.join(told)}{f' and {more} more' if more else ''})"
