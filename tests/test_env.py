"""Environment variables as dpexp reads them."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from dpexp import env

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "abc",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment with nothing in it, for this test alone."""
    fresh: dict[str, str] = {}
    monkeypatch.setattr(env, "os", SimpleNamespace(environ=fresh))
    return fresh


def test_torchruns_variables_make_an_outer_launcher(variables: dict[str, str]) -> None:
    variables.update(TORCHRUN)
    assert env.outer_launcher() == env.OuterLauncher(
        rank=3,
        local_rank=1,
        world_size=4,
        local_world_size=2,
        run_id="abc",
        master_addr="10.0.0.1",
        master_port=29500,
        agents_store=True,
    )


@pytest.mark.parametrize(("told", "host"), [({}, 0), ({"GROUP_RANK": "2"}, 2)])
def test_the_hosts_number_is_the_agents(
    variables: dict[str, str], told: dict[str, str], host: int
) -> None:
    variables.update(TORCHRUN, SLURM_NODEID="3", **told)
    outer = env.outer_launcher()
    assert outer is not None
    assert outer.host == host


def test_what_the_user_has_set_stands_and_empty_is_not_set(variables: dict[str, str]) -> None:
    variables.update(GLOO_SOCKET_IFNAME="", NCCL_SOCKET_IFNAME="eth0")
    own = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    whole = env.filled_in(own)
    assert whole == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "eth0"}
    assert variables["GLOO_SOCKET_IFNAME"] == ""
    env.fill_in(own)
    assert variables == whole


@pytest.mark.parametrize("missing", ["TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "MASTER_ADDR"])
def test_without_one_of_torchruns_variables_there_is_no_outer_launcher(
    variables: dict[str, str], missing: str
) -> None:
    variables.update(TORCHRUN)
    del variables[missing]
    assert env.outer_launcher() is None


def test_an_interactive_slurm_shell_is_no_outer_launcher(variables: dict[str, str]) -> None:
    variables.update(
        SLURM_JOB_ID="1",
        SLURM_NTASKS="4",
        SLURM_PROCID="0",
        SLURM_LOCALID="0",
        SLURM_JOB_NAME="bash",
        RANK="0",
        WORLD_SIZE="4",
    )
    assert env.outer_launcher() is None


@pytest.mark.parametrize(
    ("raw", "threads"),
    [("2", 2), (" 3 ", 3), ("4,2", 4), ("", None), ("0", None), ("-1", None), ("many", None)],
)
def test_requested_threads_are_the_first_entry_of_omp_num_threads(
    variables: dict[str, str], raw: str, threads: int | None
) -> None:
    variables["OMP_NUM_THREADS"] = raw
    assert env.requested_threads() == threads


def test_threads_are_not_requested_when_the_variable_is_unset(variables: dict[str, str]) -> None:
    assert variables == {}
    assert env.requested_threads() is None


@pytest.mark.parametrize(("value", "found"), [("lo", "lo"), ("", None)])
def test_an_empty_interface_name_is_none(
    variables: dict[str, str], value: str, found: str | None
) -> None:
    variables["GLOO_SOCKET_IFNAME"] = value
    assert env.socket_interface() == found


def test_usable_cores_are_those_of_the_affinity_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda pid: {0, 5, 7} if pid == 0 else {0}, raising=False
    )
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert env.usable_cores() == 3


@pytest.mark.parametrize(("count", "cores"), [(6, 6), (None, 1)])
def test_without_affinity_all_cores_are_usable(
    monkeypatch: pytest.MonkeyPatch, count: int | None, cores: int
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert env.usable_cores() == cores


@pytest.mark.parametrize(("wanted", "full"), [("1", True), ("0", False), (None, False)])
def test_the_users_wish_for_full_errors_survives_taking_over_hydras(
    variables: dict[str, str], wanted: str | None, full: bool
) -> None:
    if wanted is not None:
        variables["HYDRA_FULL_ERROR"] = wanted
    env.take_over_hydra_errors()
    env.take_over_hydra_errors()  # in a process started by one that did
    assert variables["HYDRA_FULL_ERROR"] == "1"
    assert env.full_errors() is full


def test_restore_makes_the_environment_exactly_the_snapshot(variables: dict[str, str]) -> None:
    variables.update(KEPT="1", CHANGED="1")
    taken = env.snapshot()
    variables.update(CHANGED="2", ADDED="3")
    del variables["KEPT"]
    env.restore(taken)
    assert variables == {"KEPT": "1", "CHANGED": "1"}


def test_a_snapshot_does_not_follow_later_changes(variables: dict[str, str]) -> None:
    variables["KEY"] = "before"
    taken = env.snapshot()
    variables["KEY"] = "after"
    assert taken == {"KEY": "before"}


@pytest.mark.parametrize("raw", ["", "-1", "GPU-8932f937", "0,,1"])
def test_visible_devices_are_recorded_raw(variables: dict[str, str], raw: str) -> None:
    variables["CUDA_VISIBLE_DEVICES"] = raw
    recorded = env.recorded()
    assert recorded["CUDA_VISIBLE_DEVICES"] == raw
    assert recorded["OMP_NUM_THREADS"] is None


def test_trackers_are_kept_quiet_but_for_what_the_user_has_set(variables: dict[str, str]) -> None:
    variables["WANDB_ERROR_REPORTING"] = "true"
    env.quiet_trackers()
    assert variables["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert variables["WANDB_ERROR_REPORTING"] == "true"
