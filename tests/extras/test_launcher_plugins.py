"""Sweeps under Hydra's other launchers and under Optuna: the plugins themselves."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from conftest import TESTS, Cli
from omegaconf import OmegaConf
from pluginsweeps import JOBLIB, TOLD, WARNING, needs, results, statuses


@needs("hydra_joblib_launcher")
def test_joblib_runs_cells_side_by_side_with_folders_report_and_status_as_ever(
    cli: Cli, tmp_path: Path
) -> None:
    ended = cli(
        "-m", *JOBLIB, *TOLD, "+model.how=work,raise", "parallel=ddp", "num_devices=2,1",
        "hydra.sweep.dir=sweep",
    )  # fmt: skip
    sweep = tmp_path / "sweep"
    assert ended.returncode == 1, ended.stderr
    assert statuses(sweep) == {
        "0_ddp_n2": "ok",
        "1_ddp_n1": "ok",
        "2_ddp_n2": "failed",
        "3_ddp_n1": "failed",
    }
    assert ended.stderr.count(WARNING) == 1  # told once, and not by each cell
    for name, run in results(sweep).items():
        assert any(WARNING in note for note in run["notes"]) or run["status"] == "failed"
        log = (sweep / name / "dpexp.log").read_text()
        own, other = ("work", "raise") if run["status"] == "ok" else ("raise", "work")
        assert f"I {own}" in log
        assert f"I {other}" not in log
        assert len(list((sweep / name).glob("events.out.tfevents.*"))) == 1
    assert "told to raise" in results(sweep)["2_ddp_n2"]["error"]["message"]
    report = (sweep / "report.md").read_text()
    assert WARNING in report
    assert "hydra/launcher=joblib hydra.launcher.n_jobs=2" in report
    assert "Traceback" not in ended.stderr


@needs("hydra_submitit_launcher")
def test_submitit_waits_for_all_jobs_and_one_that_is_killed_is_a_result(
    cli: Cli, tmp_path: Path
) -> None:
    ended = cli(
        "-m", "hydra/launcher=submitit_local", *TOLD, "+model.how=kill,work", "num_devices=1",
        "hydra.sweep.dir=sweep",
    )  # fmt: skip
    sweep = tmp_path / "sweep"
    assert ended.returncode == 1, ended.stderr
    assert statuses(sweep) == {"0_none_n1": "failed", "1_none_n1": "ok"}
    lost = results(sweep)["0_none_n1"]["error"]
    assert lost["kind"] == "crash"
    assert "its process ended without a word" in lost["message"]
    assert (sweep / ".submitit").is_dir()
    assert len(json.loads((sweep / "sweep.json").read_text())["cells"]) == 2
    assert "Traceback" not in ended.stderr


@needs("hydra_ray_launcher")
def test_ray_gives_each_cell_its_cores_and_gpus_and_leaves_nothing_in_the_home_folder(
    tmp_path: Path,
) -> None:
    """Pretend GPUs: what cells ask for and get is Ray's; the cells run on the CPU."""
    home = tmp_path / "home"
    home.mkdir()
    variables = {**os.environ, "PYTHONPATH": str(TESTS), "HOME": str(home)}
    variables.pop("OMP_NUM_THREADS", None)
    sweep = tmp_path / "sweep"
    with subprocess.Popen(
        [sys.executable, "-m", "dpexp", "-m", "hydra/launcher=ray",
         "+hydra.launcher.ray.init.num_cpus=3", "+hydra.launcher.ray.init.num_gpus=4", *TOLD,
         "+model.how=wait", "parallel=ddp", "num_devices=1,2,8", f"hydra.sweep.dir={sweep}"],
        cwd=tmp_path, env=variables, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        deadline = time.monotonic() + 90
        while len(list(sweep.glob("*/steps.rank0.csv"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)  # the cells wait for the file, so both run now
        (tmp_path / "go").touch()
        _, errors = process.communicate(timeout=90)
    assert process.returncode == 1, errors
    runs = results(sweep)
    assert statuses(sweep) == {"0_ddp_n1": "ok", "1_ddp_n2": "ok", "2_ddp_n8": "failed"}
    one, two, eight = runs.values()
    devices = [run["environment"]["variables"]["CUDA_VISIBLE_DEVICES"] for run in (one, two)]
    assert sorted(map(len, (own := [set(each.split(",")) for each in devices]))) == [1, 2]
    assert not own[0] & own[1]
    assert [run["threads_per_process"] for run in (one, two)] == [1, 1]
    asked = OmegaConf.load(sweep / "1_ddp_n2/.hydra/hydra.yaml").hydra.launcher.ray.remote
    assert (asked.num_cpus, asked.num_gpus) == (2, 2)
    assert eight["error"]["kind"] == "config"
    assert "no machine of the cluster has num_gpus=8; the most is 4" in eight["error"]["message"]
    assert "OMP_NUM_THREADS=1: as many threads per process" in str(two["notes"])
    assert WARNING in str(two["notes"])  # it has left a core
    assert not (home / ".ray").exists()


@needs("hydra_ray_launcher")
def test_the_first_command_of_the_page_for_ray_does_what_it_says(cli: Cli, tmp_path: Path) -> None:
    page = (TESTS.parent / "docs/clusters.md").read_text("utf-8").split("\n## Ray\n")[1]
    command = page.split("```bash\n")[1].split("\n```")[0]
    python, *rest = command.split()
    assert (python, rest[:2]) == ("python", ["-m", "dpexp"])
    ended = cli(*rest[2:])
    assert ended.returncode == 0, ended.stderr
    (sweep,) = tmp_path.glob("outputs/sweeps/*/*")
    assert statuses(sweep) == {"0_ddp_n1": "ok", "1_ddp_n2": "ok"}


@needs("hydra_ray_launcher")
def test_ray_cells_run_on_a_cluster_that_is_there_and_goes_on(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands of docs/clusters.md, with another port."""
    page = (TESTS.parent / "docs/clusters.md").read_text("utf-8").split("\n## Ray\n")[1]
    _, start, sweep, _ = page.split("```bash\n")[2].split("```")[0].splitlines()
    for name, value in (
        ("RAY_AUTH_MODE", "token"),
        ("RAY_AUTH_TOKEN", "ab" * 32),
        ("RAY_USAGE_STATS_ENABLED", "0"),
        ("PYTHONPATH", str(TESTS)),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    scratch = tempfile.mkdtemp(prefix="r-")  # paths of sockets must be short
    cluster = subprocess.Popen(
        [str(Path(sys.executable).with_name("ray")), *start.replace("6379", str(port)).split()[1:],
         "--block", "--num-cpus=2", "--num-gpus=0", f"--temp-dir={scratch}"],
        cwd=elsewhere, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not list(Path(scratch).glob("session_latest/sockets/raylet*")):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        ended = cli(
            *sweep.replace("6379", str(port)).split()[3:], "hydra.sweep.dir=sweep",
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        assert cluster.poll() is None
    finally:
        family = psutil.Process(cluster.pid).children(recursive=True)
        cluster.terminate()
        cluster.wait(60)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=10)
        shutil.rmtree(scratch, ignore_errors=True)
    one, two = results(tmp_path / "sweep").values()
    assert [run["threads_per_process"] for run in (one, two)] == [1, 1]
    if os.cpu_count() == 2:
        assert WARNING in str(one["notes"])
        assert WARNING not in str(two["notes"])  # it had the machine for itself
    assert list(elsewhere.iterdir()) == []


@needs("hydra_optuna_sweeper")
def test_optuna_finds_the_most_samples_and_a_cell_that_is_refused_or_fails_is_a_pruned_trial(
    cli: Cli, tmp_path: Path
) -> None:
    ended = cli(
        "-m", "hydra/sweeper=optuna", "hydra/sweeper/sampler=random",
        "hydra.sweeper.sampler.seed=6", "hydra.sweeper.n_trials=4",
        "hydra.sweeper.direction=maximize", "hydra.sweeper.storage=sqlite:///study.db",
        "hydra.sweeper.study_name=study", *TOLD, "+model.how=choice(work,raise)",
        "batch_size=choice(0,10)", "parallel.bucket_cap_mb=interval(1.0,25.0)",
        "loader.workers=range(0,2)", "parallel=ddp", "num_devices=1", "hydra.sweep.dir=sweep",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    with contextlib.closing(sqlite3.connect(tmp_path / "study.db")) as study:
        trials = study.execute(
            "SELECT number, state, value FROM trials LEFT JOIN trial_values USING (trial_id)"
        ).fetchall()
    runs = results(tmp_path / "sweep")
    told = {
        name: ("COMPLETE", run["throughput"]["samples_per_s"])
        if run["config"]["batch_size"] == 10 and run["config"]["model"]["how"] == "work"
        else ("PRUNED", None)
        for name, run in runs.items()
    }
    assert {f"{number}_ddp_n1": (state, value) for number, state, value in trials} == told
    errors = [run["error"]["kind"] for run in runs.values() if run["error"] is not None]
    assert sorted(errors) == ["config", "user_error"]  # of four trials, by the seed
    best = max(
        (run for run in runs.values() if run["status"] == "ok"),
        key=lambda run: run["throughput"]["samples_per_s"],
    )
    rate, config = best["throughput"]["samples_per_s"], best["config"]
    saved = OmegaConf.load(tmp_path / "sweep/optimization_results.yaml")
    assert saved.best_value == rate
    assert saved.best_params == {
        "+model.how": "work",
        "batch_size": 10,
        "parallel.bucket_cap_mb": config["parallel"]["bucket_cap_mb"],
        "loader.workers": config["loader"]["workers"],
    }
    assert f"of 4 trials (2 pruned): {rate:,.0f} in trial" in ended.stdout
    assert (tmp_path / "sweep/report.md").exists()


@needs("hydra_optuna_sweeper")
def test_a_search_in_which_nothing_ran_fails_and_has_no_best(cli: Cli, tmp_path: Path) -> None:
    ended = cli(
        "-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "batch_size=choice(0,-1)",
        "hydra.sweep.dir=sweep",
    )  # fmt: skip
    assert ended.returncode == 1
    assert "none of 2 trials has ended well" in ended.stderr
    assert "direction=minimize looks for the fewest samples/s" in ended.stderr
    assert not (tmp_path / "sweep/optimization_results.yaml").exists()
    assert "Traceback" not in ended.stderr


@needs("hydra_optuna_sweeper")
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("hydra.sweeper.direction=[maximize,minimize]", "a cell returns one number"),
        ("parallel.bucket_cap=choice(1,2)", "there is no such key"),
        ("repeats=2", "does not repeat"),
    ],
)
def test_what_optuna_cannot_search_is_refused_before_anything_runs(
    cli: Cli, tmp_path: Path, wrong: str, words: str
) -> None:
    ended = cli("-m", "hydra/sweeper=optuna", "seed=choice(1,2)", wrong, "hydra.sweep.dir=sweep")
    assert ended.returncode == 1
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "sweep").exists()
