"""Which rank the others wait for, on ranks that come when the test says."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dpexp.stragglers import LEGS, MOST_GROUPS, StragglerCount, standard_error

Floats = npt.NDArray[np.float64]


def late(*ranks: list[float]) -> Floats:
    return np.array(ranks, dtype=np.float64)


def legs(late_s: Floats, **of_last: float) -> Floats:
    """Every rank spends a second on each leg of a step, the last rank so much more."""
    found = np.ones((*late_s.shape, len(LEGS)))
    for leg, seconds in of_last.items():
        found[-1, :, LEGS.index(leg)] += seconds
    return found.sum(axis=1)


def counted(late_s: Floats, step_s: float = 1.0, **of_last: float) -> dict[str, Any]:
    count = StragglerCount(len(late_s))
    count.add(late_s, legs(late_s, **of_last), np.full(late_s.shape[1], step_s))
    summary = count.summary()
    assert summary is not None
    return summary


def test_without_a_step_there_is_nothing_to_say() -> None:
    count = StragglerCount(2)
    assert count.summary() is None
    count.add(np.zeros((2, 0)), np.zeros((2, len(LEGS))), np.zeros(0))
    assert count.summary() is None


def test_a_rank_that_is_always_late_is_named_with_the_phase_in_which_it_lost_the_time() -> None:
    got = counted(late([0, 0, 0, 0], [0.1, 0.1, 0.1, 0.1], [0.5, 0.6, 0.5, 0.6]), forward=0.5)
    assert (got["rank"], got["phase"], got["steps"]) == (2, "forward", 4)
    first, second, third = got["ranks"]
    # Later than the mean of the ranks: means of 0, 0.1 and 0.55 s are 13/60 s on average.
    assert first["late_mean_s"] == pytest.approx(-13 / 60)
    assert second["late_mean_s"] == pytest.approx(0.1 - 13 / 60)
    assert third["late_mean_s"] == pytest.approx(0.55 - 13 / 60)
    # The two others waited 0.5 and 0.4 s, or 0.6 and 0.5 s.
    assert third["others_wait_mean_s"] == pytest.approx(0.5)
    assert (first["others_wait_mean_s"], second["others_wait_mean_s"]) == (0, 0)
    assert [rank["share_of_steps"] for rank in got["ranks"]] == [0, 0, 1]
    assert third["excess_mean_s"] == pytest.approx(dict.fromkeys(LEGS, 0.0) | {"forward": 0.5})
    assert first["excess_mean_s"]["forward"] == pytest.approx(-0.25)


@pytest.mark.parametrize("leg", LEGS)
def test_the_phase_is_the_leg_on_which_the_rank_spends_most_more_than_others(leg: str) -> None:
    other = LEGS[0] if leg != LEGS[0] else LEGS[1]
    late_s = late([0, 0, 0, 0], [0.5, 0.6, 0.5, 0.6])
    assert counted(late_s, **{leg: 0.5, other: 0.1})["phase"] == leg


def test_the_last_one_of_each_step_is_counted_and_how_long_it_held_the_others_up() -> None:
    got = counted(late([0, 0.4, 0], [0.2, 0, 0.2]))
    assert got["rank"] is None  # neither is later on average than the other by more than chance
    first, second = got["ranks"]
    assert (first["share_of_steps"], second["share_of_steps"]) == (
        pytest.approx(1 / 3),
        pytest.approx(2 / 3),
    )
    assert first["others_wait_mean_s"] == pytest.approx(0.4 / 3)
    assert second["others_wait_mean_s"] == pytest.approx(0.4 / 3)


def test_less_than_a_hundredth_of_a_step_holds_nobody_up() -> None:
    got = counted(late([0, 0, 0, 0], [0.009, 0.0091, 0.009, 0.0091]))
    assert got["rank"] is None
    assert [rank["share_of_steps"] for rank in got["ranks"]] == [0, 0]
    assert counted(late([0, 0, 0, 0], [0.011, 0.0111, 0.011, 0.0111]))["rank"] == 1


@pytest.mark.parametrize(("meetings", "named"), [(1, 1), (3, None)])
def test_less_than_the_clocks_may_be_off_names_nobody(meetings: int, named: int | None) -> None:
    """Two clocks, each off by up to 0.1 s: 0.2 s for one meeting, 0.6 s for three of a step."""
    late_s = late([0] * 6, [0.5, 0.51] * 3)
    count = StragglerCount(2, clock_error_s=0.1)
    count.add(late_s, legs(late_s), np.ones(6), meetings)
    summary = count.summary()
    assert summary is not None
    assert summary["rank"] == named


def test_one_step_or_equal_lateness_of_two_ranks_names_nobody() -> None:
    assert counted(late([0], [5]))["rank"] is None
    assert counted(late([0, 0], [0.5, 0.6], [0.5, 0.6]))["rank"] is None


def test_flushes_add_up() -> None:
    whole, parts = StragglerCount(2), StragglerCount(2)
    late_s = late([0, 0.3, 0, 0.1, 0], [0.2, 0, 0.4, 0, 0.6])
    step_s = np.arange(1.0, 6.0)
    whole.add(late_s, legs(late_s, data=0.2), step_s)
    for steps in (slice(0, 1), slice(1, 1), slice(1, 4), slice(4, 5)):
        parts.add(late_s[:, steps], legs(late_s[:, steps], data=0.2), step_s[steps])
    got, expected = parts.summary(), whole.summary()
    assert got is not None and expected is not None
    assert got["steps"] == 5
    for mine, other in zip(got["ranks"], expected["ranks"], strict=True):
        excess = mine.pop("excess_mean_s"), other.pop("excess_mean_s")
        assert excess[0] == pytest.approx(excess[1])
        assert mine == pytest.approx(other)


def test_what_is_kept_of_very_many_flushes_is_bounded_and_their_mean_is_the_same() -> None:
    """Rank 1 is 1, 2, 3, ... s late in one step a flush: half of the sum is its lateness."""
    count, flushes = StragglerCount(2), 3 * MOST_GROUPS + 1
    for flush in range(flushes):
        late_s = late([0], [1.0 + flush])
        count.add(late_s, legs(late_s), np.ones(1))
        assert len(count._groups) <= MOST_GROUPS
    got = count.summary()
    assert got is not None
    assert got["rank"] == 1
    assert got["ranks"][1]["late_mean_s"] == pytest.approx((flushes + 1) / 4)


def test_many_steps_of_a_flush_weigh_as_many() -> None:
    # 1 step in which rank 1 is 9 s late, then 99 in which it is 1 s late: 1.08 s on average.
    count = StragglerCount(2)
    for late_s in (late([0], [9]), late([0] * 99, [1] * 99)):
        count.add(late_s, legs(late_s), np.ones(late_s.shape[1]))
    got = count.summary()
    assert got is not None
    first, second = (rank["late_mean_s"] for rank in got["ranks"])
    assert second - first == pytest.approx(1.08)


def noisy(draws: np.random.Generator, ranks: int, steps: int, slow: float = 0.0) -> Floats:
    arrival = draws.exponential(0.05, (ranks, steps))
    arrival[-1] += slow
    late_s: Floats = arrival - arrival.min(axis=0)
    return late_s


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("flushes", [[2], [3], [1, 2, 4], [1, 2, 4, 8, 16], [60]], ids=str)
def test_balanced_noise_names_nobody(ranks: int, flushes: list[int]) -> None:
    """By chance in one of 350 runs of two ranks: of 400 runs, more than 8 would be too many."""
    named = 0
    for seed in range(400):
        draws, count = np.random.default_rng(seed), StragglerCount(ranks)
        for steps in flushes:
            late_s = noisy(draws, ranks, steps)
            count.add(late_s, legs(late_s), np.ones(steps))
        summary = count.summary()
        assert summary is not None
        named += summary["rank"] is not None
    assert named <= 8


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_slow_rank_is_named_through_noise(ranks: int) -> None:
    for seed in range(50):
        late_s = noisy(np.random.default_rng(seed), ranks, 40, slow=0.1)
        assert counted(late_s)["rank"] == ranks - 1


def test_the_standard_error_of_equal_groups_is_the_usual_one() -> None:
    # Of 1, 2, 3, 6: variance 14/3, over 4.
    got = standard_error(np.array([1.0, 2, 3, 6]), np.ones(4))
    assert got == pytest.approx(np.sqrt(14 / 3 / 4))


def test_a_group_of_more_steps_weighs_more_in_the_standard_error() -> None:
    # Shares 3/4 and 1/4, mean 1; deviations -1 and 3: (9/16 + 9/16) x 2.
    got = standard_error(np.array([0.0, 4.0]), np.array([3.0, 1.0]))
    assert got == pytest.approx(np.sqrt(9 / 4))


def test_a_single_group_says_nothing_of_its_error() -> None:
    assert standard_error(np.array([1.0]), np.array([5.0])) == float("inf")
