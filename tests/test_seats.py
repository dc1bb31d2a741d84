"""What runs at the same time have for themselves, with real runs; devices by stand-ins."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from builders import make_facts, make_plan_for
from conftest import TESTS

import dpexp
from dpexp import claims, device, env, seats
from dpexp.claims import Wanted
from dpexp.errors import ConfigError

UUIDS = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")
WAITS = ("pin=true", "model=custom", "model._target_=userlaunched.Told", "+model.how=wait")
ON_TWO = """
import os, runpy
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
runpy.run_module("dpexp", run_name="__main__", alter_sys=True)
"""
affinity = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs two cores to choose from",
)


def cuda_plan(strategy: str, devices: int, name: str = "cuda", **facts: Any) -> Any:
    seen = make_facts(cores=8, accelerator="cuda", num_accelerators=4, nccl=True, **facts)
    return make_plan_for(strategy, devices, facts=seen, device=name)


@pytest.fixture
def given_out(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment, empty, for this test alone."""
    fresh: dict[str, str] = {}
    monkeypatch.setattr(env, "os", SimpleNamespace(environ=fresh))
    monkeypatch.setattr(device, "visible_devices", lambda: UUIDS)
    return fresh


@pytest.mark.parametrize(
    ("strategy", "devices", "name", "wanted"),
    [
        ("none", 1, "auto", Wanted("cuda", UUIDS, 1)),
        ("dp", 2, "cuda", Wanted("cuda", UUIDS, 2)),
        ("ddp", 4, "auto", Wanted("cuda", UUIDS, 4)),
        ("none", 1, "cuda:1", Wanted("cuda", ("GPU-b",), 1)),
        ("ddp", 2, "cuda:2", Wanted("cuda", ("GPU-c", "GPU-d"), 2)),
    ],
)
def test_a_run_on_cuda_wants_any_devices_or_just_those_that_it_names(
    given_out: dict[str, str], strategy: str, devices: int, name: str, wanted: Wanted
) -> None:
    assert seats.wanted_by(cuda_plan(strategy, devices, name), make_facts()) == wanted


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "RAY_RAYLET_PID"])
def test_devices_that_somebody_else_gives_out_are_not_claimed(
    given_out: dict[str, str], name: str
) -> None:
    given_out[name] = "1"
    assert seats.wanted_by(cuda_plan("ddp", 2), make_facts()) is None


def test_on_a_cpu_nothing_is_claimed_unless_asked_for() -> None:
    facts = make_facts(cpus=(0, 1))
    assert seats.wanted_by(make_plan_for("ddp", 2), facts) is None
    pinned = make_plan_for("ddp", 2, facts=facts, pin=True)
    assert seats.wanted_by(pinned, facts) == Wanted("core", ("0", "1"), 2)


def test_fewer_devices_than_the_plan_needs_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_devices=4: 2 devices can be told apart"):
        seats.devices_wanted(cuda_plan("ddp", 4), UUIDS[:2])
    assert seats.devices_wanted(cuda_plan("ddp", 4), ()) is None  # not NVIDIA's


def test_what_is_claimed_is_all_that_the_ranks_see_and_count_from_0() -> None:
    plan = cuda_plan("ddp", 2, "cuda:2", claimed_devices=("GPU-c", "GPU-d"))
    assert [plan.device_of(rank) for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert env.showing(plan.claimed_devices) == {"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-d"}
    assert env.showing(cuda_plan("ddp", 2, "cuda:2").claimed_devices) == {}
    assert cuda_plan("ddp", 2, "cuda:2").device_of(0) == "cuda:2"


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ("GPU-b", "GPU-a")),  # CUDA's order, which need not be NVML's
        ("1,0", ("GPU-b", "GPU-a")),
        ("GPU-b,GPU-a,nonsense", ("GPU-b", "GPU-a")),
        ("MIG-1, MIG-2,-1,MIG-3", ("MIG-1", "MIG-2")),
    ],
)
def test_devices_are_named_in_torchs_order(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, names: tuple[str, ...]
) -> None:
    uuids = ["b", "GPU-a"]
    monkeypatch.setattr(env, "visible_devices", lambda: visible)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuids[index])
    )
    assert device.visible_devices() == names
    monkeypatch.setattr(torch.version, "cuda", None)
    assert device.visible_devices() == ()


