"""Which run of a sweep comes when."""

from __future__ import annotations

from typing import Any

import pytest

from dpexp.errors import ConfigError
from dpexp.repeats import interleaved, with_repeats

CELLS = ("a", "b", "c", "d")


def settings(count: int = 2, **changes: Any) -> list[dict[str, Any]]:
    return [{"repeats": 3, "repeat": 0, "seed": 0, **changes} for _ in range(count)]


def refusal(configs: list[dict[str, Any]]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        with_repeats([[f"key={number}"] for number in range(len(configs))], configs)
    return caught.value


def test_without_repeats_the_cells_come_as_typed() -> None:
    assert interleaved(CELLS, 1, seed=7) == [("a", 0), ("b", 0), ("c", 0), ("d", 0)]


def test_every_round_has_each_cell_once() -> None:
    order = interleaved(CELLS, 3, seed=0)
    assert [repeat for _, repeat in order] == [0] * 4 + [1] * 4 + [2] * 4
    for start in (0, 4, 8):
        assert sorted(cell for cell, _ in order[start : start + 4]) == list(CELLS)


def test_each_round_has_an_order_of_its_own() -> None:
    order = [cell for cell, _ in interleaved(CELLS, 20, seed=0)]
    rounds = {tuple(order[start : start + 4]) for start in range(0, 80, 4)}
    assert len(rounds) > 10  # of 24 that there are


def test_the_order_is_that_of_the_seed() -> None:
    assert interleaved(CELLS, 5, seed=1) == interleaved(CELLS, 5, seed=1)
    assert interleaved(CELLS, 5, seed=1) != interleaved(CELLS, 5, seed=2)


def test_more_repeats_begin_with_the_order_of_fewer() -> None:
    assert interleaved(CELLS, 5, seed=1)[:8] == interleaved(CELLS, 2, seed=1)


def test_each_run_gets_the_number_of_its_repeat() -> None:
    runs = with_repeats([["x=1"], ["x=2"]], settings())
    assert sorted(runs) == sorted(
        [f"x={cell}", f"repeat={repeat}"] for cell in (1, 2) for repeat in range(3)
    )
    expected = interleaved([["x=1"], ["x=2"]], 3, seed=0)
    assert runs == [[*cell, f"repeat={repeat}"] for cell, repeat in expected]


def test_a_sweep_without_repeats_is_left_as_it_is() -> None:
    cells = [["repeat=1"], ["repeat=0"]]
    configs = [{"repeats": 1, "repeat": 1, "seed": 0}, {"repeats": 1, "repeat": 0, "seed": 0}]
    assert with_repeats(cells, configs) == cells
    assert with_repeats([["x=1"]], [{}]) == [["x=1"]]
    assert with_repeats([], []) == []


def test_a_sweep_over_the_number_of_repeats_is_refused() -> None:
    error = refusal([*settings(1, repeats=1), *settings(1, repeats=2)])
    assert (error.key, error.value) == ("repeats", "1,2")
    assert error.fix == "repeats=2"


@pytest.mark.parametrize("repeats", [0, -1, 1001, "abc", None, True, 2.5])
def test_what_is_no_number_of_repeats_is_refused(repeats: Any) -> None:
    error = refusal(settings(repeats=repeats))
    assert (error.key, error.value) == ("repeats", repeats)
    assert error.allowed == "a whole number from 1 to 1000"


def test_the_number_of_the_repeat_is_the_sweeps_to_give() -> None:
    error = refusal([*settings(1), *settings(1, repeat=4)])
    assert (error.key, error.value) == ("repeat", 4)
    assert "repeats=3" in error.problem


@pytest.mark.parametrize("seed", ["x", -1, None])
def test_a_seed_that_is_none_is_left_to_its_cells_to_refuse(seed: Any) -> None:
    assert len(with_repeats([["x=1"]], settings(1, seed=seed))) == 3
