"""What a cell's job asks Slurm for."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
from builders import composed
from omegaconf import OmegaConf

from dpexp.config import load
from dpexp.errors import ConfigError
from dpexp.schema import Config
from dpexp.slurm_requests import Request, check_ranks_from, request_of


def unasked() -> NoReturn:
    raise AssertionError("the cluster was asked for nothing")


def made(*overrides: str) -> Config:
    given: dict[str, Any] = dict(each.split("=", 1) for each in overrides)
    count = given.get("num_devices", "auto")
    given["num_devices"] = int(count) if count.isdigit() else count
    return load(composed(given.pop("parallel", "none"), given))


def request(*overrides: str, launcher: dict[str, Any] | None = None, gpus: bool = True) -> Request:
    node = OmegaConf.create({"nodes": 1, "tasks_per_node": 1, **(launcher or {})})
    return request_of(made(*overrides), node, lambda: gpus)


@pytest.mark.parametrize(
    ("overrides", "gpus"),
    [
        (("parallel=ddp", "num_devices=4", "device=cuda"), 4),
        (("parallel=dp", "num_devices=2", "device=cuda"), 2),
        (("parallel=none", "device=cuda"), 1),
        (("parallel=none", "num_devices=4", "device=cuda"), None),  # to be skipped
        (("parallel=ddp", "num_devices=2", "device=cuda:1"), 3),  # the second and the third
        (("parallel=ddp", "num_devices=4", "device=cpu"), None),
        (("parallel=ddp", "num_devices=auto", "device=cpu"), None),
        (("parallel=ddp", "num_devices=4", "device=auto"), 4),
    ],
)
def test_gpus_follow_num_devices(overrides: tuple[str, ...], gpus: int | None) -> None:
    assert request(*overrides) == Request(gpus_per_node=gpus)


def test_the_device_auto_is_what_the_cluster_has() -> None:
    assert request("parallel=ddp", "num_devices=4", gpus=False) == Request()
    node = OmegaConf.create({"tasks_per_node": 1})
    request_of(made("device=cpu"), node, unasked)  # asked for nobody else


@pytest.mark.parametrize(
    "own",
    [
        {"gpus_per_node": 8},
        {"gres": "gpu:a100:2"},
        {"additional_parameters": {"gpus-per-task": 1}},
    ],
)
def test_what_the_user_asks_for_stands(own: dict[str, Any]) -> None:
    asked = ("parallel=ddp", "num_devices=auto", "device=cuda")
    assert request(*asked, launcher=own) == Request()
    with pytest.raises(ConfigError, match=r"num_devices='auto': .*gpus_per_node=4"):
        request(*asked)
    with pytest.raises(ConfigError, match="num_devices"):
        request(*asked, launcher={"cpus_per_gpu": 4, "gpus_per_node": None})


@pytest.mark.parametrize(
    ("count", "per_node", "nodes", "tasks"),
    [(1, 1, 1, 1), (3, 1, 3, 1), (8, 4, 2, 4), (2, 4, 1, 2), (4, 4, 1, 4)],
)
def test_nodes_follow_the_number_of_ranks(
    count: int, per_node: int, nodes: int, tasks: int
) -> None:
    overrides = ("parallel=ddp", "parallel.ranks_from=slurm", f"num_devices={count}")
    launcher = {"tasks_per_node": per_node}
    assert request(*overrides, "device=cpu", launcher=launcher) == Request(nodes, tasks)
    assert request(*overrides, "device=cuda", launcher=launcher) == Request(nodes, tasks, tasks)


def test_one_process_is_one_task_with_all_of_its_gpus() -> None:
    overrides = ("parallel=dp", "parallel.ranks_from=slurm", "num_devices=4", "device=cuda")
    assert request(*overrides, launcher={"tasks_per_node": 2}) == Request(1, 1, 4)


@pytest.mark.parametrize(
    ("overrides", "launcher", "words"),
    [
        (("num_devices=2",), {"tasks_per_node": 2}, r"tasks_per_node=2: each task would be a run"),
        (("num_devices=2",), {"nodes": 2}, r"hydra.launcher.nodes=2: .* follows num_devices"),
        (("num_devices=6", "parallel.ranks_from=slurm"), {"tasks_per_node": 4}, r"evenly.*=4"),
        (("num_devices=auto", "parallel.ranks_from=slurm"), {}, r"the number of tasks follows"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(
    overrides: tuple[str, ...], launcher: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        request("parallel=ddp", *overrides, launcher=launcher)


def test_restarts_of_sruns_tasks_are_refused() -> None:
    check_ranks_from(made("parallel=ddp", "parallel.ranks_from=slurm"))
    check_ranks_from(load(composed("ddp", {"parallel.max_restarts": 1})))
    both = {"parallel.max_restarts": 1, "parallel.ranks_from": "slurm"}
    with pytest.raises(ConfigError, match="max_restarts=1: srun starts no task again"):
        check_ranks_from(load(composed("ddp", both)))
