"""What is said of each launcher, and what is refused. No plugin is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from omegaconf import OmegaConf

from dpexp import env
from dpexp.errors import ConfigError
from dpexp.launchers import (
    BASIC,
    JOBLIB,
    LOCAL,
    RAY,
    SLURM,
    changed_variables,
    refuse_launcher,
    simultaneous,
    typed,
)

TOGETHER = "disturb each other's timing"


def hydra_node(target: str, sweeper: dict[str, Any] | None = None, **settings: Any) -> Any:
    return OmegaConf.create(
        {
            "launcher": {"_target_": target, **settings},
            "sweeper": sweeper or {"max_batch_size": None},
            "job": {"env_set": {}},
        }
    )


def ray_node(init: dict[str, Any], remote: dict[str, Any] | None = None) -> Any:
    return hydra_node(RAY, ray={"init": init, "remote": remote or {}})


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (hydra_node(JOBLIB, n_jobs=2), "run at the same time (joblib, n_jobs=2)"),
        (hydra_node(JOBLIB, n_jobs=-1), "(joblib, n_jobs=-1)"),
        (hydra_node(LOCAL), "all run at the same time (submitit_local)"),
        (hydra_node(SLURM, array_parallelism=256), "may share a node (submitit_slurm)"),
        (ray_node({"address": None, "num_cpus": 2}), "run at the same time (ray)"),
        (ray_node({"address": "10.0.0.1:6379"}), "run at the same time (ray)"),
        (hydra_node("hydra_plugins.mine.Launcher"), "may run at the same time (launcher hydra_pl"),
        (hydra_node(JOBLIB, {"n_jobs": 2}, n_jobs=2), "(joblib, n_jobs=2)"),
    ],
)
def test_cells_that_run_together_are_warned_of(node: Any, words: str) -> None:
    warning = simultaneous(node) or ""
    assert words in warning
    assert TOGETHER in warning
    assert "Try: " in warning


@pytest.mark.parametrize(
    "node",
    [
        hydra_node(BASIC),
        hydra_node(BASIC, {"n_jobs": 2}),  # Optuna's default, one after the other all the same
        hydra_node(JOBLIB, n_jobs=1),
        hydra_node(JOBLIB, {"n_jobs": 1}, n_jobs=2),
        hydra_node(LOCAL, {"max_batch_size": 1}),
        hydra_node(SLURM, array_parallelism=1),
        hydra_node(SLURM, additional_parameters={"exclusive": True}),
        ray_node({"address": None, "num_cpus": 1}),
        ray_node({"address": None, "num_cpus": 4}, {"num_cpus": 4}),
    ],
)
def test_cells_that_run_one_after_the_other_are_not(node: Any) -> None:
    assert simultaneous(node) is None


def test_a_cell_on_ray_is_warned_if_it_left_a_core_to_another_one() -> None:
    for init, asked, warned in (({"num_cpus": 4}, 3, True), ({"num_cpus": 4}, 4, False)):
        for address in (None, "10.0.0.1:6379"):
            node = ray_node({"address": address, **init}, {"num_cpus": asked})
            assert (simultaneous(node, in_cell=True) is not None) is warned


def test_cells_with_cores_of_their_own_are_told_what_they_still_share() -> None:
    node = hydra_node(JOBLIB, n_jobs=2)
    pinned, others = simultaneous(node, pin=True) or "", simultaneous(node) or ""
    assert "With pin=true they have cores of their own; caches, memory bandwidth" in pinned
    assert "or pin=true" not in pinned
    assert "or pin=true, on a CPU" in others
    assert simultaneous(hydra_node(BASIC), pin=True) is None


@pytest.mark.parametrize("key", ["tasks_per_node", "nodes"])
def test_several_tasks_are_several_runs_in_one_folder_and_refused(key: str) -> None:
    refuse_launcher(hydra_node(LOCAL, tasks_per_node=1, nodes=1))
    with pytest.raises(ConfigError, match=rf"hydra.launcher.{key}=2: each task would be a run"):
        refuse_launcher(hydra_node(LOCAL, **{key: 2}))


def test_a_job_of_slurm_that_would_run_again_is_refused() -> None:
    refuse_launcher(hydra_node(SLURM, max_num_timeout=0, tasks_per_node=4))
    with pytest.raises(ConfigError, match=r"max_num_timeout=3: .*resume=last"):
        refuse_launcher(hydra_node(SLURM, max_num_timeout=3))


def test_a_variable_that_the_launcher_has_set_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPEXP_TYPED", "")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    env.remember_typed()
    node = ray_node({"address": None})
    assert changed_variables(node) == []
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    threads, devices = changed_variables(node)
    assert "OMP_NUM_THREADS=1: as many threads per process as the cell has asked Ray" in threads
    assert "CUDA_VISIBLE_DEVICES='' was set by the launcher (ray)" in devices
    node.job.env_set = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    assert changed_variables(node) == []  # the user's own choice


def test_without_a_command_that_was_typed_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DPEXP_TYPED", raising=False)
    assert changed_variables(hydra_node(JOBLIB)) == []


def test_the_command_that_repeats_a_sweep_names_launcher_and_sweeper() -> None:
    own = [
        "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=2",
        "+hydra.launcher.ray.init.num_cpus=1",
        "hydra/sweeper=optuna",
        "hydra.sweeper.direction=maximize",
        "hydra.sweep.dir=here",
        "hydra.mode=MULTIRUN",
    ]
    # The second is one of the cells' to resolve.
    task = ["seed=1,2", "+dataset.rows=${seed}"]
    node = OmegaConf.create({"overrides": {"hydra": own, "task": task}})
    assert typed(node) == [*own[:5], *task]


def test_ray_gets_a_token_of_its_own_and_what_the_user_set_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_USAGE_STATS_ENABLED")
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    env.protect_ray()
    first = env.snapshot()
    assert (first["RAY_AUTH_MODE"], first["RAY_USAGE_STATS_ENABLED"]) == ("token", "0")
    assert len(first["RAY_AUTH_TOKEN"]) == 64
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    env.protect_ray()
    assert "RAY_AUTH_TOKEN" not in env.snapshot()  # the mode was there already


def test_the_sweeps_process_is_told_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPEXP_SWEEP", json.dumps(None))
    assert env.sweep_process() is None
    env.announce_sweep("here", 12, 3.5)
    assert env.sweep_process() == ("here", 12, 3.5)


def test_a_start_method_that_ranks_cannot_find_is_replaced() -> None:
    """In joblib's processes the default is loky's own."""
    code = """
import multiprocessing
from multiprocessing import context
from dpexp import server

class Loky(context.BaseContext):
    _name = "loky"

context._default_context._actual_context = Loky()
assert multiprocessing.get_start_method() == "loky"
server.start(several_ranks=False)
print(multiprocessing.get_start_method() == server.method())
"""
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.stderr) == ("True\n", "")