def test_the_ranks_of_a_run_see_a_device_that_no_other_run_has(
    monkeypatch: pytest.MonkeyPatch, workdir: Path
) -> None:
    """A stand-in: the run is on a CPU, what it claims and what its ranks see is real."""
    monkeypatch.setattr(claims, "claims_folder", lambda: workdir / "claims")
    monkeypatch.setattr(seats, "wanted_by", lambda _plan, _facts: Wanted("cuda", UUIDS, 2))
    other = claims.attempt(Wanted("cuda", UUIDS, 1), workdir)
    assert isinstance(other, claims.Claim)
    run = dpexp.run(
        ["parallel=ddp", "num_devices=2", "model=custom", "model._target_=userlaunched.Sees"],
        folder=workdir / "run",
    )
    assert run.result.status == "ok", run.result.error
    assert json.loads((run.folder / "run.json").read_text())["claimed_devices"] == list(UUIDS[1:3])
    assert "I see GPU-b,GPU-c" in (run.folder / "dpexp.log").read_text()
    again = claims.attempt(Wanted("cuda", UUIDS, 3), workdir)
    assert isinstance(again, claims.Claim)  # the run has given back what it had
    again.release()
    other.release()


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start ``python -m dpexp`` on two cores, with claims of this test alone."""
    # The socket of a fork server has a path of at most 108 characters.
    scratch = tempfile.mkdtemp(prefix="d-")
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str) -> subprocess.Popen[str]:
        variables = {"PYTHONPATH": str(TESTS), "TMPDIR": scratch, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-c", ON_TWO, *arguments],
            cwd=tmp_path,
            env={**os.environ, **variables},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()
    shutil.rmtree(scratch)


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)
    return found


@affinity
def test_pinned_runs_have_cores_of_their_own_and_who_finds_none_waits(
    start: Start, tmp_path: Path
) -> None:
    first, second = (start(*WAITS, f"hydra.run.dir={name}") for name in "ab")
    until(lambda: len(list(tmp_path.glob("[ab]/steps.rank0.csv"))) == 2)
    late = start(*WAITS, "hydra.run.dir=c")
    assert late.stderr is not None
    line = late.stderr.readline()
    assert "waiting for 1 core: 2 of 2 are taken" in line
    for process, name in ((first, "a"), (second, "b")):
        assert f"pid {process.pid} ({tmp_path}/{name})" in line
    masks = [set(child.cpu_affinity()) for child in psutil.Process(first.pid).children(True)]
    assert any(len(mask) == 1 for mask in masks)  # its rank
    late.send_signal(signal.SIGINT)
    assert late.wait(30) == 130
    (tmp_path / "go").touch()
    assert (first.wait(60), second.wait(60)) == (0, 0)
    a, b, c = (json.loads((tmp_path / name / "run.json").read_text()) for name in "abc")
    cores = sorted(os.sched_getaffinity(0))[:2]
    assert sorted([a["pinned"], b["pinned"]]) == [[[cores[0]]], [[cores[1]]]]
    assert (a["threads_per_process"], a["ranks"][0]["threads"]) == (1, 1)
    assert (c["status"], c["pinned"]) == ("interrupted", None)
    assert "while it waited for 1 core" in c["error"]["message"]


@pytest.mark.slow
@affinity
def test_the_command_of_the_page_pins(tmp_path: Path) -> None:
    page = (TESTS.parent / "docs/clusters.md").read_text("utf-8")
    command = (
        page.split("## Several sweeps on one machine")[1].split("```bash\n")[1].split("```")[0]
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {**os.environ, "PATH": path}
    scratch = tempfile.mkdtemp(prefix="d-")
    subprocess.run(
        ["bash", "-euc", command], cwd=tmp_path, env={**variables, "TMPDIR": scratch}, check=True
    )
    shutil.rmtree(scratch)
    (result,) = tmp_path.glob("outputs/runs/*/*/run.json")
    first, second = json.loads(result.read_text())["pinned"]
    assert len(first) == len(second) == 1
    assert first != second


@pytest.mark.slow
@affinity
def test_virtual_devices_stay_on_their_cores_and_more_than_there_are_is_refused(
    start: Start, tmp_path: Path
) -> None:
    # The cells of one sweep, one after the other; the last needs more than there is.
    sweep = start(
        "-m", "pin=true", "parallel=dp", "num_devices=2,3", "model=custom",
        "model._target_=userlaunched.Sees", "hydra.sweep.dir=sweep",
    )  # fmt: skip
    _, errors = sweep.communicate(timeout=120)
    runs = {p.parent.name: json.loads(p.read_text()) for p in tmp_path.glob("sweep/*/run.json")}
    cores = sorted(os.sched_getaffinity(0))[:2]
    assert runs["0_dp_n2"]["pinned"] == [cores], errors
    log = (tmp_path / "sweep/0_dp_n2/dpexp.log").read_text()
    assert f"I run on {cores}" in log
    assert runs["1_dp_n3"]["status"] == "failed"
    assert "pin=true: the run needs 3 cores and may use 2" in runs["1_dp_n3"]["error"]["message"]
