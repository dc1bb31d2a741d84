"""The communication of steps whose every mark the test sets: whole seconds of one clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from builders import FakeComm, ListSink, TickClock, make_plan_for, together
from fakeevents import Event, waits

from dpexp import timing
from dpexp.comm import Comm
from dpexp.comm_recorder import TIMELINE_STEPS, CommRecorder, StepComm
from dpexp.comm_times import Steps
from dpexp.parallel.collectives import Collective, CollectiveLog
from dpexp.recorder import Recorder
from dpexp.rows import Row, phase_spans

# Begin, then the ends of data, transfer, forward, backward, optimizer and other.
MARKS = [0, 1, 2, 10, 30, 32, 33]
Bucket = tuple[float, float]


def buckets(*spans: Bucket, num_bytes: int = 600, backward: bool = True) -> list[Collective]:
    """All-reduces of two ranks, where a ring moves as many bytes as there are."""
    return [
        Collective("all_reduce", num_bytes, float(num_bytes), backward, ready, end)
        for ready, end in spans
    ]


def steps(*collectives: list[Collective], first: int = 0, warmup: int = 0) -> Steps:
    """Steps that all have the same marks."""
    marks = [MARKS] * len(collectives)
    spans = TickClock().spans(marks)
    numbers = list(range(first, first + len(collectives)))
    measured = np.array([number >= warmup for number in numbers])
    return Steps(numbers, marks, spans, measured, collectives)


def recorder(comm: Comm | None = None) -> CommRecorder:
    return CommRecorder(comm or FakeComm(), TickClock())


def meeting(
    per_rank: list[Steps], *, offsets_s: list[float] | None = None
) -> list[tuple[StepComm, CommRecorder]]:
    """What each rank finds of its steps when all compare them."""

    def rank(comm: Comm) -> tuple[StepComm, CommRecorder]:
        own = recorder(comm)
        return own.account(per_rank[comm.rank], together=True)[0], own

    return together(len(per_rank), rank, offsets_s)


def test_times_are_sent_once_a_flush_and_once_more_where_a_rank_has_more_than_ever() -> None:
    one, two = steps(buckets((12, 16))), steps(buckets((12, 16), (25, 29)))

    def rank(comm: Comm) -> tuple[list[int], list[float], StepComm]:
        sent: list[int] = []
        highest = comm.highest
        comm.highest = lambda values: (sent.append(len(values)), highest(values))[1]  # type: ignore[method-assign]
        own = recorder(comm)
        found, beside = own.account(
            two if comm.rank else one, together=True, beside=[comm.rank, -comm.rank]
        )
        own.account(one, together=True)
        return sent, beside, found

    (first, second) = together(2, rank)
    # Of a step: ready and comes of each collective, two more meetings; then how many there are.
    assert first[0] == second[0] == [4 + 1 + 2, 6 + 1 + 2, 6 + 1]
    assert first[1] == second[1] == [1, 0]
    assert (first[2].exposed_s, second[2].exposed_s) == ([4], [4])  # 12 to 16, 25 to 29


# One rank


def test_a_single_rank_has_exposed_and_overlapped_time_and_nobody_to_wait_for() -> None:
    own = recorder()
    got = own.account(steps(buckets((12, 16), (25, 29))), together=True)[0]
    assert (got.exposed_s, got.overlapped_s, got.waiting_s) == ([4], [4], [None])
    assert (got.arrival_s, got.num_bytes) == ([12], [1200])
    assert got.bus_bytes_per_s == [1200 / 8]
    summary = own.summary()
    assert summary["straggler_wait_mean_s"] is None
    assert summary["waiting_backward_mean_s"] is None
    assert (summary["comm_exposed_mean_s"], summary["exposed_backward_mean_s"]) == (4, 4)
    assert summary["stragglers"] is None
    assert set(own.timing()) == {"comm_exposed", "comm_overlapped"}


def test_a_step_without_a_collective_costs_nothing_and_has_no_arrival() -> None:
    got = recorder().account(steps([], buckets((25, 29))), together=True)[0]
    assert (got.exposed_s, got.overlapped_s, got.num_bytes) == ([0, 4], [0, 0], [0, 600])
    assert got.arrival_s == [None, 25]
    assert got.bus_bytes_per_s == [None, 150]


def test_steps_none_of_which_has_a_collective() -> None:
    own = recorder()
    got = own.account(steps([], []), together=True)[0]
    assert (got.exposed_s, got.num_bytes, got.bus_bytes_per_s) == ([0, 0], [0, 0], [None, None])
    assert own.summary()["bus_gb_per_s"] is None


def test_before_the_first_step_nothing_is_known() -> None:
    summary = recorder().summary()
    assert summary["bytes_per_step"] is None
    assert summary["comm_exposed_mean_s"] is None
    assert summary["bus_gb_per_s"] is None
    assert summary["timeline"] == []


def test_means_are_over_measured_steps_of_all_flushes() -> None:
    own = recorder()
    own.account(steps(buckets((20, 29)), buckets((25, 26)), warmup=1), together=True)
    own.account(steps(buckets((25, 28)), first=2), together=True)
    summary = own.summary()
    assert summary["comm_exposed_mean_s"] == 2  # of 1 and 3 s; 9 s were warm-up
    assert (summary["bytes_per_step"], summary["collectives_per_step"]) == (600, 1)
    assert summary["bus_gb_per_s"] == pytest.approx(1200 / 4 / 1e9)
    exposed = own.timing()["comm_exposed"]
    assert (exposed.mean_s, exposed.min_s, exposed.max_s, exposed.count) == (2, 1, 3, 2)


# Several ranks, buckets


def test_who_came_first_waits_and_who_came_last_does_not() -> None:
    early = steps(buckets((12, 16), (20, 29)))
    late = steps(buckets((14, 16), (26, 29)))
    (first, _), (second, _) = meeting([early, late])
    # From 20 on the first rank only waits: until 26 for the other one, until 29 for the network.
    assert (first.exposed_s, first.waiting_s, first.overlapped_s) == ([3], [6], [2])
    assert (second.exposed_s, second.waiting_s, second.overlapped_s) == ([3], [0], [2])
    # All ranks are there from 14 to 16 and from 26 to 29.
    assert first.bus_bytes_per_s == second.bus_bytes_per_s == [1200 / 5]
    assert (first.arrival_s, second.arrival_s) == ([12], [14])


def test_ranks_may_have_different_numbers_of_collectives() -> None:
    many, few = steps(buckets((12, 16), (20, 29))), steps(buckets((14, 16)))
    (first, _), (second, _) = meeting([many, few])
    assert (first.exposed_s, first.waiting_s) == ([9], [0])
    assert (second.exposed_s, second.waiting_s) == ([2], [0])


@pytest.mark.parametrize("ahead_s", [-1000.0, 40.0])
def test_the_clocks_of_other_hosts_are_taken_into_account(ahead_s: float) -> None:
    early, late = steps(buckets((20, 29))), buckets((26 + ahead_s, 29 + ahead_s))
    moved = replace(steps(late), marks=[[mark + ahead_s for mark in MARKS]])
    (first, _), (second, own) = meeting([early, moved], offsets_s=[0.0, ahead_s])
    assert (first.exposed_s, first.waiting_s) == ([3], [6])
    assert (second.exposed_s, second.waiting_s, second.arrival_s) == ([3], [0], [26])
    (drawn,) = own.summary()["timeline"]
    assert drawn["begin_s"] == 0  # on rank 0's clock
    assert drawn["collectives"] == [
        {
            "kind": "all_reduce", "num_bytes": 600, "ready_s": 26, "start_s": 26, "end_s": 29,
            "stall_s": 0,
        }
    ]  # fmt: skip


def test_rank_zero_hears_of_who_is_late_when_it_would_know_twice_as_much_and_at_the_end() -> None:
    early, late = steps(buckets((12, 16))), steps(buckets((14, 16)))

    def rank(comm: Comm) -> tuple[list[int], CommRecorder]:
        told: list[int] = []
        collect = comm.collect
        comm.collect = lambda values: (told.append(len(values) - 6), collect(values))[1]  # type: ignore[method-assign]
        own = recorder(comm)
        for _ in range(7):
            own.account(late if comm.rank else early, together=True)
        own.finish()
        own.finish()  # there is nothing left
        return told, own

    (first, second) = together(2, rank)
    assert first[0] == second[0] == [1, 1, 2, 3]  # steps; beside them the sums of six legs
    found = first[1].summary()["stragglers"]
    assert found["steps"] == 7
    assert [each["late_mean_s"] for each in found["ranks"]] == [-1, 1]
    assert found["ranks"][1]["excess_mean_s"]["backward"] == 2


def test_the_late_rank_is_named_by_rank_zero_with_its_phase() -> None:
    count = 6
    early = steps(*[buckets((20, 29))] * count)
    # The marks are the same, and so is the end of backward at 30; rank 1 computes 6 s more in it.
    late = steps(*[buckets((26 + 0.01 * step, 29)) for step in range(count)])
    (_, first), (_, second) = meeting([early, late])
    found = first.summary()["stragglers"]
    assert (found["rank"], found["phase"], found["steps"]) == (1, "backward", count)
    assert second.summary()["stragglers"] is None
    one = found["ranks"][1]
    assert one["excess_mean_s"]["backward"] == pytest.approx(6.025)
    assert one["excess_mean_s"]["forward"] == 0
    assert one["others_wait_mean_s"] == pytest.approx(6.025)
    assert one["late_mean_s"] == pytest.approx(6.025 / 2)


@pytest.mark.parametrize(("error_s", "named"), [(2.9, 1), (3.1, None)])
def test_a_difference_that_the_clocks_may_have_made_names_nobody(
    error_s: float, named: int | None
) -> None:
    late = steps(*[buckets((26 + 0.01 * step, 29)) for step in range(6)])
    both = [steps(*[buckets((20, 29))] * 6), late]

    def rank(comm: Comm) -> dict[str, Any]:
        own = recorder(comm)
        own.account(both[comm.rank], together=True)
        return own.summary()

    first, _ = together(2, rank, error_s=error_s)
    assert first["stragglers"]["rank"] == named
    assert first["clock_error_s"] == error_s


def test_warm_up_steps_name_nobody() -> None:
    early = steps(*[buckets((20, 29))] * 6, warmup=6)
    late = steps(*[buckets((26, 29))] * 6, warmup=6)
    (_, first), _ = meeting([early, late])
    assert first.summary()["stragglers"] is None


def test_a_rank_that_updates_slowly_is_late_in_the_next_step() -> None:
    """Its optimizer and what follows belong to the way to the next meeting."""
    count = 8
    quick = steps(*[buckets((20, 29))] * count)
    # Each step but the first begins 5 s late, since the optimizer of the one before took 5 s more.
    begun = [0.0, *[5 + 0.01 * step for step in range(count - 1)]]
    marks = [[*(mark + late for mark in MARKS[:4]), 30, 37, 38] for late in begun]
    slow = Steps(
        quick.numbers,
        marks,
        TickClock().spans(marks),
        quick.measured,
        [buckets((20 + late, 29)) for late in begun],
    )
    (_, first), _ = meeting([quick, slow])
    found = first.summary()["stragglers"]
    assert (found["rank"], found["phase"]) == (1, "optimizer")
    # 5 s in each step but the first, before which the ranks had met.
    excess = found["ranks"][1]["excess_mean_s"]
    assert excess["optimizer"] == pytest.approx(5 * 7 / 8)
    assert excess["forward"] == pytest.approx(0)
    assert excess["backward"] == pytest.approx(0)


def test_steps_written_in_an_emergency_are_not_compared() -> None:
    """The other ranks may be gone: nobody knows what of a wait was for them."""
    own = recorder(FakeComm(0, 2))
    got = own.account(steps(buckets((12, 16), (25, 29))), together=False)[0]
    assert (got.exposed_s, got.waiting_s, got.bus_bytes_per_s) == ([None], [None], [None])
    assert (got.overlapped_s, got.num_bytes, got.arrival_s) == ([None], [1200], [12])
    summary = own.summary()
    assert summary["comm_exposed_mean_s"] is None
    assert summary["straggler_wait_mean_s"] is None
    assert (summary["comm_overlapped_mean_s"], summary["bytes_per_step"]) == (None, 1200)
    assert summary["bus_gb_per_s"] is None
    assert summary["stragglers"] is None


def test_an_emergency_does_not_change_the_means_of_what_was_compared() -> None:
    def rank(comm: Comm) -> dict[str, Any]:
        own = recorder(comm)
        own.account(steps(buckets((20 + 6 * comm.rank, 29))), together=True)
        own.account(steps(buckets((20, 30)), first=1), together=False)
        return own.summary()

    first, second = together(2, rank)
    assert (first["comm_exposed_mean_s"], first["straggler_wait_mean_s"]) == (3, 6)
    assert (second["comm_exposed_mean_s"], second["straggler_wait_mean_s"]) == (3, 0)
    assert (first["bytes_per_step"], first["bus_gb_per_s"]) == (600, pytest.approx(200e-9))


# Blocking collectives


def gathers() -> list[Collective]:
    """A gather of 3 s in forward, one of 2 s and a scattering of 4 s in backward."""
    return [
        Collective("all_gather", 400, 200.0, False, 3, 6, True),
        Collective("all_gather", 400, 200.0, True, 12, 14, True),
        Collective("reduce_scatter", 800, 400.0, True, 24, 28, True),
    ]


def test_blocking_collectives_are_told_apart_by_phase() -> None:
    own = recorder()
    got = own.account(steps(gathers()), together=True)[0]
    assert (got.exposed_s, got.overlapped_s, got.num_bytes) == ([9], [0], [1600])
    assert got.bus_bytes_per_s == [pytest.approx(800 / 9)]
    summary = own.summary()
    assert summary["comm_exposed_mean_s"] == 9
    assert summary["exposed_backward_mean_s"] == 6
    assert summary["collectives_per_step"] == 3


def moved(entries: list[Collective], *ready: float) -> list[Collective]:
    return [replace(each, ready=at) for each, at in zip(entries, ready, strict=True)]


def test_at_each_blocking_collective_the_early_rank_waits_for_the_late_one() -> None:
    early = steps(moved(gathers(), 3, 12, 24))
    late = steps(moved(gathers(), 5, 12, 27))
    (first, one), (second, _) = meeting([early, late])
    assert (first.waiting_s, first.exposed_s) == ([2 + 0 + 3], [1 + 2 + 1])
    assert (second.waiting_s, second.exposed_s) == ([0], [1 + 2 + 1])
    assert one.summary()["waiting_backward_mean_s"] == 3
    assert one.summary()["exposed_backward_mean_s"] == 3


def test_of_blocking_collectives_lateness_adds_up_over_the_meetings_of_a_step() -> None:
    count = 6
    early = steps(*[gathers()] * count)
    late = steps(*[moved(gathers(), 5, 12, 27 + 0.01 * step) for step in range(count)])
    (_, first), _ = meeting([early, late])
    found = first.summary()["stragglers"]
    # Without its waits rank 1 computed 2 s more in forward and 3 s more in backward.
    assert (found["rank"], found["phase"]) == (1, "backward")
    assert found["ranks"][1]["excess_mean_s"]["backward"] == pytest.approx(3.025)
    assert found["ranks"][1]["excess_mean_s"]["forward"] == pytest.approx(2)
    assert found["ranks"][1]["others_wait_mean_s"] == pytest.approx(5.025)


# Both kinds in one step


def both_kinds(broadcast: float, bucket: float) -> list[Collective]:
    """Buffers sent before forward until 6, then buckets of which the last is done at 29."""
    sent = Collective("broadcast", 32, 32.0, False, broadcast, 6, True)
    return [sent, *buckets((12, 16), (bucket, 29))]


def test_what_blocks_before_forward_and_what_runs_beside_backward_add_up() -> None:
    early, late = steps(both_kinds(3, 20)), steps(both_kinds(5, 26))
    (first, one), (second, two) = meeting([early, late])
    # For the buffers 2 s for the other rank and 1 s for the transport; then as for buckets alone.
    assert (first.waiting_s, first.exposed_s, first.overlapped_s) == ([2 + 6], [1 + 3], [4])
    assert (second.waiting_s, second.exposed_s, second.overlapped_s) == ([0], [1 + 3], [4])
    assert (first.arrival_s, first.num_bytes) == ([3], [1232])
    # All ranks are there from 5 to 6, from 12 to 16 and from 26 to 29.
    assert first.bus_bytes_per_s == [1232 / 8]
    for summary, waited in ((one.summary(), 6), (two.summary(), 0)):
        assert summary["waiting_backward_mean_s"] == waited
        assert summary["exposed_backward_mean_s"] == 3
        assert summary["comm_exposed_mean_s"] == 4
        assert summary["collectives_per_step"] == 3


def test_a_rank_late_for_the_buffers_is_late_by_its_data_and_not_by_its_backward() -> None:
    """After the buffers have been sent both ranks go on together."""
    count = 6
    begun = [0.01 * step for step in range(count)]
    early = steps(*[both_kinds(3, 26)] * count)
    marks = [[0, 1 + 2 + late, 2 + 2 + late, 10, 30, 32, 33] for late in begun]
    late_one = Steps(
        early.numbers,
        marks,
        TickClock().spans(marks),
        early.measured,
        [both_kinds(5 + late, 26) for late in begun],
    )
    (first, own), _ = meeting([early, late_one])
    assert first.waiting_s == pytest.approx([2 + late for late in begun])
    found = own.summary()["stragglers"]
    assert (found["rank"], found["phase"], found["reason"]) == (1, "data", "")
    assert found["ranks"][1]["excess_mean_s"]["data"] == pytest.approx(2.025)
    assert found["ranks"][1]["excess_mean_s"]["forward"] == pytest.approx(0)
    assert found["ranks"][1]["excess_mean_s"]["backward"] == pytest.approx(0)


# The timeline


def test_the_timeline_has_the_first_measured_steps_only() -> None:
    own = recorder()
    many = [buckets((25, 29))] * (TIMELINE_STEPS + 5)
    own.account(steps(*many, warmup=2), together=True)
    own.account(steps(*many, first=100), together=True)
    drawn = own.summary()["timeline"]
    assert [each["step"] for each in drawn] == list(range(2, 2 + TIMELINE_STEPS))
    assert drawn[0]["phases_s"] == [1, 1, 8, 20, 2, 1]


def test_micro_batches_are_one_step() -> None:
    """Only the last of them exchanges; its backward ends before the optimizer."""
    marks = [0, 1, 2, 6, 10, 20, 30, 32, 33]

    class Row:
        def __init__(self) -> None:
            self.marks = marks

    rows: Any = [Row()]
    spans = phase_spans(rows, TickClock(), 2)
    assert spans.tolist() == [[1, 1, 4 + 10, 4 + 10, 2, 1]]
    one: Callable[[float], Steps] = lambda ready: Steps(  # noqa: E731
        [0], [marks], spans, np.array([True]), [buckets((ready, 29))]
    )
    (first, _), (second, _) = meeting([one(22), one(26)])
    assert (first.exposed_s, first.waiting_s) == ([3], [4])
    assert (second.exposed_s, second.waiting_s) == ([3], [0])


# On a device


def device_step(clock: timing.EventClock, number: int) -> Row:
    """Marks every 5 ms: buckets from 25 to 35 and from 30 to 40 ms, backward until 45."""
    marks = [clock.mark() for _ in range(4)]
    log = CollectiveLog(clock, 2, blocking=False)
    first, second = log.begin("all_reduce", 600), log.begin("all_reduce", 600)
    log.done(first)
    log.done(second)
    marks += [clock.mark() for _ in range(3)]
    return Row(number, 0, 30, 30, marks, (), None, None, 0, tuple(log.noted))


def test_a_devices_events_give_the_same_figures_and_are_waited_for_once_a_flush(
    events: list[Event],
) -> None:
    clock, sink, comm = timing.EventClock(torch.device("meta")), ListSink(), FakeComm()
    plan = make_plan_for(warmup_steps=0)
    whole = Recorder(plan, comm, clock, [sink], 1.0, CommRecorder(comm, clock))
    for flush in range(2):
        for step in range(3):
            whole.add(device_step(clock, 3 * flush + step))
        assert waits(events) == 2 * flush
        whole.flush()
        assert waits(events) == 2 * flush + 2  # for the last mark, and for the anchor after it
    assert len(sink.records) == 6
    for record in sink.records:
        assert record.backward_s == pytest.approx(0.025)
        assert record.comm_exposed_s == pytest.approx(0.010)
        assert record.comm_overlapped_s == pytest.approx(0.005)
        assert record.comm_arrival_s == pytest.approx(0.020)
        assert record.comm_bytes == 1200
        assert record.bus_bytes_per_s == pytest.approx(1200 / 0.015)
    (drawn, *_) = whole.comm_summary()["timeline"]  # type: ignore[index]
    spans = [each["end_s"] - each["ready_s"] for each in drawn["collectives"]]
    assert spans == pytest.approx([0.010, 0.010])
    assert drawn["collectives"][0]["ready_s"] - drawn["begin_s"] == pytest.approx(0.020)
