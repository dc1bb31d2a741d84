"""What is said of two cells, and of two sides as a whole. Pure; works on plain run.json data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from dpexp.comparing import (
    NO_DIFFERENCE,
    NOT_COMPARABLE,
    Interval,
    Timed,
    lost_more_than,
    rate,
    ratio,
    verdict,
)
from dpexp.config import flat
from dpexp.pairing import IN_KIND, CellRuns, Differences, Pair
from dpexp.records import PHASES
from dpexp.report.intervals import samples_of
from dpexp.report.parity import parity_failed
from dpexp.report.trust import untrusted
from dpexp.texts import first_line

# Of the environment: no matter of speed, and another one in each job.
_NO_MATTER = ("variables.SLURM_JOB_ID",)
_MOST_KEYS = 6  # that a line names


class Gate(IntEnum):
    """The exit status under ``--max-regression``."""

    HOLDS = 0
    BROKEN = 1
    CANNOT_TELL = 2


@dataclass(frozen=True)
class Comparison:
    """One cell of A and of B."""

    cell: str
    verdict: str  # faster | slower | no measurable difference | not comparable
    reason: str | None  # why the two are not comparable
    remarks: tuple[str, ...]
    a: Interval | None  # samples/s over all devices
    b: Interval | None
    ratio: Interval | None  # B by A; with an interval if there are repeats on both sides
    fails: bool  # the cell ran well in A, and fails in B


def contrast(pair: Pair) -> Comparison | None:
    """Compare two cells; None where both sides skipped them: there is nothing in such a cell."""
    a, b = pair.a, pair.b
    if _all(a, "skipped") and _all(b, "skipped") and not pair.differing:
        return None
    own, other = _timed(a), _timed(b)
    reason = _reason(pair)
    found = Comparison(
        cell=a.name,
        verdict=NOT_COMPARABLE,
        reason=reason,
        remarks=(),
        a=rate(own) if own else None,
        b=rate(other) if other else None,
        ratio=None,
        fails=not pair.differing and _fails(a, b),
    )
    if reason is not None:
        return found
    remarks = _remarks(a, b)
    if min(len(own), len(other)) < 2:
        # What the steps within a run tell of its figure is kept back: see measurement.md.
        return replace(
            found,
            reason=f"one run {_where(len(own), len(other))}: a verdict needs repeats (repeats=5)",
            remarks=remarks,
            ratio=Interval(ratio(other, own).value),
        )
    said = verdict(other, own)
    if said != NO_DIFFERENCE:
        remarks = (*_moved_most(a, b, said), *remarks)
    return replace(found, verdict=said, remarks=remarks, ratio=ratio(other, own))


def gate(found: Sequence[Comparison], limit: float, gaps: Sequence[str]) -> tuple[Gate, list[str]]:
    """Whether no cell has lost more than `limit` of its rate.

    Args:
        limit: a share, such as 0.03.
        gaps: what of A could not be compared at all, a line each.

    Returns:
        The exit status, and a line for each cell or gap that decided it.
    """
    fallen, unknown = [], list(gaps)
    # What gave no figure in A has nothing to lose.
    counting = [each for each in found if each.a is not None or each.fails]
    for each in counting:
        if each.fails:
            fallen.append(f"{each.cell} fails in B")
        elif each.verdict == NOT_COMPARABLE or each.ratio is None:
            unknown.append(f"{each.cell} is {NOT_COMPARABLE}")
        else:
            lost = lost_more_than(limit, each.ratio)
            if lost is not False:
                (fallen if lost else unknown).append(f"{each.cell} {change(each.ratio)}")
    if fallen:
        return Gate.BROKEN, fallen
    if not counting:
        unknown.append("nothing in A has a partner in B")
    return (Gate.CANNOT_TELL, unknown) if unknown else (Gate.HOLDS, [])


def change(found: Interval) -> str:
    """A ratio as a change: ``-12.0 % (-14.1 to -9.8 %)``."""
    assert found.low is not None and found.high is not None
    value, low, high = (100 * (part - 1) for part in (found.value, found.low, found.high))
    return f"{value:+.1f} % ({low:+.1f} to {high:+.1f} %)"


def environment_differences(pairs: Sequence[Pair]) -> list[str]:
    """What the environments of the two sides have other values of, a text each.

    Only what both sides recorded.
    """
    sides = [
        [flat(run["environment"]) for cell in cells for run in cell.runs]
        for cells in ([pair.a for pair in pairs], [pair.b for pair in pairs])
    ]
    keys = {key for row in sides[0] for key in row} & {key for row in sides[1] for key in row}
    told = []
    for key in sorted(keys - set(_NO_MATTER)):
        # A cell that was refused early recorded less.
        a, b = ({str(row[key]) for row in rows if key in row} for rows in sides)
        if a != b:
            name = key.removeprefix("variables.")
            told.append(f"{name} {_listed(a)} → {_listed(b)}")
    return told


def _reason(pair: Pair) -> str | None:
    """Why two cells cannot be compared, whatever the number of their runs."""
    if pair.differing:
        return _told(pair.differing)
    for name, cell in (("A", pair.a), ("B", pair.b)):
        ok = [run for run in cell.runs if run["status"] == "ok"]
        if not ok:
            run = cell.runs[0]
            message = first_line((run["error"] or {}).get("message") or "")
            return f"{run['status']} in {name}" + (f": {message}" if message else "")
        broken = next((why for run in ok if (why := untrusted(run)) is not None), None)
        if broken is not None:
            return f"{broken} (in {name})"
        if not _timed(cell):
            return f"no step was measured in {name}"
    return None


def _told(differing: Differences) -> str:
    """The keys in which two cells differ: those that make them differ in kind first."""
    keys = sorted(differing, key=lambda key: (key not in IN_KIND, key))
    texts = [f"{key} {_text(differing[key][0])} → {_text(differing[key][1])}" for key in keys]
    more = len(texts) - _MOST_KEYS
    return ", ".join(texts[:_MOST_KEYS]) + (f" and {more} keys more" if more > 0 else "")


def _text(value: Any) -> str:
    plain = {True: "true", False: "false"}.get(value) if isinstance(value, bool) else None
    return plain or ("null" if value is None else str(value))


def _fails(a: CellRuns, b: CellRuns) -> bool:
    """Whether all of A's runs went well, and some of B's did not; who stopped one says nothing."""
    if not _all(a, "ok") or any(parity_failed(run) for run in a.runs):
        return False
    return any(run["status"] in ("failed", "skipped") or parity_failed(run) for run in b.runs)


def _remarks(a: CellRuns, b: CellRuns) -> tuple[str, ...]:
    """What else a reader of the figures should know."""
    remarks = []
    for name, cell in (("A", a), ("B", b)):
        well = sum(run["status"] == "ok" for run in cell.runs)
        if well < len(cell.runs):
            remarks.append(f"{well} of {len(cell.runs)} runs in {name} ended well")
        warned = sum(bool((run["machine"] or {}).get("warnings")) for run in cell.runs)
        if warned:
            remarks.append(
                f"{warned} of {len(cell.runs)} runs in {name} warn of the machine's state"
            )
        injected = dict.fromkeys(text for run in cell.runs for text in run["injected"])
        remarks += [f"injected in {name}: {text}" for text in injected]
    threads = [{str(run["threads_per_process"]) for run in cell.runs} for cell in (a, b)]
    if threads[0] != threads[1]:
        remarks.append(f"threads per process {_listed(threads[0])} → {_listed(threads[1])}")
    return tuple(remarks)


def _moved_most(a: CellRuns, b: CellRuns, said: str) -> tuple[str, ...]:
    """The phase whose mean moved most in the direction of the whole step."""
    own, other = _phases(a), _phases(b)
    sign = -1 if said == "faster" else 1
    moved = {phase: sign * (other[phase] - own[phase]) for phase in own if phase in other}
    phase = max(moved, key=lambda name: moved[name], default=None)
    if phase is None or moved[phase] <= 0:
        return ()
    return (f"most in {phase}: {own[phase] * 1e3:.4g} → {other[phase] * 1e3:.4g} ms a step",)


def _phases(cell: CellRuns) -> dict[str, float]:
    """Mean seconds of each phase over the runs; of each run, those of its slowest rank."""
    timings = [run["timing"] for run in cell.runs if run["status"] == "ok" and run["timing"]]
    means: dict[str, float] = {}
    for phase in PHASES:
        known = [timing[phase]["mean_s"] for timing in timings if phase in timing]
        if known and None not in known:
            means[phase] = sum(known) / len(known)
    return means


def _where(own: int, other: int) -> str:
    return "on each side" if own == other else ("in A" if own == 1 else "in B")


def _timed(cell: CellRuns) -> list[Timed]:
    return [timed for run in cell.runs if (timed := samples_of(run)) is not None]


def _all(cell: CellRuns, status: str) -> bool:
    return all(run["status"] == status for run in cell.runs)


def _listed(values: set[str]) -> str:
    return ", ".join(sorted(values))
