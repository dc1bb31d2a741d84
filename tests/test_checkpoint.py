"""Checkpoints of a run: it goes on from them as if nothing had happened, or says why it cannot."""

from __future__ import annotations

import csv
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import FakeComm, make_plan_for
from conftest import Cli
from torch.distributed.checkpoint import FileSystemReader
from usercheckpoints import Malicious

import dpexp
from dpexp import checkpoint, checkpoint_storage
from dpexp.checkpoint_storage import CheckpointFilesError, UnsafeCheckpointError
from dpexp.checkpointing import find
from dpexp.schema import Scaling

TRAINED = ["task=train", "device=cpu", "epochs=null", "optimizer=adamw", "optimizer.lr=0.01"]
# Dropout draws from the generator in each step, and the rate moves.
DROPPED = [
    *TRAINED,
    "steps=12",
    "dataset.rows=120",
    "model=custom",
    "model._target_=usercheckpoints.Dropped",
    "lr_scheduler=cosine",
    "checkpoint.every_steps=3",
]
PLAIN = [*TRAINED, "steps=8", "checkpoint.every_steps=3", "save_weights=true"]
DIES = ["inject.die_rank=0", "inject.at_step=7"]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch, workdir: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield  # type: ignore[misc]


def final(run: dpexp.Run) -> str:
    assert run.result.status == "ok", run.result.error
    assert run.result.model is not None
    return str(run.result.model["final_sha256"])


