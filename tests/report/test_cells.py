"""Which runs of a sweep are one cell."""

from __future__ import annotations

from typing import Any

from dpexp.report.cells import group_of, members, settings_of


def run(parallel: str = "none", num_devices: int = 1, **config: Any) -> dict[str, Any]:
    return {
        "parallel": parallel,
        "num_devices": num_devices,
        "config": {"parallel": {"strategy": parallel}, "num_devices": num_devices, **config},
    }


def test_runs_that_differ_by_their_repeat_alone_are_one_cell() -> None:
    runs = {
        "0_ddp_n2": run("ddp", 2, repeat=0),
        "1_none_n1": run(repeat=0),
        "2_none_n1": run(repeat=1),
        "3_ddp_n2": run("ddp", 2, repeat=1),
    }
    assert members(runs) == [("1_none_n1", "2_none_n1"), ("0_ddp_n2", "3_ddp_n2")]


def test_a_configuration_that_was_typed_twice_is_two_cells() -> None:
    runs = {
        "0_none_n1": run(repeat=0),
        "1_none_n1": run(repeat=0),
        "2_none_n1": run(repeat=1),
        "3_none_n1": run(repeat=1),
    }
    assert members(runs) == [("0_none_n1", "2_none_n1"), ("1_none_n1", "3_none_n1")]


def test_without_repeats_the_rows_are_in_the_order_of_the_sweep() -> None:
    runs = {"0_ddp_n2": run("ddp", 2), "1_none_n1": run(), "2_ddp_n1": run("ddp", 1)}
    assert members(runs) == [("0_ddp_n2",), ("1_none_n1",), ("2_ddp_n1",)]


def test_rows_with_repeats_are_sorted_since_their_order_was_drawn() -> None:
    cells = [
        ("fsdp", 2, 8),
        ("none", 1, 16),
        ("ddp", 4, 8),
        ("dp", 2, 8),
        ("ddp", 2, 8),
        ("none", 1, 8),
    ]
    runs = {
        f"{number + repeat * len(cells)}": run(name, count, batch_size=size, repeat=repeat)
        for repeat in (0, 1)
        for number, (name, count, size) in enumerate(cells)
    }
    assert [folders[0] for folders in members(runs)] == ["5", "3", "4", "2", "0", "1"]


def test_the_repeat_is_neither_a_setting_nor_parts_a_group() -> None:
    runs = {"0": run(repeat=0, batch_size=8), "1": run("dp", 2, repeat=1, batch_size=16)}
    assert settings_of(runs) == {"0": "batch_size=8", "1": "batch_size=16"}
    assert group_of(run(repeat=0)) == group_of(run("ddp", 2, repeat=3))
    assert group_of(run(batch_size=8)) != group_of(run(batch_size=16))


def test_settings_that_differ_only_in_what_a_file_name_lacks_stay_apart() -> None:
    paths = ["a b", "a/b", "é" * 9, "y" * 300, "y" * 301]
    runs = {str(number): run(path=path) for number, path in enumerate(paths)}
    short = "path=" + "y" * 115
    names = ["path=a-b", "path=a-b~2", "path=-", short, f"{short}~2"]
    assert list(settings_of(runs).values()) == names
