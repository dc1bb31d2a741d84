"""Clocks: the host's, and a device's through a stand-in for torch.Event."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from fakeevents import Event

from dpexp import timing
from dpexp.timing import EventClock, HostClock, make_clock

DEVICE = torch.device("meta")


@pytest.mark.parametrize(
    ("device", "kind"), [("cpu", HostClock), ("cuda:1", EventClock), ("xpu", EventClock)]
)
def test_only_a_cpu_is_timed_by_the_host(device: str, kind: type[Any]) -> None:
    assert type(make_clock(torch.device(device))) is kind


def test_host_marks_are_nanoseconds_and_spans_are_seconds() -> None:
    spans = HostClock().spans([[1_000, 1_500, 4_000_001_500], [7, 7, 8]])
    np.testing.assert_allclose(spans, [[5e-7, 4.0], [0.0, 1e-9]], rtol=0, atol=1e-15)


def test_host_spans_are_exact_however_long_the_machine_has_been_up() -> None:
    begin = 400 * 24 * 3600 * 10**9 + 1  # no float64 holds this to the nanosecond
    assert HostClock().spans([[begin, begin + 3]])[0, 0] == pytest.approx(3e-9, abs=1e-18)


def test_host_marks_lie_between_readings_of_the_same_counter() -> None:
    before = time.perf_counter_ns()
    mark = HostClock().mark()
    assert before <= mark <= time.perf_counter_ns()


def test_a_host_clock_has_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any) -> None:
        raise AssertionError("a CPU run touched an accelerator")

    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    monkeypatch.setattr(torch.accelerator, "synchronize", refuse)
    clock = HostClock()
    clock.mark()
    clock.settle()


def test_leaving_marks_never_synchronises(events: list[Event]) -> None:
    clock = EventClock(DEVICE)
    marks = [clock.mark() for _ in range(7)]
    assert marks == events
    assert [event.synchronized for event in events] == [0] * 7
    assert {event.device for event in events} == {DEVICE}


def test_settling_synchronises_once_on_the_last_event(events: list[Event]) -> None:
    clock = EventClock(DEVICE)
    for _ in range(3):
        clock.mark()
    clock.settle()
    # The last one comes after an anchor, whose place on the host's clock is known.
    assert [event.synchronized for event in events] == [0, 0, 1, 1]


def test_settling_before_the_first_mark_waits_for_nothing(events: list[Event]) -> None:
    EventClock(DEVICE).settle()
    assert events == []


def test_event_times_are_turned_from_milliseconds_into_seconds(events: list[Event]) -> None:
    clock = EventClock(DEVICE)
    rows: list[Any] = [[clock.mark() for _ in range(3)], [clock.mark() for _ in range(3)]]
    np.testing.assert_allclose(clock.spans(rows), [[0.005, 0.005], [0.005, 0.005]], rtol=1e-12)
    assert sum(event.synchronized for event in events) == 0


def test_host_marks_are_seconds_of_the_hosts_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter_ns", lambda: 2_500_000_001)
    assert timing.host_s() == pytest.approx(2.500000001, abs=1e-12)
    np.testing.assert_allclose(
        HostClock().seconds([2_500_000_001, 7]), [2.500000001, 7e-9], rtol=0, atol=1e-12
    )


def test_event_marks_are_placed_on_the_hosts_clock_by_the_anchor(
    events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "host_s", lambda: 100.0)
    clock = EventClock(DEVICE)
    marks = [clock.mark() for _ in range(3)]  # at 5, 10 and 15 ms of the device
    clock.settle()  # the anchor: at 20 ms, when the host's clock says 100 s
    assert len(events) == 4
    np.testing.assert_allclose(clock.seconds(marks), [99.985, 99.990, 99.995], rtol=0, atol=1e-9)


def test_each_settling_anchors_anew(events: list[Event], monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 200.0])
    monkeypatch.setattr(timing, "host_s", lambda: next(now))
    clock = EventClock(DEVICE)
    clock.mark()
    clock.settle()
    late = clock.mark()  # the third event, at 15 ms
    clock.settle()  # the fourth: at 20 ms, 200 s
    np.testing.assert_allclose(clock.seconds([late]), [199.995], rtol=0, atol=1e-9)
    assert [event.synchronized for event in events] == [1, 1, 1, 1]


def test_event_marks_have_no_place_before_the_clock_is_settled(events: list[Event]) -> None:
    clock = EventClock(DEVICE)
    mark = clock.mark()
    with pytest.raises(RuntimeError, match="settle"):
        clock.seconds([mark])


def test_pacing_reads_a_clock_that_never_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 12.5)
    assert timing.now_s() == 12.5
