"""Which run of a sweep comes when, if its cells are repeated. Pure; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from dpexp.bounds import MOST
from dpexp.errors import ConfigError

Cell = TypeVar("Cell")


def interleaved(cells: Sequence[Cell], repeats: int, seed: int) -> list[tuple[Cell, int]]:
    """Each cell `repeats` times, with the number of the repeat.

    Round by round: every round has each cell once, in an order of its own that is drawn from
    `seed`. So a machine that grows slower over the sweep slows down all cells alike, and no cell
    always follows the same one. Without repeats the order stays as typed.
    """
    if repeats == 1:
        return [(cell, 0) for cell in cells]
    random = np.random.Generator(np.random.PCG64(seed))
    orders = [random.permutation(len(cells)) for _ in range(repeats)]
    return [(cells[place], repeat) for repeat, order in enumerate(orders) for place in order]


def with_repeats(
    cells: Sequence[Sequence[str]], configs: Sequence[Mapping[str, Any]]
) -> list[list[str]]:
    """The overrides of every run of a sweep, in the order of running.

    Args:
        cells: the overrides of each cell, as typed.
        configs: what each composes to; `repeats`, `repeat` and `seed` are looked at. The order is
            drawn from the first cell's seed.

    Raises:
        ConfigError: `repeats` is no number of repeats or not the same for all cells, or `repeat` is
            given too.
    """
    asked = list(dict.fromkeys(repr(config.get("repeats", 1)) for config in configs))
    if len(asked) > 1:
        raise ConfigError(
            "repeats",
            ",".join(asked),
            "is for the whole sweep: each cell runs equally often",
            allowed="one number",
            fix=f"repeats={asked[-1]}",
        )
    repeats = configs[0].get("repeats", 1) if configs else 1
    # bool is an int in Python; repeats=true is a mistake all the same.
    if type(repeats) is not int or not 1 <= repeats <= MOST["repeats"]:
        raise ConfigError(
            "repeats",
            repeats,
            "is not a number of repeats",
            allowed=f"a whole number from 1 to {MOST['repeats']}",
            fix="repeats=5",
        )
    if repeats == 1:
        return [list(cell) for cell in cells]
    given = [config["repeat"] for config in configs if config.get("repeat", 0) != 0]
    if given:
        raise ConfigError(
            "repeat", given[0], f"is set by the sweep, which has repeats={repeats}", fix="repeat=0"
        )
    seed = configs[0].get("seed")
    # A seed that is none is refused in its cell.
    order = interleaved(cells, repeats, seed if type(seed) is int and seed >= 0 else 0)
    return [[*cell, f"repeat={repeat}"] for cell, repeat in order]