def steps_in(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_killed_run_goes_on_and_ends_with_the_weights_of_an_undisturbed_one() -> None:
    whole = dpexp.run(DROPPED)
    cut = dpexp.run([*DROPPED, *DIES])
    assert cut.result.error is not None and cut.result.error.type == "SIGKILL"
    again = dpexp.run([*DROPPED, *DIES, "resume=true"])

    assert again.folder == cut.folder != whole.folder
    assert final(again) == final(whole)
    assert again.result.loss == whole.result.loss
    known = again.result.checkpoint
    assert known is not None
    begun = known["gone_on_from"]
    assert begun in (3, 6)  # the save of step 6 may be cut off as well
    assert known["count"] == (12 - begun) // 3
    assert (known["last_step"], known["failed"], known["folder"]) == (12, 0, "checkpoints")
    assert known["copy_s"] > 0 and known["write_s"] > 0 and known["bytes"] > 1000
    kept = sorted(path.name for path in (again.folder / "checkpoints").iterdir())
    assert kept == ["step-12", "step-9"]
    # The steps go on with their numbers, with a warm-up of their own.
    rows = steps_in(again.folder / "steps.rank0.csv")
    assert [int(row["step"]) for row in rows] == list(range(begun, 12))
    assert [row["warmup"] for row in rows] == ["1", *["0"] * (11 - begun)]
    assert again.result.steps == {"measured": 11 - begun, "warmup": 1}
    aside = again.folder / "earlier/attempt-1"
    assert {"run.json", "steps.rank0.csv", ".hydra"} <= {path.name for path in aside.iterdir()}
    assert len(list(again.folder.glob("**/*tfevents*"))) == 1
    assert any(f"goes on from its checkpoint after {begun} steps" in n for n in again.result.notes)
    names = FileSystemReader(again.folder / "checkpoints/step-12").read_metadata()
    model = [name for name in names.state_dict_metadata if name.startswith("model.")]
    # The model has a child of its own that is called module.
    assert sorted(name for name in model if "module" in name) == [
        "model.module.bias",
        "model.module.weight",
    ]
    # With all steps done there is nothing to do, and the result stays where it is.
    with pytest.raises(dpexp.ConfigError, match="has ended well"):
        dpexp.run([*DROPPED, f"resume={again.folder}"])
    assert json.loads((again.folder / "run.json").read_text())["status"] == "ok"


def test_a_lost_rank_starts_all_ranks_again_from_the_last_checkpoint(
    capfd: pytest.CaptureFixture[str],
) -> None:
    # Steps so slow that the checkpoint of step 6 is written when the rank dies.
    several = [*DROPPED, "parallel=ddp", "num_devices=4", "inject.data_delay_s=0.05"]
    whole = dpexp.run(several)
    lost = ["parallel.max_restarts=1", "inject.die_rank=2", "inject.at_step=8", "check.parity=true"]
    run = dpexp.run([*several, *lost])
    assert final(run) == final(whole)
    restarts = run.result.restarts
    assert restarts is not None and restarts["count"] == 1
    (cause,) = restarts["causes"]
    assert (cause["rank"], cause["kind"], cause["type"], cause["step"]) == (
        2,
        "crash",
        "SIGKILL",
        8,
    )
    assert cause["gone_on_from"] in (3, 6)
    # Two steps at least of 50 ms are made again.
    assert 0.1 < restarts["lost_s"] < 60
    assert "all ranks start again from step" in capfd.readouterr().err
    assert len(list(run.folder.glob("earlier/attempt-1/steps.rank*.csv"))) == 4
    first = steps_in(run.folder / "steps.rank3.csv")[0]
    assert int(first["step"]) == cause["gone_on_from"]
    assert json.loads((run.folder / "run.json").read_text())["restarts"] == restarts
    assert not list((run.folder / "checkpoints").glob(".*"))
    # The certificate is that of the first attempt.
    assert (run.result.parity or {})["verdict"] == "pass"


@pytest.mark.parametrize(
    "end",
    [
        ["inject.die_rank=0"],
        pytest.param(["inject.hang_rank=0", "watchdog_s=8"], marks=pytest.mark.slow),
    ],
)
def test_without_checkpoints_a_lost_rank_starts_the_run_from_its_beginning(end: list[str]) -> None:
    run = dpexp.run([*TRAINED, "steps=6", "parallel.max_restarts=2", *end])
    assert run.result.status == "ok"
    assert run.result.restarts is not None and run.result.checkpoint is None
    assert [cause["gone_on_from"] for cause in run.result.restarts["causes"]] == [0]
    assert len(steps_in(run.folder / "steps.rank0.csv")) == 6


def test_what_would_go_wrong_again_is_not_started_again() -> None:
    bad = ["model=custom", "model._target_=torch.nn.Linear", "+model.in_features=4"]
    run = dpexp.run(["task=train", *bad, "+model.out_features=2", "parallel.max_restarts=3"])
    assert run.result.error is not None and run.result.error.kind == "user_error"
    assert run.result.restarts is None


def weights(run: dpexp.Run) -> dict[str, torch.Tensor]:
    assert run.result.status == "ok", run.result.error
    return torch.load(run.folder / "weights.pt", weights_only=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "way",
    [
        ["parallel=none", "num_devices=1"],
        ["parallel=fsdp", "num_devices=2"],
        ["parallel=ddp", "num_devices=3", "parallel.zero=true"],
    ],
)
def test_a_run_goes_on_under_another_strategy(way: list[str], cut: Path, whole: Any) -> None:
    run = dpexp.run([*PLAIN, *way, f"resume={cut}"])
    for name, value in weights(run).items():
        torch.testing.assert_close(value, whole[name], rtol=1e-5, atol=1e-6)
    anew = any("drawn anew" in note for note in run.result.notes)
    assert anew == ("num_devices=2" not in way)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of ddp with ZeRO that did a part of the steps, and one of none."""
    place = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        sharded = ["parallel=ddp", "num_devices=2", "parallel.zero=true"]
        cut = dpexp.run([*PLAIN, *sharded, "steps=7"], folder=place / "cut")
        assert cut.result.checkpoint is not None and cut.result.checkpoint["last_step"] == 6
        weights(dpexp.run([*PLAIN, "parallel=none"], folder=place / "whole"))
    return place


@pytest.fixture
def cut(runs: Path, workdir: Path) -> Path:
    return Path(shutil.copytree(runs / "cut", workdir / "cut"))


@pytest.fixture
def whole(runs: Path) -> Any:
    return torch.load(runs / "whole/weights.pt", weights_only=True)


def test_a_run_that_would_train_something_else_is_refused(cut: Path) -> None:
    for other, said in (
        ("batch_size=20", "batch_size: 30, now 20"),
        ("optimizer.lr=0.1", "optimizer.lr: 0.01, now 0.1"),
        ("seed=1", "seed: 0, now 1"),
    ):
        with pytest.raises(dpexp.ConfigError, match=said):
            dpexp.run([*PLAIN, other, f"resume={cut}"])
    plan = make_plan_for("dp", 2, scaling=Scaling.weak)
    with pytest.raises(dpexp.ConfigError, match="60 rows over all devices, and had 30"):
        find(cut, plan, FakeComm())


def test_where_nothing_can_be_put_aside_no_other_run_begins(cut: Path, cli: Cli) -> None:
    (cut / "earlier").write_text("in the way")
    ended = cli(*PLAIN, f"resume={cut}")
    assert ended.returncode == 1
    assert "earlier': cannot be used: file exists" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert not Path("outputs").exists() and (cut / "run.json").exists()


def test_a_full_disk_is_told_as_one(tmp_path: Path) -> None:
    assert checkpoint.no_room(tmp_path, 0) == ""
    assert checkpoint.no_room(tmp_path, 1 << 60).startswith("the disk has ")
    assert checkpoint.no_room(tmp_path / "nowhere", 1 << 60) == ""


def test_a_torn_checkpoint_is_passed_over_for_the_one_before(cut: Path, whole: Any) -> None:
    newest = checkpoint.newest(cut)
    assert newest is not None and newest.step == 6
    data = next(newest.path.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    run = dpexp.run([*PLAIN, f"resume={cut}"])
    assert (run.result.checkpoint or {})["gone_on_from"] == 3
    torch.testing.assert_close(weights(run), whole, rtol=1e-5, atol=1e-6)


def test_a_checkpoint_that_was_tampered_with_is_refused_and_runs_nothing(cut: Path) -> None:
    newest = checkpoint.newest(cut)
    assert newest is not None
    ran = cut / "ran"
    bad = pickle.dumps(Malicious(ran))
    state = newest.path / "state.json"
    known = json.loads(state.read_text())
    good = (newest.path / ".metadata").read_bytes()
    (newest.path / ".metadata").write_bytes(bad)
    state.write_text(json.dumps({**known, "files": {**known["files"], ".metadata": len(bad)}}))
    with pytest.raises(dpexp.ConfigError, match=r"asks for posix\.mkdir"):
        dpexp.run([*PLAIN, f"resume={cut}"])
    (newest.path / ".metadata").write_bytes(good)
    less = {key: value for key, value in known.items() if key != "loss"}
    for damaged, said in (
        ({**known, "optimizer": {"values": {}, "groups": []}}, "cannot be loaded"),
        (less, "is damaged"),
    ):
        state.write_text(json.dumps(damaged))
        with pytest.raises(dpexp.ConfigError, match=said):
            dpexp.run([*PLAIN, f"resume={cut}"])
    state.write_bytes(bad)  # no JSON, so it is torn
    older = checkpoint.newest(cut)
    assert older is not None and older.step == 3
    assert not ran.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_neither_tensors_nor_objects_of_a_checkpoint_run_anything(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    saved = {"a": torch.arange(4.0)}
    checkpoint_storage.write(saved, tmp_path / "ok", None)
    wanted = {"a": torch.zeros(4)}
    checkpoint_storage.read(wanted, tmp_path / "ok", None)
    assert wanted["a"].tolist() == [0, 1, 2, 3]
    # A pickle in the place of the tensor's bytes.
    bad = tmp_path / "bad"
    checkpoint_storage.write(saved, bad, None)
    torch.save(Malicious(ran), bad / "__0_0.distcp")
    metadata = pickle.loads((bad / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.length = (bad / "__0_0.distcp").stat().st_size
    (bad / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointFilesError, match="mkdir"):
        checkpoint_storage.read({"a": torch.zeros(4)}, bad, None)
    # An object, which torch's own planner would unpickle.
    checkpoint_storage.write({"a": Malicious(ran)}, tmp_path / "object", None)  # type: ignore[dict-item]
    with pytest.raises(UnsafeCheckpointError, match="more than tensors"):
        checkpoint_storage.listed(tmp_path / "object")
    # A file outside of the checkpoint.
    for info in metadata.storage_data.values():
        info.relative_path = "../ok/__0_0.distcp"
    (bad / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnsafeCheckpointError, match="a file elsewhere"):
        checkpoint_storage.listed(bad)
    assert not ran.exists()


def test_a_save_that_fails_is_told_and_ends_nothing(workdir: Path) -> None:
    (workdir / "run").mkdir()
    (workdir / "run/checkpoints").write_text("in the way")
    run = dpexp.run(PLAIN, folder=workdir / "run")
    assert run.result.status == "ok"
    known = run.result.checkpoint
    assert known is not None and (known["count"], known["failed"]) == (0, 2)
    assert known["last_step"] is None
    assert any("2 checkpoints could not be saved: step-6: " in n for n in run.result.notes)


def test_a_state_that_cannot_be_saved_and_comes_late_ends_nothing(
    workdir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    own = ["optimizer=custom", "optimizer._target_=usercheckpoints.Counting", "+optimizer.lr=0.1"]
    own += ["parallel=ddp", "num_devices=2", "checkpoint.every_steps=1"]
    run = dpexp.run(["task=train", "device=cpu", *own], folder=workdir / "run")
    assert run.result.status == "ok"
    known = run.result.checkpoint
    assert known is not None and (known["count"], known["failed"]) == (0, 4)
    assert any("optimizer.state.all is a dict" in note for note in run.result.notes)
    assert capfd.readouterr().err.count("step-1 could not be saved") == 1  # and not of each


def test_about_every_so_many_seconds(workdir: Path) -> None:
    run = dpexp.run(
        [*TRAINED, "steps=30", "checkpoint.every_s=0.2", "inject.data_delay_s=0.04"],
        folder=workdir / "run",
    )
    known = run.result.checkpoint
    # The ranks meet about every second.
    assert known is not None and 1 <= known["count"] <= 6


def test_a_cell_that_was_cut_off_goes_on_from_its_checkpoint(workdir: Path) -> None:
    first = dpexp.sweep([*PLAIN, *DIES, "check.parity=false"], folder=workdir / "sweep")
    assert [run.result.status for run in first.runs] == ["failed"]
    again = dpexp.sweep(
        [*PLAIN, *DIES, "check.parity=false", f"resume={first.folder}"], folder=workdir / "sweep"
    )
    (run,) = again.runs
    assert run.result.status == "ok"
    step = (run.result.checkpoint or {})["gone_on_from"]
    assert step in (3, 6)
    (cell,) = again.cells
    assert (cell.speedup, cell.reason) == (None, f"went on from a checkpoint after {step} steps")
    assert f"after {step} steps: its figures are not" in (again.folder / "report.md").read_text()
    assert not list((again.folder / "earlier").glob("*/checkpoints"))


def test_a_job_that_always_resumes_begins_at_its_first_start(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = dpexp.run([*PLAIN, "resume=true"], folder=workdir / "job")
    assert (run.result.checkpoint or {})["gone_on_from"] is None
    assert final(run) == final(dpexp.run(PLAIN))
    assert "no checkpoint to go on from: the run begins" in capsys.readouterr().err
    with pytest.raises(dpexp.ConfigError, match="this run has ended well"):
        dpexp.run([*PLAIN, "resume=true"], folder=workdir / "job")


def test_a_job_that_was_cut_off_before_its_first_checkpoint_begins_anew(workdir: Path) -> None:
    early = ["inject.die_rank=0", "inject.at_step=1"]
    cut = dpexp.run([*PLAIN, *early], folder=workdir / "job")
    assert cut.result.status == "failed"
    run = dpexp.run([*PLAIN, "resume=true"], folder=workdir / "job")
    assert final(run) == final(dpexp.run(PLAIN))
    assert (workdir / "job" / "earlier" / "attempt-1" / "run.json").exists()


def test_the_result_of_a_run_without_checkpoints_is_not_begun_anew(workdir: Path) -> None:
    without = [*TRAINED, "steps=2"]
    final(dpexp.run(without, folder=workdir / "job"))
    with pytest.raises(dpexp.ConfigError, match="no whole checkpoint in this folder"):
        dpexp.run([*without, "resume=true"], folder=workdir / "job")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["task=train", "resume=true"], "there is no run with a checkpoint below outputs/runs"),
        (["task=train", "resume=nowhere"], "there is no such folder"),
        (["resume=true"], "only training has checkpoints"),
        (["task=train", "resume=3"], "does not say which run"),
        (["checkpoint.every_s=1"], "is for training only"),
        (["task=train", "checkpoint.every_steps=0"], "is too small"),
        (["task=train", "checkpoint.keep=0"], "is too small"),
        (["task=train", "parallel.max_restarts=-1"], "is too small"),
        (
            [
                "task=train",
                "optimizer=custom",
                "optimizer._target_=usercheckpoints.Stateful",
                "+optimizer.lr=0.1",
                "checkpoint.every_steps=1",
            ],
            "a checkpoint cannot hold it: optimizer.groups.0.history is a object",
        ),
    ],
)
def test_what_cannot_be_saved_or_gone_on_with_is_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(dpexp.ConfigError, match=said):
        dpexp.run(arguments)
