"""torchrun on two hosts, which are network namespaces of this machine that a cable joins."""

from __future__ import annotations

import csv
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from namespaces import ADDRESSES, HOSTS, TESTS, Cable, cable, lacking, shown

pytestmark = pytest.mark.cluster

SECTION = "Two hosts and more, by torchrun"
STATIC, ELASTIC = shown(SECTION, 0), shown(SECTION, 1)  # what the page has a reader type
TRAINING = ("task=train", "model=mlp", "model.widths=[5,64,2]")
# Of the run that is made on one host, on two, and with a rank lost on the way. After its first step
# a DDP object lays gradients into its buckets in another order, and then a sum over four ranks is
# rounded in another way: so one that is new after a restart ends with the same weights up to
# rounding only. With find_unused_parameters it keeps the order.
RUN = (
    *TRAINING,
    "epochs=null",
    "steps=40",
    "check.parity=true",
    "parallel.find_unused_parameters=true",
)
ENDLESS = (*TRAINING, "epochs=null", "steps=10000000")
START_S = 120.0  # of two agents and four ranks, on a busy machine too
TIMEOUT_S = 6
CLOCK_AHEAD_S = 1000  # of host b


@pytest.fixture(autouse=True, scope="module")
def possible() -> None:
    reason = lacking()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Cable]:
    with cable(tmp_path) as two:
        yield two


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of the run on one host."""
    folder = tmp_path_factory.mktemp("alone")
    command = [sys.executable, "-m", "dpexp", "parallel=ddp", "num_devices=4", *RUN]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, "hydra.run.dir=run"],
        cwd=folder,
        env=variables,
        check=True,
        capture_output=True,
        timeout=120,
    )
    return read(folder / "run" / "run.json")


def read(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def results(work: Path) -> list[dict[str, Any]]:
    return [read(path) for path in sorted(work.glob("outputs/runs/*/*/run.json"))]


def steps_of(work: Path, rank: int) -> list[dict[str, str]]:
    paths = list(work.glob(f"outputs/runs/*/*/steps.rank{rank}.csv"))
    return list(csv.DictReader(paths[0].open(encoding="utf-8"))) if paths else []


def until(what: Callable[[], bool], timeout_s: float = START_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline_s, "it did not come to that"
        time.sleep(0.1)


def test_two_hosts_make_one_run_that_equals_the_run_of_one(
    lab: Cable, tmp_path: Path, alone: dict[str, Any]
) -> None:
    for host in HOSTS:
        ahead_s = CLOCK_AHEAD_S if host == "b" else 0
        lab.start(host, [*STATIC[host], *RUN], cwd=tmp_path, clock_ahead_s=ahead_s)
    assert lab.wait(START_S) == [0, 0]
    on_a, on_b = (each.text() for each in lab.started)
    assert "ddp-n4 on cpu" in on_a
    assert "clocks: up to 1000 s from rank 0's" in on_a
    assert "ddp-n4 on cpu" not in on_b

    (folder,) = tmp_path.glob("outputs/runs/*/*")
    result = read(folder / "run.json")
    assert (result["status"], result["num_devices"]) == ("ok", 4)
    assert {path.name for path in folder.glob("steps.rank*.csv")} == {
        f"steps.rank{rank}.csv" for rank in range(4)
    }
    assert len(list(folder.glob("events.out.tfevents.*"))) == 1
    assert not (tmp_path / "outputs" / "runs" / ".launches").exists()

    assert result["model"]["final_sha256"] == alone["model"]["final_sha256"]
    assert result["loss"] == alone["loss"]
    assert (result["parity"]["verdict"], alone["parity"]["verdict"]) == ("pass", "pass")
    assert result["samples_seen"] == alone["samples_seen"]

    assert [(each["host"], each["ranks"]) for each in result["hosts"]] == [
        ("a", [0, 1]),
        ("b", [2, 3]),
    ]
    assert [each["address"] for each in result["hosts"]] == list(ADDRESSES.values())
    assert all(each["torch"] and each["cores"] and each["processor"] for each in result["hosts"])
    assert [each["host"] for each in result["ranks"]] == ["a", "a", "b", "b"]
    assert result["environment"]["host"] == "a"

    offsets_s = result["stragglers"]["clock_offsets_s"]
    error_s = result["stragglers"]["clock_error_s"]
    assert offsets_s[:2] == [0, 0]
    assert 0 < error_s < 1
    for offset_s in offsets_s[2:]:
        assert abs(offset_s - CLOCK_AHEAD_S) <= error_s


def test_a_cut_cable_ends_both_sides_and_each_names_the_other(lab: Cable, tmp_path: Path) -> None:
    """Each host has a folder of its own here, below the same path."""
    work = tmp_path / "work"
    work.mkdir()
    for host in HOSTS:
        (tmp_path / host).mkdir()
        command = [*STATIC[host], *ENDLESS, f"parallel.timeout_s={TIMEOUT_S}"]
        before = f"mount --bind {tmp_path / host} {work}; cd {work}"
        lab.start(host, command, cwd=work, before=before)
    until(lambda: len(steps_of(tmp_path / "b", 3)) > 3)
    lab.cut()
    assert lab.wait(TIMEOUT_S + 10) == [1, 1]

    for host, other in (("a", "b"), ("b", "a")):
        (result,) = results(tmp_path / host)
        error = result["error"]
        ranks = "0 and 1" if other == "a" else "2 and 3"
        assert (result["status"], error["host"]) == ("failed", host)
        assert error["kind"] in ("hang", "crash")
        unreachable = f"Not reachable from here: {other} ({ADDRESSES[other]}, ranks {ranks})"
        assert unreachable in error["message"]
        assert [each["shares_folder"] for each in result["hosts"]] == [True, False]


def test_a_slow_cable_is_exposed_communication_and_nothing_else(tmp_path: Path) -> None:
    """Then one agent is told to end, and the result says on which host."""
    delays_ms = (0, 5, 20, 50)
    seen: dict[int, tuple[int, int]] = {}
    with cable(tmp_path, delays=True) as lab:
        for host in HOSTS:
            lab.start(host, [*STATIC[host], *ENDLESS], cwd=tmp_path)
        until(lambda: len(steps_of(tmp_path, 0)) > 20)
        for delay_ms in delays_ms:
            lab.delay(delay_ms)
            time.sleep(4)  # the steps from before are written, which takes a second and longer
            first = len(steps_of(tmp_path, 0)) + 1
            until(lambda first=first: len(steps_of(tmp_path, 0)) > first + 8)  # type: ignore[misc]
            seen[delay_ms] = (first, len(steps_of(tmp_path, 0)) - 1)
        lab.delay(0)
        agent = next(pid for pid in lab.pids("b") if b"torch.distributed.run" in command_of(pid))
        os.kill(agent, signal.SIGTERM)
        assert 0 not in lab.wait(30)

    def median_ms(column: str, delay_ms: int) -> float:
        rows = [
            row for rank in range(4) for row in steps_of(tmp_path, rank)[slice(*seen[delay_ms])]
        ]
        return 1e3 * statistics.median(float(row[column]) for row in rows)

    exposed = [median_ms("comm_exposed_s", delay_ms) for delay_ms in delays_ms]
    added = [each - exposed[0] for each in exposed[1:]]
    # Each step has an all-reduce, in which a message and what depends on it cross several times.
    for more, delay_ms in zip(added, delays_ms[1:], strict=True):
        assert delay_ms < more < delay_ms * 20, (exposed, delay_ms)
    assert added[2] / added[1] == pytest.approx(50 / 20, rel=0.4), exposed
    for column in ("data_s", "forward_s", "optimizer_s", "other_s"):
        moved = median_ms(column, 50) - median_ms(column, 0)
        assert abs(moved) < 0.1 * added[2], (column, moved)
    assert median_ms("straggler_wait_s", 50) - median_ms("straggler_wait_s", 0) < 0.25 * added[2]

    (result,) = results(tmp_path)
    error = result["error"]
    assert (result["status"], error["kind"], error["host"]) == ("interrupted", "interrupted", "b")
    assert error["rank"] in (2, 3)
    assert "SIGTERM" in error["message"]


def command_of(pid: int) -> bytes:
    try:
        return Path("/proc", str(pid), "cmdline").read_bytes()
    except OSError:
        return b""


def test_a_rank_that_is_killed_starts_the_run_again_from_its_checkpoint(
    lab: Cable, tmp_path: Path, alone: dict[str, Any]
) -> None:
    killing = (
        "checkpoint.every_s=null",
        "checkpoint.every_steps=10",
        "inject.die_rank=3",
        "inject.at_step=25",
    )
    for host in HOSTS:
        lab.start(host, [*ELASTIC[host], *RUN, *killing], cwd=tmp_path)
    assert lab.wait(2 * START_S) == [0, 0]

    (folder,) = tmp_path.glob("outputs/runs/*/*")
    result = read(folder / "run.json")
    assert result["status"] == "ok"
    assert result["model"]["final_sha256"] == alone["model"]["final_sha256"]
    restarts = result["restarts"]
    assert restarts["count"] == 1
    (cause,) = restarts["causes"]
    assert (cause["rank"], cause["host"], cause["kind"]) == (3, "b", "crash")
    assert "rank 3 on b ended without a word" in cause["message"]
    assert cause["gone_on_from"] in (10, 20)
    assert 0 < restarts["lost_s"] < 2 * START_S
    assert any("started again 1 time" in note for note in result["notes"])
    earlier = read(folder / "earlier" / "attempt-1" / "run.json")
    assert earlier["error"]["message"] == cause["message"]


def elastic(host: str, **changes: str) -> list[str]:
    """The page's command with the elastic rendezvous, with other values of some of its flags."""
    command = [
        next((f"--{k}={v}" for k, v in changes.items() if each.startswith(f"--{k}=")), each)
        for each in ELASTIC[host]
    ]
    assert all(f"--{name}={value}" in command for name, value in changes.items())
    return command


