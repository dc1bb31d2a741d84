"""A real Slurm: cells as its jobs, ranks as its tasks, and shells that are neither."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import TESTS
from slurmcluster import SlurmCluster, slurm_cluster, why_not

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
    pytest.mark.timeout(400),
]
DPEXP = (sys.executable, "-m", "dpexp")
PAGE = (TESTS.parent / "docs/clusters.md").read_text("utf-8").split("\n## Slurm\n")[1]
COMMANDS = re.findall(r"^```bash\n(.*?)\n```$", PAGE.split("\n## ")[0], re.MULTILINE)
SWEEP, SPREAD, SPANNING, SHELL = COMMANDS


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    with (
        tempfile.TemporaryDirectory(prefix="dpexp-slurm-") as folder,
        slurm_cluster(Path(folder)) as cluster,
    ):
        yield cluster


@pytest.fixture
def here(slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to work in, with Slurm's commands meaning this cluster; no job is left."""
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        programs = Path(sys.executable).parent
        patch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
        patch.setenv("PYTHONPATH", f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("SLURM_CONF", slurm.variables["SLURM_CONF"])
        yield tmp_path
        slurm.end_jobs()


@pytest.fixture
def submitit() -> None:
    """Hydra's launcher for Slurm (the extra launchers)."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")


def shown(command: str, *added: str) -> list[str]:
    """A command of the page, with more behind it."""
    return ["bash", "-c", f"exec {command} {shlex.join(added)}"]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=300, check=False
    )


def results(folder: Path) -> dict[str, dict[str, Any]]:
    files = sorted(folder.glob("*/run.json"))
    return {path.parent.name: json.loads(path.read_text()) for path in files}


def wait_for(count: int, pattern: str, process: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + 240
    while len(list(Path().glob(pattern))) < count:
        assert process.poll() is None, "the sweep ended too soon"
        assert time.monotonic() < deadline_s, f"no {count} of {pattern}"
        time.sleep(0.2)


def new_entries(slurm: SlurmCluster, before: set[str], count: int) -> list[dict[str, str]]:
    """What the queue has got since, once there are so many; what waits of an array is one."""
    deadline_s = time.monotonic() + 60
    while len(new := slurm.jobs().keys() - before) < count and time.monotonic() < deadline_s:
        time.sleep(0.2)
    return [slurm.jobs()[name] for name in new]


def test_a_cell_that_is_cancelled_and_one_over_its_time_limit_are_results_and_resume_completes(
    slurm: SlurmCluster, here: Path, submitit: None
) -> None:
    before = set(slurm.jobs())
    added = (
        "device=cpu", "hydra.sweep.dir=sweep",
        "model=custom", "model._target_=userlaunched.Told", "+model.how=wait",
    )  # fmt: skip
    with subprocess.Popen(shown(SWEEP, *added), stderr=subprocess.PIPE, text=True) as sweep:
        wait_for(6, "sweep/*/steps.rank0.csv", sweep)
        jobs = {name: job for name, job in slurm.jobs().items() if name not in before}
        names = {job["ArrayTaskId"]: name for name, job in jobs.items()}
        assert slurm.run("scancel", names["3"]).returncode == 0
        # Slurm looks for jobs over their limit every half minute; this is its word for "at once".
        # A time that is over when it is read is refused, hence the two seconds.
        assert (
            slurm.run("scontrol", "update", f"jobid={names['1']}", "EndTime=now+2").returncode == 0
        )
        wait_for(1, "sweep/1_*/run.json", sweep)
        (here / "go").touch()
        told = sweep.communicate(timeout=120)[1]
    assert sweep.returncode == 1, told
    found = results(here / "sweep")
    assert {name: each["status"] for name, each in found.items()} == {
        "0_dp_n1": "ok",
        "1_dp_n2": "failed",
        "2_dp_n3": "ok",
        "3_ddp_n1": "interrupted",
        "4_ddp_n2": "ok",
        "5_ddp_n3": "ok",
    }
    cancelled, late = found["3_ddp_n1"]["error"], found["1_dp_n2"]["error"]
    assert (cancelled["kind"], cancelled["type"]) == ("interrupted", "SlurmCancelled")
    assert f"Slurm job {names['3']} was cancelled (scancel" in cancelled["message"]
    assert (late["kind"], late["type"]) == ("time_limit", "SlurmTimeLimit")
    # The limit is then what the job has had, in minutes.
    text = rf"Slurm job {names['1']} was over its time limit of \d+:00"
    assert re.search(text, late["message"])
    assert "hydra.launcher.timeout_min" in late["message"]
    assert late["phase"] == "forward"  # the cell itself has written what it had
    assert late["message"] in (here / "sweep/report.md").read_text()
    assert "Traceback" not in told
    assert "sacct" not in told  # there is no accounting

    (script,) = (here / "sweep/.submitit").glob(".submission_file_*.sh")
    assert "--signal" not in script.read_text()  # submitit would take it for a wish to run again
    assert {each["Requeue"] for each in jobs.values()} == {"0"}
    assert not any("TresPerNode" in each for each in jobs.values())

    again = run(*shown(SWEEP, *added, f"resume={here / 'sweep'}"))
    assert again.returncode == 0, again.stderr
    assert "4 of 6 cells stay as they are, 2 run" in again.stderr
    assert {each["status"] for each in results(here / "sweep").values()} == {"ok"}


def test_jobs_ask_for_gpus_as_num_devices_says_and_outlive_only_a_sweep_that_is_killed(
    slurm: SlurmCluster, here: Path, submitit: None
) -> None:
    before = set(slurm.jobs())
    arguments = [
        *DPEXP, "-m", "hydra/launcher=submitit_slurm", "hydra.sweep.dir=sweep",
        "device=auto,cpu", "parallel=none,ddp", "num_devices=1,4", "hydra.launcher.cpus_per_task=2",
        "+hydra.launcher.additional_parameters.hold=true",
    ]  # fmt: skip
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as sweep:
        asked = new_entries(slurm, before, 3)
        sweep.kill()
    refused = run(*arguments, f"resume={here / 'sweep'}")
    assert refused.returncode == 1
    assert "Slurm jobs of the earlier start still wait or run: " in refused.stderr
    assert run("scancel", *slurm.active()).returncode == 0
    before = set(slurm.jobs())
    again = [*arguments, f"resume={here / 'sweep'}"]
    with subprocess.Popen(again, stderr=subprocess.PIPE, text=True) as sweep:
        new_entries(slurm, before, 3)
        sweep.send_signal(signal.SIGINT)
        told = sweep.communicate(timeout=60)[1]
    assert sweep.returncode == 130, told
    assert slurm.active() == []
    assert "device=auto: the cluster has GPUs" in told
    gpus = {each.get("TresPerNode"): each.get("ArrayTaskId", "").split("%")[0] for each in asked}
    # On CPUs four, and none_n4 on GPUs, which is to be skipped; none_n1 and ddp_n1; ddp_n4.
    assert gpus == {None: "0-4", "gres:gpu:1": "0-1", "gres:gpu:4": ""}
    assert {each["CPUs/Task"] for each in asked} == {"2"}
    scripts = [path.read_text() for path in (here / "sweep/.submitit").glob(".submission_*.sh")]
    assert all("--cpus-per-task=2 " in each.split("\nsrun ")[1] for each in scripts)


def test_tasks_of_two_nodes_are_the_ranks_of_one_run_like_those_of_one_host(
    slurm: SlurmCluster, here: Path
) -> None:
    four = ("parallel=ddp", "num_devices=4", "task=train", "hydra.run.dir=own")
    own = run(*DPEXP, *four)
    assert own.returncode == 0, own.stderr
    spread = run(*shown(SPREAD))
    assert spread.returncode == 0, spread.stderr
    (path,) = here.glob("outputs/runs/*/*/run.json")
    alone, found = json.loads((here / "own/run.json").read_text()), json.loads(path.read_text())
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2, 3]
    assert [each["ranks"] for each in found["hosts"]] == [[0, 1], [2, 3]]
    assert found["loss"] == alone["loss"]
    assert found["model"]["final_sha256"] == alone["model"]["final_sha256"]
    assert len(list(path.parent.glob("steps.rank*.csv"))) == 4
    assert len(list(path.parent.glob("events.out.tfevents.*"))) == 1
    assert (path.parent / ".hydra/overrides.yaml").exists()


def test_a_cell_of_a_sweep_may_span_nodes(slurm: SlurmCluster, here: Path, submitit: None) -> None:
    before = set(slurm.jobs())
    ended = run(*shown(SPANNING, "hydra.sweep.dir=sweep"))
    assert ended.returncode == 0, ended.stderr
    found = results(here / "sweep")
    assert {name: each["status"] for name, each in found.items()} == {
        "0_ddp_n1": "ok",
        "1_ddp_n2": "ok",
    }
    assert [each["ranks"] for each in found["1_ddp_n2"]["hosts"]] == [[0], [1]]
    jobs = [each for name, each in slurm.jobs().items() if name not in before]
    shapes = sorted((each["NumNodes"], each["NumTasks"], each["TresPerNode"]) for each in jobs)
    assert shapes == [("1", "1", "gres:gpu:1"), ("2", "2", "gres:gpu:1")]


def test_in_a_shell_of_an_allocation_a_run_waits_for_no_task(
    slurm: SlurmCluster, here: Path
) -> None:
    plain = SHELL[SHELL.index("python") :]
    script = here / "job.sh"
    script.write_text(f"#!/bin/bash\n{plain} hydra.run.dir=batch\n")
    shape = ("--nodes=2", "--ntasks-per-node=2")
    with subprocess.Popen(["sbatch", "--wait", *shape, "--output=out", str(script)]) as batch:
        shell = run(*shown(SHELL, "hydra.run.dir=shell"))
        assert batch.wait(timeout=120) == 0, (here / "out").read_text()
    assert shell.returncode == 0, shell.stderr
    for name in ("batch", "shell"):
        found = json.loads((here / name / "run.json").read_text())
        assert found["status"] == "ok"
        assert found["num_processes"] == 2
        assert any("Slurm's variables tell of 4 tasks: not used" in n for n in found["notes"])


@pytest.mark.parametrize(("nodes", "tasks_per_node", "lost"), [(2, 2, 3), (2, 2, 0), (3, 1, 2)])
def test_a_task_that_is_lost_is_named(
    slurm: SlurmCluster, here: Path, nodes: int, tasks_per_node: int, lost: int
) -> None:
    command = SPREAD.replace("--nodes=2", f"--nodes={nodes}")
    command = command.replace("--ntasks-per-node=2", f"--ntasks-per-node={tasks_per_node}")
    dies = (f"inject.die_rank={lost}", "inject.at_step=9")
    ended = run(*shown(command, "epochs=null", "steps=100000", *dies))
    assert ended.returncode != 0
    (path,) = here.glob("outputs/runs/*/*/run.json")
    error = json.loads(path.read_text())["error"]
    assert (error["kind"], error["rank"]) == ("crash", lost), error
    assert re.match(rf"rank {lost} on \S+ ended without a word", error["message"])


def test_a_second_ctrl_c_waits_for_no_job(slurm: SlurmCluster, here: Path, submitit: None) -> None:
    arguments = [
        *DPEXP, "-m", "hydra/launcher=submitit_slurm", "hydra.sweep.dir=sweep", "device=cpu",
        "model=custom", "model._target_=userlaunched.Told", "+model.how=stuck", "num_devices=1",
    ]  # fmt: skip
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as sweep:
        wait_for(1, "stuck.*", sweep)
        sweep.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert sweep.poll() is None, "the job, which hears no signal, has ended too soon"
        sweep.send_signal(signal.SIGINT)
        told = sweep.communicate(timeout=60)[1]
    assert sweep.returncode == 130, told
    assert not (here / "sweep/report.md").exists()
    deadline_s = time.monotonic() + 60
    (rank,) = (int(path.name.removeprefix("stuck.")) for path in here.glob("stuck.*"))
    while (slurm.active() or psutil.pid_exists(rank)) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    assert slurm.active() == []
    assert not psutil.pid_exists(rank)


def test_in_a_shell_of_srun_a_run_starts_its_own_ranks(slurm: SlurmCluster, here: Path) -> None:
    plain = SHELL[SHELL.index("python") :]
    ours, theirs = os.openpty()
    with subprocess.Popen(
        ["srun", "--pty", "bash", "-c", f"{plain} hydra.run.dir=pty"],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
    ) as shell:  # fmt: skip
        os.close(theirs)
        told = b""
        with contextlib.suppress(OSError):  # the terminal is gone: so Linux tells its end
            while part := os.read(ours, 4096):
                told += part
        assert shell.wait(timeout=120) == 0, told
    os.close(ours)
    assert b"ddp-n2 on cpu" in told
    found = json.loads((here / "pty/run.json").read_text())
    assert (found["status"], found["num_processes"]) == ("ok", 2)
