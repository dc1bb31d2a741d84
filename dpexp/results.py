"""From what the ranks report to the result of a run. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dpexp.check_measuring import injected
from dpexp.config import to_plain
from dpexp.hosts import host_of
from dpexp.plan import RunPlan
from dpexp.records import PHASES, ErrorRecord, RankResult, RunResult


def assemble(plan: RunPlan, environment: dict[str, Any], ranks: list[RankResult]) -> RunResult:
    """The result of a run whose ranks all came to their end.

    Throughput is the number of distinct samples over all ranks divided by the wall time of the
    slowest rank; the timing is that rank's too, since the others waited for it.
    """
    slowest = max(ranks, key=lambda rank: rank.wall_s)
    first = ranks[0]
    samples_per_s = first.measured_global_rows / slowest.wall_s if slowest.wall_s > 0 else None
    return RunResult(
        status="ok",
        **facts_of(plan, environment),
        steps={
            "measured": first.measured_steps,
            "warmup": first.steps - first.measured_steps,
        },
        # Under ddp each row is counted by the one rank that owns it, under dp by rank 0.
        samples_seen=sum(rank.rows_seen for rank in ranks),
        timing=slowest.timing,
        timing_rank=slowest.rank,
        throughput={
            "samples_per_s": samples_per_s,
            "samples_per_s_per_device": samples_per_s and samples_per_s / plan.num_devices,
            "samples_measured": first.measured_global_rows,
            "wall_s": slowest.wall_s,
        },
        memory={
            "peak_bytes": [rank.peak_bytes for rank in ranks],
            "peak_bytes_scope": "resident memory of each rank's process, since "
            + ("the parity check" if plan.parity_steps else "it started"),
            "peak_device_bytes": {k: v for rank in ranks for k, v in rank.peak_device_bytes.items()}
            or None,
        },
        loss=dict(zip(("first", "last"), first.losses, strict=True))
        if first.losses[0] is not None
        else None,
        metric=first.metric,
        model=first.model,
        uncertainty=first.uncertainty,
        **_comm_of(ranks),
        parity=first.parity,
        compute=first.compute,
        energy=first.energy,
        machine=first.machine,
        checkpoint=_checkpoint_of(ranks),
        ranks=[_rank_facts(rank) for rank in ranks],
        notes=list(
            dict.fromkeys(
                [*plan.notes, *(n for rank in ranks for n in rank.notes), *_one_bucket(plan, first)]
            )
        ),
    )


def _one_bucket(plan: RunPlan, rank: RankResult) -> list[str]:
    """A note where DDP has nothing that could travel while backward goes on."""
    comm = rank.comm or {}
    cap: Any = plan.config.parallel.bucket_cap_mb
    if cap is None or comm.get("collectives_per_step") != 1 or comm["bytes_per_step"] < 2**20:
        return []
    return [
        f"all gradients travel in one bucket (parallel.bucket_cap_mb={cap}), so nothing of them "
        "can travel while backward goes on; try a smaller one"
    ]


def _checkpoint_of(ranks: list[RankResult]) -> dict[str, Any] | None:
    """What rank 0 says of the run's checkpoints; seconds are those of the slowest rank."""
    known = [rank.checkpoint for rank in ranks if rank.checkpoint is not None]
    if not known:
        return None
    slowest = {key: max(each[key] for each in known) for key in ("copy_s", "write_s")}
    return {**known[0], **slowest}