def test_a_cut_cable_ends_the_agents_of_an_elastic_rendezvous_as_soon_as_tcp_gives_up(
    lab: Cable, tmp_path: Path
) -> None:
    """By the setting that the page names: torch's store waits for nothing else."""
    page = (TESTS.parent / "docs/clusters.md").read_text("utf-8")
    setting = "sysctl -w net.ipv4.tcp_retries2=5"  # of a network namespace's own
    assert f"`{setting}`" in page
    timeout_s = 10
    for host in HOSTS:
        command = elastic(host, **{"max-restarts": "0"})
        more = [*ENDLESS, f"parallel.timeout_s={timeout_s}"]
        lab.start(host, [*command, *more], cwd=tmp_path, before=setting)
    until(lambda: len(steps_of(tmp_path, 3)) > 3)
    lab.cut()
    assert 0 not in lab.wait(timeout_s + 10)
    (result,) = results(tmp_path)
    assert result["status"] == "failed"
    assert "Not reachable from here: " in result["error"]["message"]


def test_when_a_whole_host_is_lost_the_other_goes_on_from_the_checkpoint(
    lab: Cable, tmp_path: Path
) -> None:
    saving = ("checkpoint.every_s=null", "checkpoint.every_steps=20")
    for host in HOSTS:
        command = [*elastic(host, nnodes="1:2"), *TRAINING, "epochs=null", "steps=4000", *saving]
        lab.start(host, command, cwd=tmp_path)
    until(lambda: len(steps_of(tmp_path, 0)) > 60)
    for pid in lab.pids("b"):
        os.kill(pid, signal.SIGKILL)
    on_a, on_b = lab.wait(2 * START_S)
    assert (on_a, on_b) == (0, -signal.SIGKILL)

    (folder,) = tmp_path.glob("outputs/runs/*/*")
    result = read(folder / "run.json")
    assert (result["status"], result["num_devices"]) == ("ok", 2)
    assert [each["host"] for each in result["hosts"]] == ["a"]
    assert result["checkpoint"]["last_step"] == 4000
    (cause,) = result["restarts"]["causes"]
    assert cause["host"] == "b"
    assert cause["gone_on_from"] >= 20
