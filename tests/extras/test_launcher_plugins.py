"""Sweeps under Hydra's other launchers and under Optuna: the plugins themselves."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import Cli
from omegaconf import OmegaConf

TOLD = ("model=custom", "model._target_=userlaunched.Told")
JOBLIB = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
WARNING = "run at the same time"


def needs(name: str) -> pytest.MarkDecorator:
    absent = importlib.util.find_spec("hydra_plugins") is None or (
        importlib.util.find_spec(f"hydra_plugins.{name}") is None
    )
    return pytest.mark.skipif(absent, reason=f"needs {name} (the extra launchers)")


def results(folder: Path) -> dict[str, dict[str, Any]]:
    files = sorted(folder.glob("*/run.json"))
    return {path.parent.name: json.loads(path.read_text()) for path in files}


def statuses(folder: Path) -> dict[str, str]:
    return {name: run["status"] for name, run in results(folder).items()}


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


@needs("hydra_joblib_launcher")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_sweep_ends_joblibs_cells_which_keep_what_they_have(
    tmp_path: Path, signum: signal.Signals
) -> None:
    sweep = tmp_path / "sweep"
    endless = ("epochs=null", "steps=1000000", "parallel=ddp", "num_devices=1,2,1")
    command = [sys.executable, "-m", "dpexp", "-m", *JOBLIB, *endless, f"hydra.sweep.dir={sweep}"]
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(
            command, cwd=tmp_path, stdout=out, stderr=out, start_new_session=True
        )
    deadline = time.monotonic() + 90
    while len(list(sweep.glob("*/steps.rank0.csv"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    others = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signum)  # as a terminal does
    status = process.wait(timeout=60)
    _, alive = psutil.wait_procs(others, timeout=30)
    assert alive == []
    assert statuses(sweep) == {"0_ddp_n1": "interrupted", "1_ddp_n2": "interrupted"}
    if signum == signal.SIGINT:
        assert status == 130
        assert "interrupted" in (sweep / "report.md").read_text()


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
def test_ray_runs_cells_and_leaves_nothing_in_the_home_folder(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    home = tmp_path / "home"
    home.mkdir()
    ended = cli(
        "-m", "hydra/launcher=ray", "+hydra.launcher.ray.init.num_cpus=1", *TOLD,
        "+model.how=work", "parallel=none,ddp", "num_devices=1", "hydra.sweep.dir=sweep",
        env={"HOME": str(home)},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert statuses(tmp_path / "sweep") == {"0_none_n1": "ok", "1_ddp_n1": "ok"}
    run = results(tmp_path / "sweep")["1_ddp_n1"]
    assert WARNING not in ended.stderr  # one core: one cell at a time
    assert run["environment"]["variables"]["OMP_NUM_THREADS"] == "1"
    assert any("OMP_NUM_THREADS=1 was set by the launcher (ray)" in n for n in run["notes"])
    assert not (home / ".ray").exists()


@needs("hydra_optuna_sweeper")
def test_optuna_finds_the_most_samples_and_a_refused_cell_is_a_pruned_trial(
    cli: Cli, tmp_path: Path
) -> None:
    ended = cli(
        "-m", "hydra/sweeper=optuna", "hydra/sweeper/sampler=grid",
        "hydra.sweeper.direction=maximize", "hydra.sweeper.storage=sqlite:///study.db",
        "hydra.sweeper.study_name=study", "batch_size=choice(0,10,50)", "hydra.sweep.dir=sweep",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    with contextlib.closing(sqlite3.connect(tmp_path / "study.db")) as study:
        rows = study.execute(
            "SELECT param_value, state, value FROM trials JOIN trial_params USING (trial_id)"
            " LEFT JOIN trial_values USING (trial_id)"
        ).fetchall()
    found = {(0, 10, 50)[int(index)]: (state, value) for index, state, value in rows}
    assert {size: state for size, (state, _) in found.items()} == {
        0: "PRUNED",
        10: "COMPLETE",
        50: "COMPLETE",
    }
    rates = {
        run["config"]["batch_size"]: (run["throughput"] or {}).get("samples_per_s")
        for run in results(tmp_path / "sweep").values()
    }
    assert {size: value for size, (_, value) in found.items()} == rates
    best = max((10, 50), key=lambda size: rates[size])
    saved = OmegaConf.load(tmp_path / "sweep/optimization_results.yaml")
    assert (saved.best_params, saved.best_value) == ({"batch_size": best}, rates[best])
    assert f"of 3 trials (1 pruned): {rates[best]:,.0f} in trial" in ended.stdout
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
