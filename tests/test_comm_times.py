"""Awaited collectives, FSDP's on streams: their stalls, and who came late. Whole seconds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from builders import FakeComm, ListSink, TickClock, make_plan_for, together
from fakeevents import Event, waits

from dpexp import timing
from dpexp.comm import Comm
from dpexp.comm_recorder import CommRecorder, StepComm
from dpexp.comm_times import Steps, lateness, times_of
from dpexp.parallel.collectives import Collective, CollectiveLog
from dpexp.recorder import Recorder
from dpexp.rows import Row
from dpexp.stragglers import LEGS

# Begin, then the ends of data, transfer, forward, backward, optimizer and other.
MARKS = (0, 1, 2, 20, 50, 52, 53)
# The computing stream stands still from 2 to 5 for the first gather, computes until 20 while the
# second is fetched, and in backward from 30 to 32 for the third; then it has two scatterings under
# way, of which it needs the first at 40, after its end, and waits for the second from 43 to 48.
AWAITED = (
    # kind, in backward, ready, end, needed
    ("all_gather", False, 2, 5, 2),
    ("all_gather", False, 5, 9, 12),
    ("all_gather", True, 22, 32, 30),
    ("reduce_scatter", True, 34, 39, 40),
    ("reduce_scatter", True, 42, 48, 43),
)
Entry = tuple[str, bool, float, float, float]


def noted(entries: tuple[Entry, ...]) -> list[Collective]:
    """Collectives of 100 bytes."""
    return [
        Collective(kind, 100, 50.0, backward, ready, end, False, needed)
        for kind, backward, ready, end, needed in entries
    ]


def steps(*collectives: list[Collective], marks: tuple[float, ...] = MARKS) -> Steps:
    rows = [list(marks)] * len(collectives)
    measured = np.ones(len(collectives), bool)
    numbers = list(range(len(collectives)))
    return Steps(numbers, rows, TickClock().spans(rows), measured, collectives)


def meeting(per_rank: list[Steps]) -> list[tuple[StepComm, dict[str, Any]]]:
    """What each rank finds when all compare their steps."""

    def rank(comm: Comm) -> tuple[StepComm, dict[str, Any]]:
        own = CommRecorder(comm, TickClock())
        return own.account(per_rank[comm.rank], together=True)[0], own.summary()

    return together(len(per_rank), rank)


def test_each_stall_counts_once_in_the_phase_in_which_it_lies() -> None:
    own = CommRecorder(FakeComm(), TickClock())
    got = own.account(steps(noted(AWAITED), []), together=True)[0]
    assert got.exposed_s == [3 + 2 + 5, 0]
    # Under way from 2 to 9, 22 to 32, 34 to 39 and 42 to 48.
    assert got.overlapped_s == [28 - 10, 0]
    assert got.bus_bytes_per_s == [250 / 28, None]
    assert got.arrival_s == [2, None]
    summary = own.summary()
    assert summary["exposed_backward_mean_s"] == (2 + 5) / 2
    stalls = [each["stall_s"] for each in summary["timeline"][0]["collectives"]]
    assert stalls == [3, 0, 2, 0, 5]


def test_what_is_done_long_before_it_is_needed_has_no_stall() -> None:
    hidden = tuple((kind, back, ready, end, end + 1) for kind, back, ready, end, _ in AWAITED)
    got = CommRecorder(FakeComm(), TickClock()).account(steps(noted(hidden)), together=True)[0]
    assert (got.exposed_s, got.overlapped_s) == ([0], [28])


# Rank 1 has 4 s more to compute in backward before its last scattering.
LATE = (*AWAITED[:4], ("reduce_scatter", True, 46, 48, 47))


def test_a_stall_for_a_late_rank_is_waiting_and_the_rest_is_exposed() -> None:
    (first, one), (second, _) = meeting([steps(noted(AWAITED)), steps(noted(LATE))])
    assert (first.waiting_s, first.exposed_s) == ([46 - 43], [3 + 2 + 2])
    assert (second.waiting_s, second.exposed_s) == ([0], [3 + 2 + 1])
    assert one["waiting_backward_mean_s"] == 3


def test_a_rank_that_computes_longer_is_late_and_named_with_its_phase() -> None:
    count = 6
    slow = [
        noted((*AWAITED[:4], ("reduce_scatter", True, 46 + 0.01 * step, 48, 47 + 0.01 * step)))
        for step in range(count)
    ]
    (_, first), _ = meeting([steps(*[noted(AWAITED)] * count), steps(*slow)])
    found = first["stragglers"]
    assert (found["rank"], found["phase"]) == (1, "backward")
    assert found["ranks"][1]["others_wait_mean_s"] == pytest.approx(4.025)
    # Of 30 s each rank stood still: 2 + 5 s, and 2 + 1 s less 0.01 s per step.
    assert found["ranks"][1]["excess_mean_s"]["backward"] == pytest.approx(4.025)
    assert set(found["ranks"][1]["excess_mean_s"]) == set(LEGS)


def test_lateness_that_a_stall_has_made_up_for_counts_once() -> None:
    """A rank 3 s late for the first gather is as late for all others until somebody waits."""
    early, late = (
        (("all_gather", False, 2, 9, 2), ("all_gather", False, 10, 14, 13)),
        (("all_gather", False, 5, 9, 5), ("all_gather", False, 10, 14, 13)),
    )
    own = [times_of(steps(noted(each)), 2, TickClock()) for each in (early, late)]
    worked = np.stack([times.worked() for times in own])
    # Ready for the second at 10: of that the early one had stood still for 7 s, the late one for 4.
    assert worked.tolist() == [[3], [6]]
    first = np.fmin.reduce([times.comes() for times in own], axis=0)
    assert [lateness(times.comes(), first).tolist() for times in own] == [[0], [3]]
    assert own[0].meetings() == 1


def test_steps_without_awaited_collectives_have_nothing_to_be_late_for() -> None:
    blocking = [Collective("all_gather", 4, 2.0, False, 3, 6, True)]
    bucket = [Collective("all_reduce", 4, 4.0, True, 24, 28)]
    times = times_of(steps(blocking, bucket), 1, TickClock())
    assert np.isnan(times.worked()).all()
    assert times.stalls().tolist() == [[0], [0]]
    assert times.stood().tolist() == [[3], [0]]
    assert times.meetings() == 2


# On a device


def test_events_on_several_streams_give_the_same_figures_and_are_waited_for_once_a_flush(
    events: list[Event],
) -> None:
    """The steps above, a millisecond for each second; marks come in the order of the host."""
    clock, sink, comm = timing.EventClock(torch.device("meta")), ListSink(), FakeComm()
    plan = make_plan_for(warmup_steps=0)
    whole = Recorder(plan, comm, clock, [sink], 1.0, CommRecorder(comm, clock))

    def event(at_ms: float) -> torch.Event:
        mark: Any = clock.mark()
        mark.at_ms = at_ms
        return mark  # type: ignore[no-any-return]

    for flush in range(2):
        log = CollectiveLog(clock, 2, blocking=False)
        marks = [event(at) for at in MARKS[:3]]
        for kind, backward, ready, end, needed in AWAITED:
            entry = log.begin(kind, 100)
            entry.in_backward = backward
            log.done(entry)
            log.needed([entry])
            entry.ready, entry.end, entry.needed = (event(at) for at in (ready, end, needed))
        marks += [event(at) for at in MARKS[3:]]
        whole.add(Row(flush, 0, 30, 30, marks, (), None, None, 0, tuple(log.noted)))
        assert waits(events) == 2 * flush
        whole.flush()
        assert waits(events) == 2 * flush + 2  # for the last mark, and for the anchor after it
    assert len(sink.records) == 2
    for record in sink.records:
        assert record.forward_s == pytest.approx(0.018)
        assert record.comm_exposed_s == pytest.approx(0.010)
        assert record.comm_overlapped_s == pytest.approx(0.018)
        assert record.bus_bytes_per_s == pytest.approx(250 / 0.028)
    (drawn, *_) = whole.comm_summary()["timeline"]  # type: ignore[index]
    stalls = [each["stall_s"] for each in drawn["collectives"]]
    assert stalls == pytest.approx([0.003, 0, 0.002, 0, 0.005], abs=1e-9)
