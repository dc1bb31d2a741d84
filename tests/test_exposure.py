"""What of a step's communication it waited for, on steps drawn by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dpexp.exposure import (
    Exposure,
    bus_share,
    covered,
    of_awaited,
    of_blocking,
    of_buckets,
    stalls,
    together,
)

NAN = float("nan")


def table(*rows: list[float]) -> npt.NDArray[np.float64]:
    return np.array(rows, dtype=np.float64)


def assert_is(got: Exposure, **expected: list[float]) -> None:
    for name, seconds in expected.items():
        np.testing.assert_allclose(
            getattr(got, f"{name}_s"), seconds, rtol=0, atol=1e-12, err_msg=name
        )


# Buckets: the rank goes on computing


def test_a_single_bucket_is_waited_for_from_ready_to_end() -> None:
    got = of_buckets(table([2]), table([5]), table([2]))
    assert_is(got, exposed=[3], waiting=[0], overlapped=[0], bus=[3])


def test_what_runs_while_the_rank_still_computes_is_overlapped() -> None:
    # |--- first ---|          1 to 4
    #       |--- second ---|   3 to 6; the rank computes until 3
    got = of_buckets(table([1, 3]), table([4, 6]), table([1, 3]))
    assert_is(got, exposed=[3], waiting=[0], overlapped=[2], bus=[5])


def test_time_between_two_buckets_counts_for_nothing() -> None:
    got = of_buckets(table([1, 5]), table([2, 7]), table([1, 5]))
    assert_is(got, exposed=[2], waiting=[0], overlapped=[1], bus=[3])


def test_buckets_inside_each_other_count_once() -> None:
    # The first is done after the second, as it may be with several threads.
    got = of_buckets(table([0, 2]), table([9, 4]), table([0, 2]))
    assert_is(got, exposed=[7], waiting=[0], overlapped=[2], bus=[9])


def test_a_late_rank_makes_the_others_wait_for_it_and_not_for_the_network() -> None:
    ready, end = table([1, 3]), table([7, 8])
    late = table([6, 7])  # when the last rank had them
    got = of_buckets(ready, end, late)
    # Of 3 to 8 the rank waited for the other one until 7. All ranks are there from 6 to 8.
    assert_is(got, exposed=[1], waiting=[4], overlapped=[1], bus=[2])


def test_the_late_rank_itself_waits_for_nobody() -> None:
    own = table([6, 7])
    assert_is(of_buckets(own, table([7, 8]), own), exposed=[1], waiting=[0], overlapped=[1])


def test_a_rank_that_was_late_only_for_an_early_bucket_costs_no_wait() -> None:
    got = of_buckets(table([1, 6]), table([5, 8]), table([4, 6]))
    assert_is(got, exposed=[2], waiting=[0], overlapped=[1], bus=[3])


def test_a_wait_is_never_longer_than_the_whole_of_it() -> None:
    # Clocks of two hosts: the other one seems to come after the end.
    got = of_buckets(table([2]), table([5]), table([5.5]))
    assert_is(got, exposed=[0], waiting=[3], overlapped=[0], bus=[0])
    got = of_buckets(table([2]), table([5]), table([1.5]))
    assert_is(got, exposed=[3], waiting=[0])


def test_a_collective_that_was_done_before_the_rank_had_the_last_one_ready_is_hidden() -> None:
    got = of_buckets(table([0, 10]), table([4, 10]), table([0, 10]))
    assert_is(got, exposed=[0], waiting=[0], overlapped=[4], bus=[4])


def test_steps_with_fewer_collectives_are_padded_and_those_with_none_cost_nothing() -> None:
    ready = table([1, 3, 5], [1, 3, NAN], [NAN, NAN, NAN])
    end = table([2, 4, 8], [4, 6, NAN], [NAN, NAN, NAN])
    got = of_buckets(ready, end, ready)
    assert_is(got, exposed=[3, 3, 0], waiting=[0, 0, 0], overlapped=[2, 2, 0], bus=[5, 5, 0])


# Blocking: the rank stands still


def test_each_blocking_collective_is_waited_for_as_a_whole() -> None:
    got = of_blocking(table([1, 10]), table([4, 12]), table([1, 10]))
    assert_is(got, exposed=[5], waiting=[0], overlapped=[0], bus=[5])


def test_until_the_last_rank_has_come_a_blocking_collective_is_a_wait_for_it() -> None:
    got = of_blocking(table([1, 10]), table([4, 12]), table([3, 10]))
    assert_is(got, exposed=[3], waiting=[2], overlapped=[0], bus=[3])


def test_blocking_collectives_that_are_not_there_cost_nothing() -> None:
    ready, end = table([1, NAN], [NAN, NAN]), table([4, NAN], [NAN, NAN])
    assert_is(of_blocking(ready, end, ready), exposed=[3, 0], waiting=[0, 0], bus=[3, 0])


@pytest.mark.parametrize("of", [of_buckets, of_blocking])
def test_the_parts_are_never_negative_and_add_up_to_what_is_under_way(of: Any) -> None:
    """With all ranks there; what blocks is under way for this rank from its own arrival on."""
    draws = np.random.default_rng(0)
    ready = np.cumsum(draws.exponential(1, (500, 4)), axis=1)
    last = ready + draws.exponential(1, (500, 4))
    end = np.maximum.accumulate(last, axis=1) + draws.exponential(1, (500, 4))
    if of is of_blocking:  # the next one begins when this one is done
        shift = np.cumsum(end - ready, axis=1) - (end - ready)
        ready, last, end = ready + shift, last + shift, end + shift
    got = of(ready, end, last)
    assert all((part >= 0).all() for part in got)
    np.testing.assert_allclose(got.exposed_s + got.overlapped_s, covered(last, end), rtol=1e-9)
    np.testing.assert_allclose(got.bus_s, covered(last, end), rtol=1e-9)
    stood = (end - ready).sum(axis=1) if of is of_blocking else end.max(axis=1) - ready[:, -1]
    np.testing.assert_allclose(got.exposed_s + got.waiting_s, stood, rtol=1e-9)


# Awaited: the rank goes on computing until it needs it


def test_what_is_done_before_it_is_needed_is_overlapped() -> None:
    got = of_awaited(table([2]), table([5]), table([3]), table([6]))
    assert_is(got, exposed=[0], waiting=[0], overlapped=[2], bus=[2])


def test_from_where_it_is_needed_until_it_is_done_it_is_exposed() -> None:
    # Under way from 2 to 9; the rank computes until 5.
    got = of_awaited(table([2]), table([9]), table([2]), table([5]))
    assert_is(got, exposed=[4], waiting=[0], overlapped=[3], bus=[7])


def test_what_is_needed_before_it_is_ready_costs_nothing_until_then() -> None:
    """Until then the rank prepares it itself."""
    got = of_awaited(table([4]), table([9]), table([4]), table([1]))
    assert_is(got, exposed=[5], waiting=[0], overlapped=[0], bus=[5])


@pytest.mark.parametrize(
    ("last", "exposed", "waiting", "overlapped"),
    [(3, 4, 0, 2), (7, 2, 2, 0), (9, 0, 4, 0), (9.5, 0, 4, 0)],
)
def test_while_the_last_rank_is_not_there_a_stall_is_a_wait_for_it(
    last: float, exposed: float, waiting: float, overlapped: float
) -> None:
    # The rank stands still from 5 to 9.
    got = of_awaited(table([2]), table([9]), table([last]), table([5]))
    assert_is(got, exposed=[exposed], waiting=[waiting], overlapped=[overlapped])
    assert_is(got, bus=[max(9 - last, 0)])


def test_two_that_are_needed_at_once_are_waited_for_one_after_the_other() -> None:
    # At 10, after the last computation: the first until 12, then the second until 15, for which
    # the last rank comes at 13.
    ready, end, last = table([3, 9]), table([12, 15]), table([5, 13])
    begin, seconds = stalls(ready, end, table([10, 10]))
    assert (begin.tolist(), seconds.tolist()) == ([[10, 12]], [[2, 3]])
    got = of_awaited(ready, end, last, table([10, 10]))
    # All ranks are there from 5 to 12 and from 13 to 15.
    assert_is(got, exposed=[2 + 2], waiting=[1], overlapped=[5], bus=[9])


def test_the_order_in_which_they_are_needed_may_be_another_than_that_in_which_they_began() -> None:
    # A scattering from 4 to 14 that is needed at 12, a gather from 5 to 10 that is needed at 8.
    got = of_awaited(table([4, 5]), table([14, 10]), table([4, 5]), table([12, 8]))
    assert_is(got, exposed=[2 + 2], waiting=[0], overlapped=[6], bus=[10])


def test_steps_with_fewer_awaited_collectives_are_padded() -> None:
    ready, end = table([2, 4], [2, NAN], [NAN, NAN]), table([5, 9], [5, NAN], [NAN, NAN])
    needed = table([3, 6], [3, NAN], [NAN, NAN])
    got = of_awaited(ready, end, ready, needed)
    assert_is(got, exposed=[5, 2, 0], waiting=[0, 0, 0], overlapped=[2, 1, 0], bus=[7, 3, 0])


def test_stalls_of_a_computing_stream_add_up_to_what_it_lost() -> None:
    """A stream that works and waits in turn, for collectives that another one carries."""
    draws = np.random.default_rng(1)
    steps, count = 300, 5
    end = np.cumsum(draws.exponential(1, (steps, count)), axis=1)  # one after the other
    ready = end - draws.uniform(0, 1, (steps, count)) * np.diff(end, axis=1, prepend=0)
    last = ready + draws.uniform(0, 1, (steps, count)) * (end - ready)
    needed, now, work = np.zeros_like(end), np.zeros(steps), np.zeros(steps)
    for column in range(count):
        computed = draws.exponential(0.7, steps)
        now, work = now + computed, work + computed
        needed[:, column] = now
        now = np.maximum(now, ready[:, column])  # the rank's own part of it
        work += now - needed[:, column]
        now = np.maximum(now, end[:, column])
    got = of_awaited(ready, end, last, needed)
    assert all((part >= 0).all() for part in got)
    np.testing.assert_allclose(got.exposed_s + got.waiting_s, now - work, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(got.bus_s, (end - last).sum(axis=1), rtol=1e-9)
    np.testing.assert_allclose(got.exposed_s + got.overlapped_s, got.bus_s, rtol=1e-9)


# Several kinds in one step


def test_buffers_that_block_before_forward_and_buckets_beside_backward_add_up() -> None:
    # Buffers at 1, which the last rank has at 4, until 6; then buckets, the second of which the
    # rank has at 12 and waits for: until 15 for the last rank, until 18 for the transport.
    blocking = of_blocking(table([1]), table([6]), table([4]))
    buckets = of_buckets(table([9, 12]), table([14, 18]), table([10, 15]))
    assert_is(blocking, exposed=[2], waiting=[3], overlapped=[0], bus=[2])
    # All ranks are there from 10 to 14 and from 15 to 18; 3 s of that are exposed.
    assert_is(buckets, exposed=[3], waiting=[3], overlapped=[4], bus=[7])
    got = together(blocking, buckets)
    assert_is(got, exposed=[5], waiting=[6], overlapped=[4], bus=[9])


def test_a_step_with_one_kind_only_costs_what_that_kind_does() -> None:
    none, some = table([NAN]), table([2])
    buckets = of_buckets(some, table([5]), table([3]))
    got = together(of_blocking(none, none, none), buckets)
    assert_is(got, exposed=[2], waiting=[1], overlapped=[0], bus=[2])
    got = together(of_blocking(some, table([5]), table([3])), of_buckets(none, none, none))
    assert_is(got, exposed=[2], waiting=[1], overlapped=[0], bus=[2])


# Intervals


@pytest.mark.parametrize(
    ("begin", "end", "seconds"),
    [
        ([0, 10], [3, 12], 5),
        ([0, 2], [3, 12], 12),
        ([0, 1], [9, 3], 9),
        ([0, 1, 8], [9, 3, 10], 10),
        ([4, 4], [6, 6], 2),
        ([4], [3], 0),
        ([1, NAN, 7], [2, NAN, 9], 3),
        ([NAN], [NAN], 0),
        ([NAN, 2, 0], [NAN, 12, 3], 12),  # in any order
    ],
)
def test_overlapping_intervals_are_counted_once(
    begin: list[float], end: list[float], seconds: float
) -> None:
    assert covered(table(begin), table(end)).tolist() == [seconds]


@pytest.mark.parametrize(
    ("kind", "ranks", "share"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 4, 1.5),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 4, 0.75),
        ("all_reduce", 1, 0.0),
        ("all_gather", 1, 0.0),
    ],
)
def test_a_ring_moves_this_share_of_the_bytes_over_each_link(
    kind: str, ranks: int, share: float
) -> None:
    assert bus_share(kind, ranks) == pytest.approx(share)
