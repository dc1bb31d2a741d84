"""What of the ranks' results goes to rank 0."""

from __future__ import annotations

from typing import Any

from builders import make_plan_for, make_rank_result, together

from dpexp.brought import drawn_ranks, gather_results
from dpexp.comm import Comm
from dpexp.plan import RunPlan
from dpexp.records import RankResult


def gathered(plan: RunPlan, slowest: int | None) -> list[RankResult]:
    """What rank 0 gets of ranks that each have a timeline of one step."""

    def rank(comm: Comm) -> list[RankResult] | None:
        comm_summary: dict[str, Any] = {"timeline": [{"step": 7}], "stragglers": None}
        if comm.rank == 0:
            comm_summary["stragglers"] = {"rank": slowest}
        own = make_rank_result(comm.rank, comm=comm_summary)
        return gather_results(own, plan, comm)

    first, *others = together(plan.num_processes, rank)
    assert others == [None] * (plan.num_processes - 1)
    assert first is not None
    return first


def test_up_to_64_ranks_all_bring_their_timeline_and_rank_0_the_model() -> None:
    results = gathered(make_plan_for("ddp", 3), slowest=None)
    assert [each.rank for each in results] == [0, 1, 2]
    assert [each.model for each in results] == [{"parameters": 12}, {}, {}]
    assert all(each.comm and each.comm["timeline"] for each in results)


def test_of_more_some_at_equal_distances_and_the_slowest_bring_it() -> None:
    results = gathered(make_plan_for("ddp", 70, batch_size=70), slowest=11)
    drawn = {each.rank for each in results if each.comm and each.comm["timeline"]}
    assert drawn == drawn_ranks(70, 11)
    assert len(drawn) == 65
    assert 11 in drawn
    assert 11 not in drawn_ranks(70, -1)


def test_the_timeline_of_1024_ranks_has_every_16th() -> None:
    assert drawn_ranks(1024, -1) == {*range(0, 1024, 16), -1}
