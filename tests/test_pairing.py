"""Which cells of two sides are the same."""

from __future__ import annotations

from typing import Any

import pytest
from builders import make_run_data
from conftest import TESTS

from dpexp.pairing import Pairs, cells_of, differences, has_key, pair
from dpexp.records import read_run

Run = dict[str, Any]


def paired(a: list[Run], b: list[Run], *ignored: str) -> Pairs:
    return pair(cells_of(a), cells_of(b), ignored)


def told(pairs: Pairs) -> list[tuple[str, str, dict[str, Any]]]:
    return [(each.a.name, each.b.name, each.differing) for each in pairs.matched]


def test_repeats_and_runs_that_were_started_one_by_one_are_one_cell() -> None:
    runs = [make_run_data(keys={"repeat": repeat}) for repeat in (0, 1, 0)]
    (cell,) = cells_of(runs)
    assert (cell.name, len(cell.runs)) == ("none-n1", 3)


def test_cells_of_the_same_label_are_told_apart_by_the_keys_that_vary() -> None:
    runs = [make_run_data("ddp", 2, keys={"parallel.bucket_cap_mb": cap}) for cap in (25.0, 5.0)]
    names = [cell.name for cell in cells_of([*runs, make_run_data()])]
    caps = [f"ddp-n2 parallel.bucket_cap_mb={cap}" for cap in ("25.0", "5.0")]
    assert names == ["none-n1", *sorted(caps)]


@pytest.mark.parametrize(
    "keys",
    [
        {"repeats": 5},
        {"trace": True},
        {"check.parity": True},
        {"measure.calibration_pairs": 8},
        {"parallel.timeout_s": 10.0},
    ],
)
def test_what_changes_no_measured_step_makes_no_difference(keys: dict[str, Any]) -> None:
    assert told(paired([make_run_data()], [make_run_data(keys=keys)])) == [
        ("none-n1", "none-n1", {})
    ]


def test_auto_is_what_it_came_to() -> None:
    explicit = make_run_data("ddp", 2, keys={"device": "cpu", "num_devices": 2})
    auto = make_run_data("ddp", 2, keys={"device": "auto", "num_devices": "auto"})
    assert told(paired([explicit], [auto]))[0][2] == {}
    cuda = make_run_data("ddp", 2, device="cuda:0")
    other = make_run_data("ddp", 2, device="cuda:1")
    assert told(paired([cuda], [other]))[0][2] == {}
    assert told(paired([auto], [cuda]))[0][2] == {"device": ("cpu", "cuda")}


def test_a_batch_that_was_searched_for_is_what_was_found() -> None:
    def searched(rows: int) -> Run:
        return make_run_data(
            keys={"batch_size": "auto"}, batch={"global": rows, "per_device": rows}
        )

    assert told(paired([searched(512)], [searched(512)]))[0][2] == {}
    assert told(paired([searched(512)], [searched(400)]))[0][2] == {"batch_size": (512, 400)}
    typed = make_run_data(keys={"batch_size": 400}, batch={"global": 400, "per_device": 400})
    assert told(paired([typed], [searched(400)]))[0][2] == {}


def test_emulated_devices_differ_from_real_ones() -> None:
    real = make_run_data("dp", 2, emulated=False)
    assert told(paired([make_run_data("dp", 2)], [real]))[0][2] == {"emulated": (True, False)}


def test_a_key_that_a_version_did_not_know_was_left_alone() -> None:
    old = make_run_data("ddp", 2, keys={"precision": None, "parallel.zero": None})
    assert told(paired([old], [make_run_data("ddp", 2)]))[0][2] == {}
    new = make_run_data("ddp", 2, keys={"precision": "bf16", "parallel.zero": True})
    assert told(paired([old], [new]))[0][2] == {
        "precision": ("fp32", "bf16"),
        "parallel.zero": (False, True),
    }


@pytest.mark.parametrize("version", ["first", "before_comm", "repeats_and_comm"])
def test_a_run_of_today_is_the_same_cell_as_that_of_an_earlier_version(version: str) -> None:
    # Fails where a new key has neither a default in conf/ nor a place among those without effect.
    old = read_run(TESTS / "data/results" / version / "3_ddp_n2/run.json")
    # Then a size of the buckets was always given.
    keys = {"task": "train", "parallel.bucket_cap_mb": 25.0}
    today = make_run_data("ddp", 2, keys=keys)
    assert told(paired([old], [today])) == [("ddp-n2", "ddp-n2", {})]


def test_torch_s_own_buckets_are_not_those_of_a_given_size() -> None:
    own = make_run_data("ddp", 2, keys={"parallel.bucket_cap_mb": "auto"})
    given = make_run_data("ddp", 2, keys={"parallel.bucket_cap_mb": 25.0})
    (found,) = told(paired([own], [given]))
    assert found[2] == {"parallel.bucket_cap_mb": ("auto", 25.0)}


def test_cells_are_matched_with_the_nearest_of_the_same_strategy_and_devices() -> None:
    sizes = {"a": (30, 60), "b": (30, 90)}
    a, b = (
        [make_run_data("ddp", 2, keys={"batch_size": size}) for size in sizes[side]]
        for side in "ab"
    )
    found = paired(a, [*b, make_run_data("ddp", 3)])
    assert [each.differing for each in found.matched] == [{}, {"batch_size": (60, 90)}]
    assert [cell.name for cell in found.only_b] == ["ddp-n3"]


def test_the_only_cells_are_set_beside_each_other_whatever_they_are() -> None:
    (found,) = told(paired([make_run_data("none", 1)], [make_run_data("ddp", 2)]))
    # The options of ddp go with the strategy.
    assert found[2] == {"num_devices": (1, 2), "parallel.strategy": ("none", "ddp")}


def test_ignored_keys_may_differ_and_a_node_stands_for_all_below_it() -> None:
    a = [make_run_data("ddp", 2, keys={"parallel.bucket_cap_mb": 25.0})]
    b = [make_run_data("ddp", 2, keys={"parallel.bucket_cap_mb": 5.0, "batch_size": 60})]
    assert told(paired(a, b, "parallel"))[0][2] == {"batch_size": (30, 60)}
    assert told(paired(a, b, "parallel.bucket_cap_mb", "batch_size"))[0][2] == {}
    assert told(paired(a, b, "batch"))[0][2].keys() == {"parallel.bucket_cap_mb", "batch_size"}


def test_where_two_are_equally_near_none_is_chosen() -> None:
    a = [make_run_data("ddp", 2, keys={"parallel.bucket_cap_mb": 25.0})]
    b = [make_run_data("ddp", 2, keys={"parallel.bucket_cap_mb": cap}) for cap in (5.0, 10.0)]
    found = paired(a, b, "parallel.bucket_cap_mb")
    assert (found.matched, len(found.only_a), len(found.only_b)) == ((), 1, 2)


def test_a_key_is_known_if_a_config_has_it_or_keys_below_it() -> None:
    cells = cells_of([make_run_data("ddp", 2)])
    assert [has_key(cells, key) for key in ("parallel", "batch_size", "bucket", "trace")] == [
        True,
        True,
        False,
        False,
    ]


def test_a_config_that_could_not_be_read_is_a_cell_too() -> None:
    broken = make_run_data(config={"parallel": "nodp", "batch_size": "${oops}"}, status="failed")
    own, other = cells_of([broken]), cells_of([make_run_data()])
    assert "batch_size" in differences(own[0], other[0])
