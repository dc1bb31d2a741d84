"""How runs are started: by torchrun, from scripts, in odd environments, with seeds and logs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import dpexp
from dpexp import env, server
from dpexp.network import loopback_interface

Cli = Callable[..., "subprocess.CompletedProcess[str]"]

TESTS = Path(__file__).parent
DDP2 = ("parallel=ddp", "num_devices=2")
CORES = env.usable_cores()
SOON_S = 30


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Have one fork server for all, started before any test sets a variable."""
    server.start(several_ranks=True)


def execute(
    *command: str, cwd: Path, timeout: float = 60, text: str | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        input=text,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def records(work: Path) -> list[dict[str, Any]]:
    paths = sorted(work.glob("outputs/runs/*/*/run.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def ok(*overrides: str, folder: Path) -> dpexp.Run:
    run = dpexp.run(list(overrides), folder=folder)
    assert run.result.status == "ok", run.result.error and run.result.error.traceback
    return run


def diary(path: Path, what: str) -> tuple[str, ...]:
    """A model of one feature that writes `what` at each call."""
    name = "model._target_=usercode.Diary"
    return ("model=custom", name, f"+model.path={path}", f"+model.what={what}")


def entries(path: Path, rank: int) -> list[Any]:
    lines = Path(f"{path}.{rank}").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def column(*values: int) -> tuple[str, ...]:
    listed = ",".join(map(str, values))
    return ("dataset=custom", "dataset._target_=usercode.column", f"+dataset.values=[{listed}]")


# torchrun

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dpexp")


def test_the_processes_of_torchrun_become_the_ranks_and_share_a_folder(tmp_path: Path) -> None:
    signed = tmp_path / "signed"
    signed.mkdir()
    data = ("dataset=custom", "dataset._target_=usercode.SigningRows", f"+dataset.path={signed}")
    ended = execute(*TORCHRUN, *DDP2, *data, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert len(list(tmp_path.glob("outputs/runs/*/*"))) == 1
    assert len(list(tmp_path.rglob(".hydra"))) == 1
    (record,) = records(tmp_path)
    assert record["status"] == "ok"
    assert record["num_processes"] == 2
    assert record["samples_seen"] == 100
    pids = {rank["pid"] for rank in record["ranks"]}
    assert len(pids) == 2
    assert {int(path.name) for path in signed.iterdir()} == pids
    assert ended.stdout.count("samples seen") == 1  # one table


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("parallel=ddp", "num_devices=3"), ("num_devices=3", "2 processes", "needs 3")),
        (("-m", "parallel=ddp", "num_devices=2"), ("torchrun", "sweep")),
    ],
    ids=["3 devices", "sweep"],
)
def test_what_does_not_fit_torchruns_processes_is_refused_once(
    tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    ended = execute(*TORCHRUN, *arguments, cwd=tmp_path)
    assert ended.returncode != 0
    refusals = [line for line in ended.stderr.splitlines() if line.startswith("dpexp: ")]
    assert len(refusals) == 1, ended.stderr
    for word in words:
        assert word in refusals[0]
    assert records(tmp_path) == []
    assert not list(tmp_path.rglob("steps.rank*.csv"))


def test_a_failing_rank_under_torchrun_is_recorded_and_told_once(tmp_path: Path) -> None:
    failing = ("model=custom", "model._target_=usercode.Failing", "+model.how=raise")
    ended = execute(*TORCHRUN, *DDP2, *failing, cwd=tmp_path)
    assert ended.returncode != 0
    (record,) = records(tmp_path)
    assert record["status"] == "failed"
    assert record["error"]["rank"] == 1
    assert "boom" in record["error"]["message"]
    assert ended.stderr.count("ValueError: boom") == 1


# Ways to start


@pytest.mark.parametrize("way", ["stdin", "script"])
def test_the_api_works_from_stdin_and_from_a_script_without_a_main_guard(
    tmp_path: Path, way: str
) -> None:
    program = (
        "import dpexp\n"
        "print('started')\n"
        f"run = dpexp.run({[*DDP2, 'model=custom', 'model._target_=mymodels.Net']})\n"
        "print(run.result.status, run.result.num_processes)\n"
    )
    (tmp_path / "mymodels.py").write_text(MY_MODELS)
    (tmp_path / "script.py").write_text(program)
    if way == "stdin":
        ended = execute("-", cwd=tmp_path, text=program)
    else:
        ended = execute("script.py", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "started\nok 2\n"  # the program ran once, not once more in each rank


def test_the_console_script_is_the_same_as_the_module(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("dpexp")
    ended = subprocess.run(
        [script, *DDP2], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    (record,) = records(tmp_path)
    assert (record["status"], record["num_processes"]) == ("ok", 2)


MY_MODELS = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 2)

    def forward(self, rows):
        return self.layer(rows)
"""


@pytest.mark.parametrize("strategy", ["none", "ddp"])
def test_relative_paths_and_own_modules_mean_the_same_with_and_without_chdir(
    cli: Cli, workdir: Path, strategy: str
) -> None:
    (workdir / "mymodels.py").write_text(MY_MODELS)
    (workdir / "own/model").mkdir(parents=True)
    (workdir / "own/model/mine.yaml").write_text("_target_: mymodels.Net\n")
    torch.manual_seed(3)
    torch.save({"x": torch.randn(60, 5), "y": torch.randn(60, 2)}, workdir / "d.pt")
    spread = DDP2 if strategy == "ddp" else ("parallel=none",)
    train = ("dataset=tensors", "dataset.path=./d.pt", "task=train", *spread)
    direct = dpexp.run([*train, "model=custom", "model._target_=mymodels.Net"])
    assert direct.result.status == "ok", direct.result.error

    ended = cli("--config-dir", "own", "model=mine", *train, "hydra.job.chdir=true", cwd=workdir)
    assert ended.returncode == 0, ended.stderr
    first, second = records(workdir)
    assert first["model"]["final_sha256"] == second["model"]["final_sha256"]
    assert first["model"]["initial_sha256"] != first["model"]["final_sha256"]
    assert first["samples_seen"] == second["samples_seen"] == 60


def test_an_object_that_cannot_be_pickled_is_no_trouble(tmp_path: Path) -> None:
    for strategy in ("none", "ddp"):
        spread = DDP2 if strategy == "ddp" else ("parallel=none",)
        local = ("model=custom", "model._target_=usercode.Local")
        ok(*local, *spread, folder=tmp_path / strategy)


# Environments


@contextmanager
def taken(port: int) -> Iterator[int]:
    """A port that somebody listens on: this one, or any if it is taken already."""
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_two_runs_at_once_do_not_fight_for_a_port_that_is_taken(tmp_path: Path) -> None:
    with taken(29500) as port:
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        both = [
            subprocess.Popen(
                [sys.executable, "-m", "dpexp", *DDP2],
                cwd=tmp_path,
                env={**os.environ, **variables},
                stdout=subprocess.DEVNULL,
            )
            for _ in range(2)
        ]
        assert [process.wait(timeout=60) for process in both] == [0, 0]
    assert [record["status"] for record in records(tmp_path)] == ["ok", "ok"]


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "1", "WORLD_SIZE": "4"},
        {
            "RANK": "1",
            "LOCAL_RANK": "1",
            "WORLD_SIZE": "4",
            "MASTER_ADDR": "10.255.255.1",
            "MASTER_PORT": "1",
        },
        {
            "SLURM_JOB_ID": "1",
            "SLURM_NTASKS": "4",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_JOB_NAME": "bash",
        },
        {"USE_LIBUV": "0"},
        {"GLOO_SOCKET_IFNAME": loopback_interface()},
    ],
    ids=" ".join,
)
def test_variables_of_other_launchers_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    run = ok(*DDP2, folder=tmp_path)
    assert [rank["rank"] for rank in run.result.ranks] == [0, 1]
    recorded = run.result.environment["variables"]
    assert all(recorded[name] == value for name, value in variables.items() if name in recorded)


@pytest.mark.parametrize("interface", ["nonexistent0", "^lo"])
def test_an_interface_that_is_not_there_is_named_with_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interface: str
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    began = time.monotonic()
    with pytest.raises(dpexp.ConfigError) as refusal:
        dpexp.run([*DDP2], folder=tmp_path)
    assert time.monotonic() - began < SOON_S
    assert "GLOO_SOCKET_IFNAME" in str(refusal.value)
    assert repr(interface) in str(refusal.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
@pytest.mark.parametrize("value", ["", "-1", "GPU-8932f937", "0,,1"])
def test_odd_lists_of_cuda_devices_run_on_the_cpu_and_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    run = ok("device=auto", "steps=1", folder=tmp_path)
    assert run.result.device == "cpu"
    assert run.result.environment["variables"]["CUDA_VISIBLE_DEVICES"] == value


def test_a_user_warning_as_an_error_does_not_stop_the_default_run(cli: Cli) -> None:
    ended = cli("epochs=3", python=("-W", "error::UserWarning"))
    assert ended.returncode == 0, ended.stderr


def test_variables_and_folder_are_those_of_the_run_and_not_of_the_fork_server(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_WORD_FOR_THE_RANKS", "hello, ranks=2")
    monkeypatch.delenv("PATH")
    for what in ("variables", "folder"):
        ok(*DDP2, *column(1, 2), *diary(workdir / what, what), folder=workdir / f"run-{what}")
    for rank in (0, 1):
        (variables,) = entries(workdir / "variables", rank)
        assert variables["A_WORD_FOR_THE_RANKS"] == "hello, ranks=2"
        assert "PATH" not in variables
        assert entries(workdir / "folder", rank) == [str(workdir)]


# Threads


def threads(run: dpexp.Run) -> list[int]:
    assert run.result.threads_per_process == run.result.ranks[0]["threads"]
    return [rank["threads"] for rank in run.result.ranks]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("parallel=none",), [CORES]),
        (("parallel=dp", "num_devices=2"), [CORES]),
        (DDP2, [max(1, CORES // 2)] * 2),
        (("parallel=ddp", "num_devices=3"), [max(1, CORES // 3)] * 3),
    ],
    ids=["none", "dp", "ddp-2", "ddp-3"],
)
def test_the_ranks_share_the_cores(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: tuple[str, ...],
    expected: list[int],
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads(ok(*overrides, "steps=1", folder=tmp_path)) == expected


@pytest.mark.parametrize("overrides", [("parallel=none",), DDP2], ids=["none", "ddp"])
def test_a_number_of_threads_that_the_user_set_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    run = ok(*overrides, "steps=1", folder=tmp_path)
    assert set(threads(run)) == {3}
    assert run.result.environment["variables"]["OMP_NUM_THREADS"] == "3"


def test_threads_set_through_hydra_are_kept_too(cli: Cli, tmp_path: Path) -> None:
    ended = cli(*DDP2, '+hydra.job.env_set.OMP_NUM_THREADS="3"', "steps=1")
    assert ended.returncode == 0, ended.stderr
    (record,) = records(tmp_path)
    assert {rank["threads"] for rank in record["ranks"]} == {3}


def test_more_devices_than_cores_is_noted_with_both_numbers(tmp_path: Path) -> None:
    run = ok("parallel=dp", f"num_devices={CORES + 1}", "steps=1", folder=tmp_path)
    assert any(f"{CORES + 1} devices share {CORES} core" in note for note in run.result.notes)


# Logs


def test_each_ranks_log_lines_are_in_the_log_and_warnings_on_the_console(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    ok(*DDP2, "model=custom", "model._target_=usercode.Talking", folder=tmp_path)
    lines = (tmp_path / "dpexp.log").read_text(encoding="utf-8").splitlines()
    said = [line.split("]", 1)[1] for line in lines if "[user]" in line]
    assert Counter(said) == Counter(
        [
            f"[rank={rank}][user][{level}] {text}"
            for rank in (0, 1)
            for level, text in (("INFO", "an info"), ("WARNING", "a warning"))
        ]
    )
    console = [line for line in capfd.readouterr().err.splitlines() if "rank=" in line]
    assert Counter(console) == Counter(
        [
            "INFO [rank=0] an info",
            "WARNING [rank=0] a warning",
            "WARNING [rank=1] a warning",
        ]
    )


def test_a_layer_hidden_in_a_list_is_warned_about_by_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    ok("model=custom", "model._target_=usercode.Hiding", folder=tmp_path)
    assert "hidden holds modules" in capfd.readouterr().err
    assert "hidden holds modules" in (tmp_path / "dpexp.log").read_text(encoding="utf-8")


# Seeds


def test_each_epoch_has_an_order_of_its_own_and_every_row_once(tmp_path: Path) -> None:
    data = (*column(*range(8)), "batch_size=4", "epochs=2")
    ok(*DDP2, *data, *diary(tmp_path / "rows", "rows"), folder=tmp_path / "run")
    first, second = entries(tmp_path / "rows", 0), entries(tmp_path / "rows", 1)
    epochs = []
    for start in (0, 2):
        order = [row for step in (start, start + 1) for row in (*first[step], *second[step])]
        assert sorted(order) == list(range(8))
        epochs.append(order)
    assert epochs[0] != epochs[1]
    assert epochs[0] != sorted(epochs[0])


def test_without_shuffling_the_rows_come_in_order(tmp_path: Path) -> None:
    data = (*column(*range(8)), "batch_size=4", "epochs=2", "shuffle=false")
    ok(*DDP2, *data, *diary(tmp_path / "rows", "rows"), folder=tmp_path / "run")
    assert entries(tmp_path / "rows", 0) == [[0, 1], [4, 5], [0, 1], [4, 5]]
    assert entries(tmp_path / "rows", 1) == [[2, 3], [6, 7], [2, 3], [6, 7]]


def test_every_strategy_has_the_same_order(tmp_path: Path) -> None:
    data = (*column(*range(8)), "batch_size=4")
    ok(*data, *diary(tmp_path / "none", "rows"), folder=tmp_path / "run-none")
    ok(*DDP2, *data, *diary(tmp_path / "ddp", "rows"), folder=tmp_path / "run-ddp")
    ranks = zip(entries(tmp_path / "ddp", 0), entries(tmp_path / "ddp", 1), strict=True)
    assert [[*first, *second] for first, second in ranks] == entries(tmp_path / "none", 0)


def test_the_ranks_draw_different_numbers_in_the_model_and_two_runs_the_same(
    tmp_path: Path,
) -> None:
    streams = []
    for number in (0, 1):
        path = tmp_path / f"noise{number}"
        noise = diary(path, "noise")
        ok(*DDP2, *column(1, 2), *noise, folder=tmp_path / f"run{number}")
        streams.append([entries(path, rank) for rank in (0, 1)])
    assert streams[0][0] != streams[0][1]
    assert streams[0] == streams[1]


@pytest.mark.parametrize(
    ("source", "workers"), [("torch", 0), ("numpy", 0), ("random", 0), ("torch", 1), ("numpy", 1)]
)
def test_the_ranks_draw_different_numbers_in_the_dataset_and_two_runs_the_same(
    tmp_path: Path, source: str, workers: int
) -> None:
    noisy = ("dataset=custom", "dataset._target_=usercode.NoisyRows", f"+dataset.source={source}")
    streams = []
    for number in (0, 1):
        path = tmp_path / f"rows{number}"
        load = (*noisy, f"loader.workers={workers}", *diary(path, "rows"))
        ok(*DDP2, *load, folder=tmp_path / f"run{number}")
        streams.append([entries(path, rank) for rank in (0, 1)])
    assert streams[0][0] != streams[0][1]
    assert streams[0] == streams[1]
