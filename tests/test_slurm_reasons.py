"""What Slurm's commands say, and what is made of it. The commands are scripts here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from builders import make_run_result

from dpexp import slurm
from dpexp.env_slurm import Step
from dpexp.errors import ConfigError
from dpexp.records import ErrorRecord
from dpexp.slurm import NoAnswerError, SlurmJob

JOB = SlurmJob("7_0", "RUNNING", "None", "30:00", "n1")
STOPPED = ErrorRecord("interrupted", "Interrupted", "stopped by SIGTERM", 1, 5, phase="forward")


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that are found first."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_jobs_that_are_forgotten_are_no_failure_and_a_silent_controller_is_none(
    commands: Path,
) -> None:
    program(commands, "squeue", "echo '7_0|CANCELLED|None|30:00|n1'; echo '8|RUNNING|None|1:00|n2'")
    known = slurm.jobs(["7", "8"])
    assert known["7_0"] == replace(JOB, state="CANCELLED")
    assert (known["7_0"].active, known["8"].active) == (False, True)
    program(
        commands, "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    )
    assert slurm.jobs(["7"]) == {}
    program(commands, "squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(NoAnswerError, match="Unable to contact"):
        slurm.jobs(["7"])


def test_a_command_that_is_missing_or_hangs_is_no_answer(
    commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(commands))
    with pytest.raises(NoAnswerError, match="squeue is not installed here"):
        slurm.jobs(["7"])
    slurm.refuse_jobs_below(commands)
    monkeypatch.setattr(slurm, "ANSWER_S", 0.2)
    program(commands, "squeue", "exec /bin/sleep 20")
    with pytest.raises(NoAnswerError, match=r"did not answer within 0\.2 s"):
        slurm.jobs(["7"])


def test_a_sweep_does_not_go_on_while_its_jobs_wait(commands: Path, tmp_path: Path) -> None:
    place = tmp_path / "sweep"
    program(commands, "squeue", f"echo '7_0|{place}/.submitit/a.sh'; echo '8|/else/.submitit/b.sh'")
    with pytest.raises(ConfigError, match=r"resume=.*still wait or run: 7_0\. Try: .*scancel 7_0"):
        slurm.refuse_jobs_below(place)
    slurm.refuse_jobs_below(tmp_path / "sweep2")


@pytest.mark.parametrize(
    ("shown", "partition", "found"),
    [
        ("debug*|gpu:a100:4(S:0-1)", None, True),
        ("debug*|(null)\nbig|gpu:4", None, False),  # only the default one counts
        ("big|(null)\nbig|nic:1,gpu:4", "big", True),
        ("big|gpumem:4", "big", False),
    ],
)
def test_a_partition_has_gpus_if_one_of_its_nodes_has(
    commands: Path, shown: str, partition: str | None, found: bool
) -> None:
    program(commands, "sinfo", f"cat <<END\n{shown}\nEND")
    assert slurm.has_gpus(partition) is found


@pytest.mark.parametrize(
    ("state", "reason", "kind", "words"),
    [
        ("TIMEOUT", "TimeLimit", "time_limit", "over its time limit of 30:00"),
        ("COMPLETING", "TimeLimit", "time_limit", "hydra.launcher.timeout_min"),
        ("CANCELLED", "None", "interrupted", "Slurm job 7_0 was cancelled (scancel"),
        ("OUT_OF_MEMORY", "OutOfMemory", "oom", "hydra.launcher.mem_gb"),
        ("NODE_FAIL", "NodeFail", "crash", "on n1 ended as NODE_FAIL, reason NodeFail"),
        ("FAILED", "NonZeroExitCode", "crash", "its output is in .submitit/7_0"),
    ],
)
def test_why_a_job_ended(state: str, reason: str, kind: str, words: str) -> None:
    ended = slurm.why(replace(JOB, state=state, reason=reason))
    assert ended is not None
    assert ended.kind == kind
    assert words in ended.message


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETED", "COMPLETING"])
def test_a_job_that_runs_or_is_done_was_not_ended(state: str) -> None:
    assert slurm.why(replace(JOB, state=state)) is None


def test_a_run_that_slurm_ends_says_so_and_keeps_where_it_was(
    commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = make_run_result(status="interrupted", error=STOPPED)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert slurm.explained(stopped) is stopped
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    program(commands, "squeue", "echo '7|COMPLETING|TimeLimit|30:00|n1'")
    late = slurm.explained(stopped)
    assert late.error is not None
    assert (late.status, late.error.kind) == ("failed", "time_limit")
    assert (late.error.rank, late.error.step, late.error.phase) == (1, 5, "forward")
    program(commands, "squeue", "echo '7|COMPLETING|None|30:00|n1'")
    ended = slurm.explained(stopped)
    assert ended.error is not None
    assert (ended.status, ended.error.type) == ("interrupted", "SlurmCancelled")
    assert "was ended before its time limit" in ended.error.message
    program(commands, "squeue", "echo '7|RUNNING|None|30:00|n1'")
    assert slurm.explained(stopped) == stopped  # somebody else's signal
    own = make_run_result(status="failed", error=replace(STOPPED, kind="user_error"))
    program(commands, "squeue", "exit 1")
    assert slurm.explained(own) is own
    assert "Slurm did not say why" in slurm.explained(stopped).notes[-1]


def test_the_first_node_is_at_its_name_or_at_the_address_that_slurm_has(commands: Path) -> None:
    names = 'if [ "$2" = hostnames ]; then echo %s; else echo "A=x NodeAddr=10.9.8.7 B=y"; fi'
    program(commands, "scontrol", names % "localhost")
    assert slurm.first_address("localhost,n1") == "localhost"
    program(commands, "scontrol", names % "n0.invalid")
    assert slurm.first_address("n0.invalid") == "10.9.8.7"
    program(commands, "scontrol", "exit 1")
    with pytest.raises(ConfigError, match=r"MASTER_ADDR: .*Try: set MASTER_ADDR"):
        slurm.first_address("n[0-1]")


def test_steps_and_jobs_have_ports_of_their_own() -> None:
    steps = [Step(job, step, 0, 0, 0, 2, 2, "n0") for job in (70, 71) for step in (0, 1)]
    ports = [slurm.port_of(step) for step in steps]
    assert ports == [21120, 21121, 21136, 21137]
    assert slurm.port_of(Step(10**9, 3, 0, 0, 0, 2, 2, "n0")) < 32000


def test_without_srun_its_tasks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_STEP_ID", "TORCHELASTIC_RUN_ID", "SUBMITIT_EXECUTOR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="ranks_from='slurm': srun has not started this process"):
        slurm.take_rank()
    with pytest.raises(ConfigError, match="hydra/launcher=submitit_slurm"):
        slurm.take_rank(in_sweep=True)
