"""The classic exercise's printed lines: 100 rows of 5 features, in batches of 30, 30, 30, 10."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dpexp
from dpexp import server


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Have one fork server for all."""
    server.start(several_ranks=True)


def inside(rows: int) -> str:
    return f"\tIn Model: input size torch.Size([{rows}, 5]) output size torch.Size([{rows}, 2])"


def outside(rows: int) -> str:
    return f"Outside: input size torch.Size([{rows}, 5]) output_size torch.Size([{rows}, 2])"


def tutorial(capfd: pytest.CaptureFixture[str], folder: Path, *overrides: str) -> list[str]:
    """The lines that the run printed to stdout."""
    capfd.readouterr()
    run = dpexp.run(["+experiment=tutorial", *overrides], folder=folder)
    assert run.result.status == "ok", run.result.error
    return capfd.readouterr().out.splitlines()


def logged(folder: Path) -> list[str]:
    """The lines of the log that belong to the exercise, without their time."""
    lines = (folder / "dpexp.log").read_text(encoding="utf-8").splitlines()
    return [line.split("[INFO] ", 1)[1] for line in lines if "[dpexp.tutorial][INFO] " in line]


def test_one_device_prints_both_sizes_of_each_batch(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert tutorial(capfd, tmp_path) == [
        "Let's use 1 device (cpu)",
        *(inside(30), outside(30)),
        *(inside(30), outside(30)),
        *(inside(30), outside(30)),
        *(inside(10), outside(10)),
    ]


@pytest.mark.parametrize(
    ("devices", "replicas"),
    [
        (2, [[15, 15], [15, 15], [15, 15], [5, 5]]),
        (3, [[10, 10, 10], [10, 10, 10], [10, 10, 10], [4, 4, 2]]),
        (4, [[8, 8, 8, 6], [8, 8, 8, 6], [8, 8, 8, 6], [3, 3, 3, 1]]),
    ],
)
def test_dp_prints_each_replicas_sizes_in_order_and_then_the_batchs(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, devices: int, replicas: list[list[int]]
) -> None:
    lines = tutorial(capfd, tmp_path, "parallel=dp", f"num_devices={devices}")
    expected = [f"Let's use {devices} devices (emulated on cpu)"]
    for sizes in replicas:
        expected += [*map(inside, sizes), outside(sum(sizes))]
    assert lines == expected


def test_ddp_prints_every_ranks_sizes_and_the_whole_batchs(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = tutorial(capfd, tmp_path, "parallel=ddp", "num_devices=3")
    # Each rank prints its own line when it comes to it, so only rank 0's lines have an order.
    assert Counter(lines) == Counter(
        ["Let's use 3 devices (3 processes on cpu)"]
        + [inside(10)] * 9
        + [inside(4), inside(4), inside(2)]
        + [outside(30)] * 3
        + [outside(10)]
    )
    assert [line for line in lines if line.startswith("Outside")] == [outside(30)] * 3 + [
        outside(10)
    ]


def test_an_idle_replica_prints_nothing(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = ("dataset.rows=9", "batch_size=9")
    lines = tutorial(capfd, tmp_path, "parallel=dp", "num_devices=4", *data)
    assert lines[1:] == [inside(3), inside(3), inside(3), outside(9)]


def test_an_idle_rank_prints_nothing(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = ("dataset.rows=3", "batch_size=3")
    lines = tutorial(capfd, tmp_path, "parallel=ddp", "num_devices=4", *data)
    greeting = "Let's use 4 devices (4 processes on cpu)"
    assert Counter(lines) == Counter([greeting, *[inside(1)] * 3, outside(3)])


def test_tags_of_device_and_rank_are_in_the_log_alone(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = tutorial(capfd, tmp_path, "parallel=dp", "num_devices=3", "steps=1")
    assert not any("device=" in line or "rank=" in line for line in lines)
    assert logged(tmp_path) == [
        "Let's use 3 devices (emulated on cpu)",
        *(f"{inside(10)} device={device} rank=0" for device in range(3)),
        f"{outside(30)} rank=0",
    ]


def test_in_the_log_of_ddp_each_line_has_its_own_rank(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = tutorial(capfd, tmp_path, "parallel=ddp", "num_devices=3", "steps=1")
    assert not any("device=" in line or "rank=" in line for line in lines)
    assert Counter(logged(tmp_path)) == Counter(
        [
            "Let's use 3 devices (3 processes on cpu)",
            *(f"{inside(10)} device={rank} rank={rank}" for rank in range(3)),
            f"{outside(30)} rank=0",
        ]
    )
    for line in (tmp_path / "dpexp.log").read_text(encoding="utf-8").splitlines():
        tags = re.findall(r"rank=(\d)", line)
        assert len(set(tags)) == 1, line


def test_without_the_preset_nothing_is_printed_per_batch(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    capfd.readouterr()
    dpexp.run(["parallel=dp", "num_devices=3"], folder=tmp_path)
    assert capfd.readouterr().out == ""


def test_the_command_line_prints_the_lines_before_its_table(cli: Callable[..., Any]) -> None:
    ended = cli("+experiment=tutorial", "parallel=dp", "num_devices=3", "steps=1")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[:5] == [
        "Let's use 3 devices (emulated on cpu)",
        *[inside(10)] * 3,
        outside(30),
    ]
    assert "In Model" not in ended.stderr
