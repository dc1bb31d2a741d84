"""A signal once ends a run and keeps what there is, twice ends it at once; what is ignored."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from signalled import SOON_S, Start, wait_for_no_process, wait_until

import dpexp
from dpexp import checkpoint, stopping
from dpexp.stopping import (
    Stop,
    StopAtOnceError,
    answer_with,
    heeding,
    holding,
    ignored,
    killing,
    listening,
    taken,
)


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0


def slow(seconds: str) -> tuple[str, ...]:
    chosen = ("model=custom", "model._target_=usercode.Slow", f"+model.seconds={seconds}")
    return (*chosen, "batch_size=1", "steps=50")


def test_a_sweep_started_in_the_background_ignores_ctrl_c_and_heeds_sigterm(
    start: Start, tmp_path: Path
) -> None:
    folder = tmp_path / "sweep"
    unheard = (signal.SIGINT, signal.SIGHUP)  # as `nohup … &` in a script
    arguments = ("-m", "dpexp", "-m", *slow("0,0.2,0"), f"hydra.sweep.dir={folder}")
    process = start(*arguments, unheard=unheard)
    table = folder / "1_none_n1/steps.rank0.csv"
    wait_until(lambda: lines_of(table) >= 3, process)
    for signum in unheard:
        os.killpg(process.pid, signum)  # to the ranks as well
    before = lines_of(table)
    wait_until(lambda: lines_of(table) >= before + 4, process)
    process.terminate()
    _, errors = process.communicate(timeout=SOON_S)
    assert process.returncode == 143
    assert "Traceback" not in errors
    wait_for_no_process(process)
    sweep = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
    assert sweep["status"] == "interrupted"
    assert [cell["status"] for cell in sweep["cells"]] == ["ok", "interrupted"]
    error = json.loads((folder / "1_none_n1/run.json").read_text(encoding="utf-8"))["error"]
    assert (error["kind"], error["phase"]) == ("interrupted", "forward")
    assert error["step"] >= 3


PROGRAM = """
import sys, dpexp
dpexp.sweep(sys.argv[2:], folder=sys.argv[1])
"""


def test_sigterm_in_a_sweep_from_python_writes_the_report_and_then_has_its_usual_effect(
    start: Start, tmp_path: Path
) -> None:
    folder = tmp_path / "sweep"
    process = start("-c", PROGRAM, str(folder), *slow("0,0.2,0"))
    wait_until(lambda: lines_of(folder / "1_none_n1/steps.rank0.csv") >= 3, process)
    process.terminate()
    process.communicate(timeout=SOON_S)
    assert process.returncode == -signal.SIGTERM
    wait_for_no_process(process)  # the fork server notices that it is alone
    sweep = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
    assert [cell["status"] for cell in sweep["cells"]] == ["ok", "interrupted"]


def test_ctrl_c_twice_ends_at_once_with_no_process_left_and_nothing_half_written(
    start: Start, tmp_path: Path
) -> None:
    folder = tmp_path / "sweep"
    # The first one finds a rank that cannot end by itself, and waits for it for some seconds.
    stuck = ("model._target_=usercode.Failing", "+model.how=stuck", "+model.rank=0")
    cells = ("+model.call=2,3", "batch_size=10", f"hydra.sweep.dir={folder}")
    process = start("-m", "dpexp", "-m", "model=custom", *stuck, *cells, "loader.workers=1")
    wait_until(lambda: lines_of(folder / "0_none_n1/steps.rank0.csv") >= 2, process)
    time.sleep(0.5)  # until it is stuck
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(stopping.ECHO_S + 0.2)
    os.killpg(process.pid, signal.SIGINT)
    began = time.monotonic()
    _, errors = process.communicate(timeout=SOON_S)
    assert time.monotonic() - began < 3
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    wait_for_no_process(process)
    names = {path.name for path in folder.rglob("*")}
    assert not {"run.json", "sweep.json", "report.md", "1_none_n1"} & names
    assert not [name for name in names if name.startswith(".run.json")]


# The handler itself


def test_a_signal_to_all_processes_leaves_no_rank_that_does_not_hear_it(
    start: Start, tmp_path: Path
) -> None:
    """The fork server dies of it too, so nobody but the system knows of the rank any more."""
    stuck = ("model=custom", "model._target_=userlaunched.Told", "+model.how=stuck")
    process = start("-m", "dpexp", *stuck, "hydra.run.dir=run")
    wait_until(lambda: bool(list(tmp_path.glob("stuck.*"))), process)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(SOON_S) == 128 + signal.SIGTERM
    wait_for_no_process(process)
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "interrupted"


def test_the_first_signal_raises_its_echo_does_not_and_a_second_one_kills(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(stopping.time, "time", lambda: now[0])
    killed = []
    before = signal.getsignal(signal.SIGINT)
    with listening(), listening(), killing(lambda: killed.append(True)):
        with pytest.raises(Stop, match="stopped by SIGINT"):
            signal.raise_signal(signal.SIGINT)
        now[0] += 0.1
        signal.raise_signal(signal.SIGINT)
        assert killed == []
        now[0] += 1
        with pytest.raises(StopAtOnceError):
            signal.raise_signal(signal.SIGTERM)
        assert killed == [True]
    assert signal.getsignal(signal.SIGINT) is before


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert ignored() == {signal.SIGHUP}
        with listening():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
            signal.raise_signal(signal.SIGHUP)
        changed = answer_with(signal.default_int_handler)
        for signum, handler in changed.items():
            signal.signal(signum, handler)
        assert set(changed) == {signal.SIGTERM, signal.SIGINT}
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_is_done_whole_is_not_cut_by_a_first_signal() -> None:
    done = []
    with listening():
        with pytest.raises(Stop, match="SIGINT"), holding():
            signal.raise_signal(signal.SIGINT)
            done.append("held")
            with heeding():
                done.append("not reached")
        assert done == ["held"]
    with listening():
        with pytest.raises(Stop, match="SIGINT"), holding():
            signal.raise_signal(signal.SIGINT)
            done.append("at the end")
        assert done[1:] == ["at the end"]
    with listening(), holding():
        signal.raise_signal(signal.SIGINT)
        assert (taken(), taken()) == (signal.SIGINT, None)  # answered, so nothing raises


@pytest.mark.parametrize("moment", ["put_aside", "clear"])
def test_ctrl_c_between_two_attempts_or_after_the_last_one_leaves_a_result(
    moment: str, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(checkpoint, moment)

    def signalled(folder: Path) -> Any:
        signal.raise_signal(signal.SIGINT)
        return real(folder)

    monkeypatch.setattr(f"dpexp.restarting.checkpoint.{moment}", signalled)
    dies = ["parallel.max_restarts=1", "inject.die_rank=0"] if moment == "put_aside" else []
    with pytest.raises(KeyboardInterrupt):
        dpexp.run(["task=train", "device=cpu", *dies], folder=workdir / "run")
    known = json.loads((workdir / "run/run.json").read_text())
    if moment == "put_aside":
        assert (known["status"], known["error"]["kind"]) == ("interrupted", "interrupted")
        assert known["restarts"]["causes"][0]["type"] == "SIGKILL"
    else:  # its steps were all made
        assert (known["status"], known["error"]) == ("ok", None)
