"""A launcher that gives up: every cell has an end on disk all the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from omegaconf import OmegaConf

from dpexp.careful import CarefulLauncher
from dpexp.launchers import JOBLIB
from dpexp.records import RunResult, read_run
from dpexp.stopping import Stop

Jobs = Sequence[Sequence[str]]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPEXP_SWEEP", "null")  # set by the launcher, undone with the test


def composed(folder: Path) -> Any:
    return OmegaConf.create(
        {
            "parallel": {"strategy": "ddp"},
            "num_devices": 2,
            "hydra": {
                "launcher": {"_target_": JOBLIB},
                "job": {"num": "???"},
                "sweep": {"dir": str(folder), "subdir": "${hydra.job.num}_ddp_n2"},
                "overrides": {"hydra": [], "task": ["parallel=ddp"]},
            },
        }
    )


def careful(folder: Path, act: Callable[[Jobs, int], Sequence[JobReturn]]) -> CarefulLauncher:
    """Around a launcher that does as `act` says."""
    loader = SimpleNamespace(load_sweep_config=lambda _config, _overrides: composed(folder))
    inner: Any = SimpleNamespace(launch=act)
    context: Any = SimpleNamespace(config_loader=loader)
    return CarefulLauncher(inner, context, composed(folder))


def begin(folder: Path, number: int) -> Path:
    cell = folder / f"{number}_ddp_n2"
    (cell / ".hydra").mkdir(parents=True)
    (cell / ".hydra/config.yaml").write_text("parallel: {strategy: ddp}\nnum_devices: 2\n")
    return cell


def end(cell: Path) -> None:
    result = RunResult("ok", "ddp-n2", {}, {}, "ddp", throughput={"samples_per_s": 5.0})
    result.write(cell / "run.json")


def values(returns: Sequence[JobReturn]) -> list[Any]:
    return [job.return_value for job in returns]


def test_what_a_launcher_returns_is_passed_on(tmp_path: Path) -> None:
    done = JobReturn(status=JobStatus.COMPLETED)
    done.return_value = 3.0
    assert values(careful(tmp_path, lambda *_: [done]).launch([["a=1"]], 0)) == [3.0]
    assert list(tmp_path.iterdir()) == []


def test_a_launcher_that_gives_up_leaves_an_end_of_every_cell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def act(_jobs: Jobs, first: int) -> Sequence[JobReturn]:
        end(begin(tmp_path, first))
        (begin(tmp_path, first + 1) / "steps.rank0.csv").touch()
        raise RuntimeError("a worker\nwas killed")

    returns = careful(tmp_path, act).launch([["a=1"], ["a=2"], ["a=3"]], 4)
    assert values(returns) == [5.0, None, None]
    ok, lost, unborn = (read_run(tmp_path / f"{n}_ddp_n2/run.json") for n in (4, 5, 6))
    assert (ok["status"], lost["status"], unborn["status"]) == ("ok", "failed", "failed")
    assert lost["error"]["kind"] == "crash"
    assert "its process ended without a word (RuntimeError: a worker" in lost["error"]["message"]
    assert lost["notes"] == ["the steps that it made are in steps.*.csv"]
    assert "it did not begin" in unborn["error"]["message"]
    assert (unborn["label"], unborn["num_devices"]) == ("ddp-n2", 2)
    assert "the launcher joblib gave up: RuntimeError: a worker was killed" in (
        capsys.readouterr().err
    )


def test_a_launcher_that_cannot_start_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    def act(_jobs: Jobs, _first: int) -> Sequence[JobReturn]:
        raise RuntimeError("no srun here")

    with pytest.raises(HydraException, match="hydra/launcher=joblib: no srun here"):
        careful(tmp_path, act).launch([["a=1"]], 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("disguised", [False, True])
def test_a_signal_stops_the_sweep_also_where_the_launcher_changes_the_error(
    tmp_path: Path, disguised: bool
) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def act(_jobs: Jobs, first: int) -> Sequence[JobReturn]:
        begin(tmp_path, first)
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except BaseException as error:
            if disguised:
                raise SystemError("an exception is set") from error
            raise
        raise AssertionError("the signal did not come")

    with pytest.raises(Stop) as caught:
        careful(tmp_path, act).launch([["a=1"], ["a=2"]], 0)
    assert caught.value.signum == signal.SIGTERM
    run = read_run(tmp_path / "0_ddp_n2/run.json")
    assert (run["status"], run["error"]["kind"]) == ("interrupted", "interrupted")
    assert not (tmp_path / "1_ddp_n2").exists()
    assert signal.getsignal(signal.SIGTERM) is before
