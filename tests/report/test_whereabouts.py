"""What the console says of a run's hosts, cores and checkpoints."""

from __future__ import annotations

from typing import Any

import pytest

from dpexp.report.whereabouts import checkpoints_line, hosts_line, pinned_line


def test_the_ranks_of_each_host_are_told_where_there_are_several() -> None:
    hosts: list[dict[str, Any]] = [
        {"host": "a", "ranks": [0, 1, 2]},
        {"host": "b", "ranks": [3]},
    ]
    assert hosts_line({"hosts": hosts}) == "on 2 hosts: a (ranks 0-2), b (rank 3)"
    assert hosts_line({"hosts": hosts[:1]}) is None
    assert hosts_line({}) is None


def test_of_many_hosts_the_first_are_named() -> None:
    hosts = [{"host": f"n{n}", "ranks": [2 * n, 2 * n + 1]} for n in range(128)]
    told = hosts_line({"hosts": hosts})
    assert told is not None
    assert told.endswith("n7 (ranks 14-15) and 120 more")


def test_the_cores_of_each_rank_are_told() -> None:
    run = {"pinned": [[0], [1, 2, 3, 8], [6, 4]]}
    assert (
        pinned_line(run) == "pinned: rank 0 to core 0, rank 1 to cores 1-3 and 8, rank 2 to "
        "cores 4 and 6"
    )
    assert pinned_line({"pinned": None}) is None


@pytest.mark.parametrize(
    ("known", "told"),
    [
        ({"count": 1200, "last_step": 6000}, "1,200 saved, the last after 6,000 steps"),
        (
            {"count": 1, "last_step": 5, "failed": 2},
            "1 saved, the last after 5 steps; 2 could not be saved",
        ),
        ({"failed": 2}, "none saved; 2 could not be saved"),
        ({}, "none was due"),
        ({"gone_on_from": 40}, "none saved"),
    ],
)
def test_how_many_checkpoints_there_are_is_told(known: dict[str, Any], told: str) -> None:
    none = {"count": 0, "last_step": None, "failed": 0, "gone_on_from": None}
    assert checkpoints_line({"checkpoint": {**none, **known}}) == f"checkpoints: {told}"


def test_a_run_that_was_to_save_none_says_nothing_of_them() -> None:
    assert checkpoints_line({"checkpoint": None}) is None
