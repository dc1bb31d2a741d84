"""Sweeps under joblib that are stopped: by Ctrl-C once, twice, and killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import TESTS, Cli
from pluginsweeps import JOBLIB, TOLD, WARNING, needs, results, statuses

from dpexp.stopping import ECHO_S

pytestmark = needs("hydra_joblib_launcher")


class Stopped:
    """A sweep under joblib that is given signals when its first two cells have begun.

    Args:
        here: where it is typed.
        cells: which ones; four without them.
        how: what they do: wait for a file "go" there, or be stuck.
    """

    def __init__(self, here: Path, *cells: str, how: str = "wait") -> None:
        self.sweep, self.scratch = here / "sweep", here / "scratch"
        cells = cells or ("parallel=ddp", "num_devices=1,2", "repeats=2")
        self.typed = ("-m", *TOLD, f"+model.how={how}", *cells, f"hydra.sweep.dir={self.sweep}")
        self.scratch.mkdir()
        self._shared = {path.name for path in Path("/dev/shm").glob("*loky*")}
        with (here / "out").open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dpexp", *self.typed, *JOBLIB],
                cwd=here, stdout=out, stderr=out, start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(TESTS), "TMPDIR": str(self.scratch)},
            )  # fmt: skip
        deadline = time.monotonic() + 90
        while not self._begun(here, how) and time.monotonic() < deadline:
            time.sleep(0.1)
        self._others = psutil.Process(self.process.pid).children(recursive=True)

    def _begun(self, here: Path, how: str) -> bool:
        if how == "stuck":
            return len(list(here.glob("stuck.*"))) == 3  # the ranks of a cell on 1 and one on 2
        return len(list(self.sweep.glob("*/steps.rank0.csv"))) == 2

    def end(self) -> int:
        """The exit status, when no process and no shared memory is left."""
        status = self.process.wait(timeout=60)
        assert psutil.wait_procs(self._others, timeout=30)[1] == []
        deadline = time.monotonic() + 10
        while self._left() and time.monotonic() < deadline:
            time.sleep(0.1)  # loky's tracker is not a child of the sweep any more
        assert self._left() == []
        return status

    def _left(self) -> list[str]:
        found = [path.name for path in Path("/dev/shm").glob(f"*loky-{self.process.pid}-*")]
        return [name for name in found if name not in self._shared]


def test_a_sweep_that_ctrl_c_stopped_under_joblib_goes_on_under_another_launcher(
    cli: Cli, tmp_path: Path
) -> None:
    stopped = Stopped(tmp_path)
    os.killpg(stopped.process.pid, signal.SIGINT)  # as a terminal does
    assert stopped.end() == 130
    first = statuses(stopped.sweep)
    assert list(first.values()) == ["interrupted"] * 2
    assert "interrupted" in (stopped.sweep / "report.md").read_text()
    assert list(stopped.scratch.glob("pymp-*")) == []  # sockets of the cells' fork servers
    assert list(stopped.scratch.glob("dpexp-*")) == []

    (tmp_path / "go").touch()
    ended = cli(*stopped.typed, "resume=last")
    assert ended.returncode == 0, ended.stderr
    assert "0 of 4 cells stay as they are, 4 run" in ended.stderr
    assert list(statuses(stopped.sweep).values()) == ["ok"] * 4
    assert {path.name for path in (stopped.sweep / "earlier").iterdir()} == {
        f"{name}-1" for name in first
    }
    assert WARNING not in str([run["notes"] for run in results(stopped.sweep).values()])
    sweep = json.loads((stopped.sweep / "sweep.json").read_text())
    assert [(cell["status"], cell["repeats"]) for cell in sweep["cells"]] == [("ok", 2)] * 2


def test_a_sweep_that_is_killed_takes_joblibs_cells_with_it(tmp_path: Path) -> None:
    stopped = Stopped(tmp_path)
    stopped.process.kill()  # and not its group: loky's tracker removes what is left
    assert stopped.end() == -signal.SIGKILL
    assert list(statuses(stopped.sweep).values()) == ["interrupted"] * 2


def test_a_second_ctrl_c_ends_a_sweep_under_joblib_at_once(tmp_path: Path) -> None:
    stopped = Stopped(tmp_path, how="stuck")
    os.killpg(stopped.process.pid, signal.SIGINT)  # now the ranks get GRACE_S, and deaf to it
    time.sleep(2 * ECHO_S)
    assert stopped.process.poll() is None
    os.killpg(stopped.process.pid, signal.SIGINT)
    assert stopped.end() == 130
    # The first one alone would have written how the cells ended, and the report.
    names = {path.name for path in stopped.sweep.rglob("*")}
    assert not {"run.json", "sweep.json", "report.md"} & names


def test_pinned_cells_under_joblib_have_cores_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    stopped = Stopped(tmp_path, "pin=true", "parallel=ddp", "num_devices=1", "+one=1,2")
    (tmp_path / "go").touch()  # both of them hold their cores by now
    assert stopped.end() == 0
    one, two = results(stopped.sweep).values()
    assert len(one["pinned"]) == len(two["pinned"]) == 1
    assert not set(one["pinned"][0]) & set(two["pinned"][0])
    assert one["threads_per_process"] == len(one["pinned"][0])  # joblib's OMP_NUM_THREADS
    assert "With pin=true they have cores of their own" in str(one["notes"])
