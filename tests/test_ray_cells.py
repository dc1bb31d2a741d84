"""What a cell asks Ray for, and what is refused. Ray itself is not needed."""

from __future__ import annotations

from typing import Any

import pytest
from builders import make_config

from dpexp.errors import ConfigError
from dpexp.ray_cells import Asked, Node, asked_by, refuse_too_much

CPUS = [Node(4, 0), Node(8, 0)]
GPUS = [Node(16, 2), Node(32, 4)]


@pytest.mark.parametrize(
    ("strategy", "devices", "device", "nodes", "threads", "expected"),
    [
        ("none", "auto", "cpu", CPUS, None, Asked(1, 0, 1)),
        ("ddp", 4, "cpu", CPUS, None, Asked(4, 0, 1)),
        ("dp", 4, "cpu", CPUS, None, Asked(4, 0, 4)),  # one process, a thread for each device
        ("ddp", 4, "cpu", CPUS, 2, Asked(8, 0, 2)),
        ("ddp", "auto", "auto", CPUS, None, Asked(8, 0, 1)),
        ("ddp", "auto", "auto", GPUS, None, Asked(4, 4, 1)),
        ("none", "auto", "auto", GPUS, None, Asked(1, 1, 1)),
        ("ddp", 2, "cpu", GPUS, None, Asked(2, 0, 1)),
        ("ddp", 2, "cuda", CPUS, None, Asked(2, 2, 1)),  # refused, not changed into a CPU
        ("dp", 2, "cuda:1", GPUS, None, Asked(2, 3, 2)),  # its number 1 is the second that it gets
        ("none", 4, "auto", GPUS, None, Asked(1, 1, 1)),  # a skipped cell
    ],
)
def test_a_cell_asks_for_a_core_and_on_cuda_a_gpu_for_each_device(
    strategy: str, devices: Any, device: str, nodes: list[Node], threads: Any, expected: Asked
) -> None:
    config = make_config(strategy, num_devices=devices, device=device)
    assert asked_by(config, nodes, {}, threads, None) == expected


def test_the_cores_of_this_machine_count_where_the_cluster_is_on_it() -> None:
    assert asked_by(make_config("ddp"), CPUS, {}, None, 2) == Asked(2, 0, 1)


def test_what_the_user_says_wins_and_the_ranks_share_it() -> None:
    config = make_config("ddp", num_devices=2)
    assert asked_by(config, GPUS, {"num_cpus": 8}, None, None) == Asked(8, 2, 4)
    assert asked_by(config, GPUS, {"num_cpus": 8}, 3, None) == Asked(8, 2, 3)
    assert asked_by(config, GPUS, {"num_cpus": 0.5}, None, None) == Asked(0.5, 2, 1)
    assert asked_by(config, GPUS, {"num_gpus": 0}, None, None) == Asked(2, 0, 1)


@pytest.mark.parametrize(
    ("asked", "own", "words"),
    [
        (Asked(2, 8, 1), {}, r"num_devices=8: .*num_gpus=8; the most is 4\. Try: fewer num_dev"),
        (Asked(64, 1, 8), {}, r"num_devices=8: .*num_cpus=64; the most is 32"),
        (Asked(50, 0, 1), {"num_cpus": 50}, r"ray\.remote\.num_cpus=50: .*num_cpus=50; .* 32"),
        (Asked(24, 4, 1), {}, "num_cpus=24 and num_gpus=4 together"),
    ],
)
def test_what_no_machine_has_is_refused_and_says_what_there_is(
    asked: Asked, own: dict[str, Any], words: str
) -> None:
    nodes = [Node(32, 2), Node(16, 4)]
    with pytest.raises(ConfigError, match=words):
        refuse_too_much(make_config("ddp", num_devices=8), asked, nodes, own)


def test_what_one_machine_has_is_not() -> None:
    refuse_too_much(make_config("ddp", num_devices=4), Asked(32, 4, 1), GPUS, {})
    with pytest.raises(ConfigError, match="the most is 0"):
        refuse_too_much(make_config("ddp", num_devices=4), Asked(1, 0, 1), [], {})