def _comm_of(ranks: list[RankResult]) -> dict[str, Any]:
    """What collectives cost, over the ranks: `comm` and `stragglers` of the result."""
    known = [rank.comm for rank in ranks if rank.comm is not None]
    if not known:
        return {"comm": None, "stragglers": None}
    first = known[0]
    shared = ("bytes_per_step", "collectives_per_step", "calibration")
    own = (
        "comm_exposed_mean_s",
        "comm_overlapped_mean_s",
        "straggler_wait_mean_s",
        "exposed_backward_mean_s",
        "waiting_backward_mean_s",
    )
    rates = [each["bus_gb_per_s"] for each in known if each["bus_gb_per_s"] is not None]
    stragglers = first["stragglers"]
    if stragglers is not None:
        errors = [each["clock_error_s"] for each in known]
        offsets = [each["clock_offset_s"] for each in known]
        stragglers = {**stragglers, "clock_offsets_s": offsets, "clock_error_s": max(errors)}
    comm = {
        **{key: first.get(key) for key in shared},
        # A rank that came early waits in a collective, so the fastest one's rate is the link's.
        "bus_gb_per_s": max(rates) if rates else None,
        "ranks": [
            {
                "rank": rank.rank,
                **{key: rank.comm[key] for key in own},
                "backward_without_exchange_s": (rank.comm.get("calibration") or {}).get(
                    "backward_without_exchange_s"
                ),
            }
            for rank in ranks
            if rank.comm is not None
        ],
    }
    return {"comm": comm, "stragglers": stragglers}


def ended_early(
    plan: RunPlan,
    environment: dict[str, Any],
    status: str,
    error: ErrorRecord,
    partial: list[RankResult],
) -> RunResult:
    """The result of a run that failed or was interrupted after it was planned.

    Args:
        partial: of the ranks that could still say what they had done. The figures are of the
            steps before the end; there is no throughput, which would pass for a result.
    """
    if not partial:
        facts = facts_of(plan, environment)
        return RunResult(status=status, **facts, error=error, notes=list(plan.notes))
    known = assemble(plan, environment, partial)
    return replace(known, status=status, error=error, throughput=None)


def restarted(result: RunResult, restarts: dict[str, Any] | None) -> RunResult:
    """The result of a run whose ranks have started again on the way to it, if they have."""
    if restarts is None:
        return result
    count = restarts["count"]
    note = (
        f"started again {count} time{'s' if count > 1 else ''} after a rank was lost: its "
        "timing is of the steps since then alone, and it is no measure of an undisturbed run"
    )
    return replace(result, restarts=restarts, notes=[*result.notes, note])


def placed(result: RunResult, hosts: Sequence[dict[str, Any]]) -> RunResult:
    """The result of a run that an outer launcher has started: which ranks were where."""
    ranks = [{**each, "host": host_of(hosts, each["rank"])} for each in result.ranks]
    stragglers = result.stragglers
    if stragglers is not None and stragglers.get("rank") is not None:
        stragglers = {**stragglers, "host": host_of(hosts, stragglers["rank"])}
    return replace(
        result,
        ranks=ranks if len(hosts) > 1 else result.ranks,
        stragglers=stragglers if len(hosts) > 1 else result.stragglers,
        hosts=list(hosts),
    )


def facts_of(plan: RunPlan, environment: dict[str, Any]) -> dict[str, Any]:
    """What is known of a run as soon as it is planned: fields of :class:`RunResult`."""
    return {
        "label": plan.label,
        "config": to_plain(plan.config),
        "environment": environment,
        "parallel": plan.strategy.value,
        "device": plan.device_of(plan.first_rank),
        "emulated": plan.emulated,
        "num_devices": plan.num_devices,
        "num_processes": plan.num_processes,
        "threads_per_process": plan.threads_per_process,
        "pinned": [list(cores) for cores in plan.pinned] or None,
        "claimed_devices": list(plan.claimed_devices) or None,
        "batch": {"global": plan.batch_rows, "per_device": plan.batch_rows_per_device},
        "scaling": plan.config.scaling.value,
        "repeat": plan.config.repeat,
        "injected": injected(plan.config, plan.num_devices, plan.num_processes),
    }


def _rank_facts(rank: RankResult) -> dict[str, Any]:
    kept = ("rank", "pid", "device", "threads", "steps", "rows_seen", "wall_s", "recording_s")
    return {
        **{key: getattr(rank, key) for key in kept},
        "step_p50_s": rank.timing["step"].p50_s,
        "phase_mean_s": {
            phase: summary.mean_s for phase, summary in rank.timing.items() if phase in PHASES
        },
    }
