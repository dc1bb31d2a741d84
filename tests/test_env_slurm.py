"""Slurm's variables as dpexp reads them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dpexp import env, env_slurm

STEP = {
    "SLURM_JOB_ID": "70",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "n[0-2]",
}


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment with nothing in it, for this test alone."""
    fresh: dict[str, str] = {}
    for module in (env, env_slurm):
        monkeypatch.setattr(module, "os", SimpleNamespace(environ=fresh))
    return fresh


def test_a_task_of_srun_knows_its_place(variables: dict[str, str]) -> None:
    assert env_slurm.step() is None
    variables.update(STEP)
    assert env_slurm.step() == env_slurm.Step(70, 2, 4, 0, 2, 5, 1, "n[0-2]")
    variables["SLURM_NODEID"] = "1"
    step = env_slurm.step()
    assert step is not None
    assert step.local_world_size == 2


def test_a_task_of_srun_becomes_a_rank_as_if_torchrun_had_started_it(
    variables: dict[str, str],
) -> None:
    variables.update(STEP, TORCHELASTIC_USE_AGENT_STORE="True", RANK="1", GROUP_RANK="7")
    step = env_slurm.step()
    assert step is not None
    for _ in range(2):  # what is set by now is not asked for again
        outer = env_slurm.take_rank(step, iter(["10.0.0.1"]).__next__, 21122)
        assert outer == env.outer_launcher()
        assert (outer.rank, outer.local_rank, outer.world_size) == (4, 0, 5)
        assert (outer.local_world_size, outer.run_id, outer.name) == (1, "slurm-70.2", "Slurm")
        assert (outer.master_addr, outer.master_port) == ("10.0.0.1", 21122)
        assert outer.host == 2
        assert not outer.agents_store  # rank 0 has the store


def test_an_address_that_the_user_has_set_is_taken(variables: dict[str, str]) -> None:
    variables.update(STEP, MASTER_ADDR="10.0.0.9", MASTER_PORT="29600")
    step = env_slurm.step()
    assert step is not None
    outer = env_slurm.take_rank(step, iter([]).__next__, 21122)
    assert (outer.master_addr, outer.master_port) == ("10.0.0.9", 29600)


def test_a_job_of_an_array_is_called_as_slurm_calls_it(variables: dict[str, str]) -> None:
    assert env_slurm.job() is None
    assert env_slurm.tasks() == 1
    variables.update(SLURM_JOB_ID="71", SLURM_NTASKS="4")
    assert env_slurm.job() == "71"
    assert env_slurm.tasks() == 4
    variables.update(SLURM_ARRAY_JOB_ID="70", SLURM_ARRAY_TASK_ID="1")
    assert env_slurm.job() == "70_1"
