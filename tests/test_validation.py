"""Injected truth: what dpexp says of a disturbance that was put in on purpose.

The scenarios are those of docs/validation.md. One draw can mislead on a busy machine, so a claim
has to hold in two of three.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.scenarios import SCENARIOS, Claim, Drawn, Scenario
from benchmarks.validation import draw
from dpexp import server


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    server.start(several_ranks=True)


def _draws(scenario: Scenario, ranks: int) -> Iterator[Drawn]:
    for seed in range(3):
        yield draw(scenario, ranks, seed)


def _most_hold(scenario: Scenario, ranks: int) -> None:
    held: dict[str, list[bool]] = {claim.text: [] for claim in scenario.claims}
    seen: dict[str, list[str | float]] = {claim.text: [] for claim in scenario.claims}

    def open_claims() -> list[Claim]:
        return [c for c in scenario.claims if held[c.text].count(True) < 2]

    for drawn in _draws(scenario, ranks):
        for claim in open_claims():
            held[claim.text].append(claim.holds(drawn))
            seen[claim.text].append(claim.shown(drawn))
        if not open_claims() or all(len(h) == 1 and h[0] for h in held.values()):
            return  # all of them held at once
    assert not open_claims(), {claim.text: seen[claim.text] for claim in open_claims()}


# What `make test` runs; the others are slow.
QUICK = (
    "each collective takes 50 ms longer, one bucket",
    "rank 1 computes 1.2 times as long",
    "each batch takes 50 ms longer to fetch",
)
TWO_RANKS = [
    pytest.param(each, id=each.name, marks=[] if each.name in QUICK else [pytest.mark.slow])
    for each in SCENARIOS
]


@pytest.mark.parametrize("scenario", TWO_RANKS)
def test_two_ranks_a_disturbance_is_found(scenario: Scenario) -> None:
    _most_hold(scenario, 2)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_four_ranks_a_disturbance_is_found(scenario: Scenario) -> None:
    _most_hold(scenario, 4)


def test_an_undisturbed_run_names_no_straggler_and_says_nothing_is_injected() -> None:
    calm = draw(Scenario("calm", (), ()), 2, seed=0).run
    assert calm["injected"] == []
    assert calm["stragglers"]["rank"] is None
