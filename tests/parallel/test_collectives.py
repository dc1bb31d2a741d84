"""The notes that a step's collectives leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import TickClock

from dpexp.parallel.collectives import CollectiveLog


def log_of(world_size: int = 4, **options: Any) -> CollectiveLog:
    return CollectiveLog(TickClock(), world_size, blocking=False, **options)


def test_collectives_are_noted_in_the_order_in_which_they_were_ready() -> None:
    log = log_of()
    first, second = log.begin("all_reduce", 100), log.begin("all_reduce", 8)
    log.done(second)
    log.done(first)
    assert log.noted == [first, second]
    assert [(each.ready, each.end) for each in log.noted] == [(1, 4), (2, 3)]


@pytest.mark.parametrize(
    ("kind", "bus_bytes"),
    [("all_reduce", 150.0), ("all_gather", 75.0), ("reduce_scatter", 75.0), ("reduce", 100.0)],
)
def test_what_passes_each_ranks_link(kind: str, bus_bytes: float) -> None:
    assert log_of().begin(kind, 100).bus_bytes == bus_bytes


def test_a_collective_knows_whether_a_backward_pass_is_at_work() -> None:
    log = log_of()
    weight = torch.ones((), requires_grad=True)
    weight.register_hook(lambda _gradient: log.done(log.begin("reduce", 4)))
    log.begin("gather", 4)
    (weight * 2).backward()  # type: ignore[no-untyped-call]
    log.copied("scatter", 4, 7, 9)
    assert [each.in_backward for each in log.noted] == [False, True, False]
    assert (log.noted[2].ready, log.noted[2].end, log.noted[2].bus_bytes) == (7, 9, 4.0)


def test_a_pause_lies_between_ready_and_done() -> None:
    clock = TickClock()

    def pause() -> None:
        clock.ticks += 10

    log = CollectiveLog(clock, 2, blocking=True, pause=pause)
    entry = log.begin("all_gather", 4)
    log.done(entry)
    assert (entry.ready, entry.end) == (1, 12)
    log.pause()
    assert clock.ticks == 22


def test_without_a_pause_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _seconds: pytest.fail("slept"))
    log = log_of()
    log.pause()
    log.done(log.begin("all_gather", 4))


def test_what_is_needed_at_once_has_one_mark_and_without_a_collective_there_is_none() -> None:
    clock = TickClock()
    log = CollectiveLog(clock, 2, blocking=False)
    first, second = log.begin("all_gather", 4), log.begin("all_gather", 4)
    assert (first.needed, second.needed) == (None, None)
    log.needed([])
    log.needed([first, second])
    assert (first.needed, second.needed, clock.ticks) == (3, 3, 3)
