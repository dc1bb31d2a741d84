"""Where the efficiency of a cell went: parts that add up to the loss. Pure; on run.json data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpexp.records import PHASES

# In the order of a step; the last one is what the others do not explain.
WAITING = "waiting_for_the_slowest_rank"
PARTS = (
    "data",
    "transfer",
    "forward",
    "backward",
    "exposed_communication",
    WAITING,
    "optimizer",
    "overhead",
    "residual",
)
# The calibration's batch is taken for a usual one if its rows are those of a mean step but for this
# share.
ROWS_APART = 0.1


@dataclass(frozen=True)
class Waterfall:
    """From a baseline to a cell: `loss_s` = `step_s` - `ideal_s` = the sum of `parts_s`."""

    baseline_step_s: float
    ideal_s: float  # of a step, if the devices divided the baseline's work without loss
    step_s: float
    loss_s: float
    parts_s: dict[str, float]  # by PARTS; negative where the cell is better than ideal
    rank: int  # whose phases these are: the one that waited most for others

    @property
    def largest(self) -> str:
        """The part that costs most, the residual left aside."""
        return max((part for part in PARTS if part != "residual"), key=self.parts_s.__getitem__)

    def share(self, part: str) -> float:
        """What a part takes of the efficiency: the shares add up to 1 - efficiency."""
        return self.parts_s[part] / self.step_s


def shown(part: str) -> str:
    """A part's name in words."""
    return part.replace("_", " ")


def waterfall(
    runs: Sequence[dict[str, Any]], baselines: Sequence[dict[str, Any]]
) -> Waterfall | None:
    """The loss of a cell against its baseline, part by part; None without timings.

    A step of the ideal cell takes the baseline's time divided by how many times more devices there
    are (strong scaling), or just as long (weak scaling); and as much longer or shorter as its rows
    are more or fewer than that, where an epoch ends with a short batch. A part is what the cell
    spends on it minus what the ideal one would. They are seen from the rank that waited most for
    others: its own phases are not disturbed, and what another rank lost it sees as waiting.

    `forward` and `backward` are without communication. Overhead is the phase `other`; of emulated
    devices also what their backward takes above the ideal, since it runs in one thread. The
    residual is what no part explains: what backward takes above the calibration's steps without
    exchange, and is neither exposed nor waiting (filling buckets, computing beside a collective),
    and where the step of the slowest rank differs from the observer's.

    Args:
        runs: of one cell, its repeats; means over them are taken.
        baselines: of the baseline's cell.
    """
    found = [each for each in map(_explained, runs) if each is not None]
    base = [each for each in map(_explained, baselines) if each is not None]
    if not found or not base:
        return None
    divided = _divided(runs, baselines)
    own, before = mean_of(found), mean_of(base)
    ideal_s = before["step"] * divided
    loss_s = own["step"] - ideal_s
    parts = {part: own[part] - before[part] * divided for part in PARTS[:-1]}
    if runs[0].get("emulated") and runs[0]["num_devices"] > 1:  # one device is called directly
        parts["overhead"] += parts["backward"]
        parts["backward"] = 0.0
    parts["residual"] = loss_s - sum(parts.values())
    rank = _observer(runs[0])["rank"]
    return Waterfall(before["step"], ideal_s, own["step"], loss_s, parts, rank)


def _divided(runs: Sequence[dict[str, Any]], baselines: Sequence[dict[str, Any]]) -> float:
    """What part of the baseline's step an ideal step takes: it does each row as fast per device."""
    devices: float = runs[0]["num_devices"] / baselines[0]["num_devices"]
    rows, before = (
        [each for each in map(_rows_per_step, some) if each] for some in (runs, baselines)
    )
    if not rows or not before:  # cannot be told
        return 1 / devices if runs[0]["scaling"] == "strong" else 1.0
    return sum(rows) / len(rows) / (sum(before) / len(before)) / devices


def _rows_per_step(run: dict[str, Any]) -> float | None:
    """Of the measured steps, over all devices."""
    steps = (run.get("steps") or {}).get("measured")
    samples = (run.get("throughput") or {}).get("samples_measured")
    return samples / steps if samples and steps else None


def _observer(run: dict[str, Any]) -> dict[str, Any]:
    """The rank that waited most for others; rank 0 where nobody waited."""
    waited = {
        each["rank"]: each["straggler_wait_mean_s"] or 0.0
        for each in (run.get("comm") or {}).get("ranks", [])
    }
    ranks: list[dict[str, Any]] = run["ranks"]
    return max(ranks, key=lambda rank: waited.get(rank["rank"], 0.0))


def spent(run: dict[str, Any]) -> dict[str, float] | None:
    """Seconds of a mean step on each part but the residual, and on the whole ``step``, of one run.

    The phases are those of the rank that waited most for others, without communication; the step is
    that of the slowest rank. None where the run has no timings.
    """
    step_s = ((run.get("timing") or {}).get("step") or {}).get("mean_s")
    if step_s is None or not run.get("ranks"):
        return None
    observer = _observer(run)
    phases = observer.get("phase_mean_s") or {}
    if any(phases.get(phase) is None for phase in PHASES):
        return None
    comm = _communication(_own(run, observer["rank"]))
    return {
        "step": step_s,
        "data": phases["data"],
        "transfer": phases["transfer"],
        "forward": phases["forward"] - comm["exposed_forward"] - comm["waiting_forward"],
        "backward": phases["backward"] - comm["exposed_backward"] - comm["waiting_backward"],
        "exposed_communication": comm["exposed_forward"] + comm["exposed_backward"],
        WAITING: comm["waiting_forward"] + comm["waiting_backward"],
        "optimizer": phases["optimizer"],
        "overhead": phases["other"],
    }


def _explained(run: dict[str, Any]) -> dict[str, float] | None:
    """The same with the backward of steps without exchange, where the calibration tells it."""
    found = spent(run)
    if found is None:
        return None
    alone = _own(run, _observer(run)["rank"]).get("backward_without_exchange_s")
    calibration = (run.get("comm") or {}).get("calibration") or {}
    # Under FSDP such a step still gathers parameters. And of fewer rows it says nothing.
    if alone is None or run["parallel"] == "fsdp" or not _of_usual_rows(run, calibration):
        return found
    return {**found, "backward": alone}


def _of_usual_rows(run: dict[str, Any], calibration: dict[str, Any]) -> bool:
    """Whether the calibration's batch is as large as a mean step, and not an epoch's short last."""
    rows, usual = calibration.get("rows"), _rows_per_step(run)
    if not rows or not usual:
        return True  # cannot be told
    return bool(abs(rows / usual - 1) <= ROWS_APART)


def _own(run: dict[str, Any], rank: int) -> dict[str, Any]:
    """What a rank says of its communication; {} where there is none."""
    ranks: list[dict[str, Any]] = (run.get("comm") or {}).get("ranks", [])
    return next((each for each in ranks if each["rank"] == rank), {})


def _communication(own: dict[str, Any]) -> dict[str, float]:
    """Seconds of a mean step that a rank waited, by phase; 0 where there is no communication."""
    found = {}
    for kind, total in (("exposed", "comm_exposed"), ("waiting", "straggler_wait")):
        backward = own.get(f"{kind}_backward_mean_s") or 0.0
        found[f"{kind}_backward"] = backward
        found[f"{kind}_forward"] = (own.get(f"{total}_mean_s") or 0.0) - backward
    return found


def mean_of(entries: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each entry, over dicts with the same keys."""
    return {key: sum(each[key] for each in entries) / len(entries) for key in entries[0]}
