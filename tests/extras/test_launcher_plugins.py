"""Sweeps under Hydra's other launchers and under Optuna: the plugins themselves."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path

import pytest
from conftest import Cli
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
