"""How runs are started: by torchrun, from scripts, in odd environments."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from conftest import TESTS, Cli
from launched import DDP2, column, diary, entries, ok, records
from signalled import Start, wait_until

import dpexp
from dpexp import server
from dpexp.network import loopback_interface


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Have one fork server for all, started before any test sets a variable."""
    server.start(several_ranks=True)


def execute(
    *command: str, cwd: Path, timeout: float = 170, text: str | None = None, **env: str
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


@pytest.mark.skipif(sys.platform != "linux", reason="looks at the parent as Linux shows it")
def test_ranks_end_when_torchruns_agent_is_killed(start: Start, tmp_path: Path) -> None:
    slow = ("inject.data_delay_s=0.3", "dataset.rows=100", "batch_size=1", "task=train")
    agent = start(*TORCHRUN, *DDP2, *slow)
    wait_until(lambda: any(each.read_text() for each in tmp_path.rglob("steps.rank*.csv")), agent)
    ranks = psutil.Process(agent.pid).children(recursive=True)
    agent.kill()
    _, left = psutil.wait_procs(ranks, timeout=20)
    assert not left
    (record,) = records(tmp_path)
    assert (record["status"], record["error"]["kind"]) == ("interrupted", "interrupted")


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


@pytest.mark.parametrize("way", ["stdin", pytest.param("script", marks=pytest.mark.slow)])
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
        [script, *DDP2], cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False
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


@pytest.mark.parametrize("strategy", ["none", pytest.param("ddp", marks=pytest.mark.slow)])
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
        assert [process.wait(timeout=170) for process in both] == [0, 0]
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
