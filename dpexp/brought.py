"""What rank 0 gets of the other ranks' results."""

from __future__ import annotations

from dataclasses import replace

from dpexp.comm import Comm
from dpexp.plan import MOST_RANK_FILES, RunPlan
from dpexp.records import RankResult


def gather_results(own: RankResult, plan: RunPlan, comm: Comm) -> list[RankResult] | None:
    """Every rank's result, in rank order, on rank 0; None elsewhere. Waits for all.

    What is the same on all ranks comes from rank 0 alone. Of very many ranks only some bring their
    part of the timeline: nobody looks at a thousand tracks, and no viewer opens them.
    """
    if comm.rank:
        own = replace(own, model={})
    if plan.by_host:
        found = ((own.comm or {}).get("stragglers") or {}).get("rank")
        slowest = int(comm.max(-1 if found is None else found))  # only rank 0 knows it
        if own.comm is not None and comm.rank not in drawn_ranks(comm.world_size, slowest):
            own = replace(own, comm={**own.comm, "timeline": []})
    return comm.gather(own)


def drawn_ranks(ranks: int, slowest: int) -> set[int]:
    """The ranks in the timeline of very many: some at equal distances, and the slowest.

    Args:
        slowest: the one that the others wait for; -1 = none.
    """
    return {place * ranks // MOST_RANK_FILES for place in range(MOST_RANK_FILES)} | {slowest}
