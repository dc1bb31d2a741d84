"""FLOPs of a step, the share of the machine's peak that they reach (MFU), and memory by part.

All of it is found after the last step: nothing here is in a step's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dpexp.comm import Comm
from dpexp.peak import measured_peak, peak_note
from dpexp.plan import RunPlan
from dpexp.records import RankResult

if TYPE_CHECKING:
    from dpexp.anatomy import Anatomy


def achieved_flops_per_s(
    flops_per_step: float, rows_per_step: int, rows: int, wall_s: float, devices: int
) -> float:
    """FLOP/s of the model that each device did over the measured steps.

    ``flops_per_step * (rows / rows_per_step) / (wall_s * devices)``: a step with fewer rows counts
    as the share of a full one.

    Args:
        rows_per_step: of the step that `flops_per_step` was counted for.
        rows: of all measured steps, over all devices.
        wall_s: of all measured steps, of the slowest rank.
    """
    return flops_per_step * rows / rows_per_step / (wall_s * devices)


def mfu(achieved: float, peak: float) -> float:
    """The share of a device's peak FLOP/s that the model's own FLOPs reach.

    Source: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B.
    What is computed a second time for activation checkpointing counts here too, unlike there.
    """
    return achieved / peak


def peak_of(plan: RunPlan, comm: Comm) -> tuple[float | None, str]:
    """FLOP/s of a device as the config gives it, else measured (then all ranks meet)."""
    given = plan.config.measure.peak_flops_per_device
    return measured_peak(plan, comm) if given is None else (given, "")


def compute_of(
    plan: RunPlan, ranks: Sequence[RankResult], peak: tuple[float | None, str], before_bytes: int
) -> dict[str, Any]:
    """``compute`` of ``run.json``. On rank 0 only, which nobody waits for then: it may take long.

    Args:
        ranks: the results of all ranks.
        peak: as of :func:`peak_of`.
        before_bytes: peak resident memory before dataset and model were built.
    """
    done, given = ranks[0], plan.config.measure.peak_flops_per_device
    source, note = ("measured", peak_note(plan)) if given is None else ("given", "")
    anatomy, problem = anatomy_of(plan)
    work = flops_facts(anatomy, problem)
    rates = rate_facts(
        work,
        rows_per_step=None if anatomy is None else anatomy.first.rows,
        rows=done.measured_global_rows,
        wall_s=max(rank.wall_s for rank in ranks),
        devices=plan.num_devices,
        peak=peak,
    )
    memory = memory_facts(anatomy, problem, done, before_bytes)
    return {**work, **rates, "peak_source": source, "peak_note": note, "memory_parts": memory}


def anatomy_of(plan: RunPlan) -> tuple[Anatomy | None, str]:
    """What follows from the plan without running it, or None and why not.

    Seeds torch, numpy and random, builds the dataset once more and reads the rows of two batches.
    """
    # Here, since only a run that counts needs torch's counter and its fake tensors.
    from dpexp.anatomy import dissect

    try:
        return dissect(plan), ""
    except Exception as error:  # noqa: BLE001  # the user's code may raise anything
        return None, f"{type(error).__name__}: {error}"


def flops_facts(anatomy: Anatomy | None, problem: str) -> dict[str, Any]:
    """The FLOPs of a full step over all devices; None with a reason where they are not known."""
    if anatomy is None:
        return {"flops_per_step": None, "flops_reason": problem, "flops_at_least": False}
    figure = anatomy.step_flops
    value, reason = figure.value, figure.note
    if not value:  # torch counts matrix products only: what has none is not known to be free
        value, reason = None, reason or "nothing in it that torch's counter counts"
    return {"flops_per_step": value, "flops_reason": reason, "flops_at_least": figure.at_least}


def rate_facts(
    work: dict[str, Any],
    *,
    rows_per_step: int | None,
    rows: int,
    wall_s: float,
    devices: int,
    peak: tuple[float | None, str],
) -> dict[str, Any]:
    """FLOP/s per device and the MFU, with the reasons why one is not known.

    Args:
        work: as of :func:`flops_facts`.
        peak: FLOP/s of a device, or None and why not.
    """
    flops, achieved, reason = work["flops_per_step"], None, ""
    if flops is None or not rows_per_step:
        reason = f"the FLOPs of a step are not known: {work['flops_reason']}"
    elif wall_s <= 0 or not rows:
        reason = "no step was measured"
    else:
        achieved = achieved_flops_per_s(flops, rows_per_step, rows, wall_s, devices)
    share = None
    if achieved is not None and peak[0] is not None:
        share = mfu(achieved, peak[0])
        reason = "at least: some FLOPs are not counted" if work["flops_at_least"] else ""
    elif achieved is not None:
        reason = f"the peak is not known: {peak[1]}"
    return {
        "achieved_flops_per_s_per_device": achieved,
        "peak_flops_per_s_per_device": peak[0],
        "mfu": share,
        "mfu_reason": reason,
    }


def memory_facts(
    anatomy: Anatomy | None, problem: str, done: RankResult, before_bytes: int
) -> dict[str, Any]:
    """Bytes by part as computed, beside what was measured in rank 0's process."""
    computed = None
    if anatomy is not None:
        computed = [
            {
                "where": memory.where,
                "parts": {name: asdict(figure) for name, figure in memory.parts.items()},
                "total": asdict(memory.total),
            }
            for memory in anatomy.memory
        ]
    return {
        "computed": computed,
        "computed_reason": problem,
        "measured": {
            "peak_bytes": done.peak_bytes,
            "peak_bytes_before_building": before_bytes,
            "peak_bytes_scope": "resident memory of rank 0's process; before building: with "
            "Python and torch loaded, without dataset and model",
            "peak_device_bytes": done.peak_device_bytes or None,
        },
    }
