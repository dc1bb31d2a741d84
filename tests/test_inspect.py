"""``python -m dpexp.inspect`` as a user types it."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from builders import make_plan_for
from conftest import TESTS
from rich.console import Console

from dpexp.anatomy import dissect
from dpexp.anatomy.data import Figure
from dpexp.inspect import main
from dpexp.report.anatomy import figure, operations, print_anatomy, ranges, size
from dpexp.schema import Task
from dpexp.stopping import STOP_SIGNALS

Inspect = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def inspect(tmp_path: Path) -> Inspect:
    """Run the command in an empty folder, with tests/ importable."""

    def run(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
        variables = {**os.environ, "PYTHONPATH": str(TESTS), "COLUMNS": "120"}
        how = ["-m", "dpexp.inspect"] if code is None else ["-c", code]
        return subprocess.run(
            [sys.executable, *how, *arguments],
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


@pytest.fixture
def here(workdir: Path) -> Iterator[None]:
    """For the command in this process: in an empty folder, which it leaves empty, its signal
    handlers undone."""
    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)
    assert list(workdir.iterdir()) == []


@pytest.fixture
def inspect_here(
    here: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """The command in this process: what it prints, when it ends well and says nothing else."""

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["dpexp.inspect", *arguments])
        monkeypatch.setenv("COLUMNS", "120")
        main()
        told = capsys.readouterr()
        assert told.err == ""
        return told.out

    return run


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_exercise(inspect_here: Callable[..., str]) -> None:
    shown = lines(
        inspect_here("parallel=dp", "num_devices=3", "task=train", "optimizer.momentum=0.9")
    )
    assert shown[0] == "dp-n3 on cpu, emulated, 1 process: computed, nothing was run"
    for expected in (
        "parameters 12 48 B",
        "first 0 10 [10, 5] [30, 2] [10, 2]",
        "1-2 10 [10, 5] - [10, 2]",
        "last, step 3 0 4 [4, 5] [10, 2] [4, 2]",
        "2 2 [2, 5] - [2, 2]",
        "forward 600 FLOP",
        "forward and backward 1,200 FLOP",
        "optimizer state 48 B 0 B",
    ):
        assert expected in shown


def test_a_strategy_with_processes_starts_none(inspect: Inspect) -> None:
    code = (
        "import sys, psutil\n"
        "from dpexp.inspect import main\n"
        "main()\n"
        "import torch.distributed\n"
        "assert not torch.distributed.is_initialized()\n"
        "print('children', len(psutil.Process().children()))\n"
    )
    options = ["parallel.bucket_cap_mb=0.00001", "model=mlp", "model.widths=[5,8,2]"]
    done = inspect("parallel=ddp", "num_devices=4", "task=train", *options, code=code)
    assert done.returncode == 0, done.stderr
    shown = lines(done.stdout)
    assert shown[-1] == "children 0"
    assert "first step 1 264 B" in shown
    assert "later 3 72 B, 32 B, 160 B" in shown


def test_help_and_refusals_do_not_import_torch(inspect: Inspect) -> None:
    code = (
        "import sys\n"
        "from dpexp.inspect import main\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    print('torch' in sys.modules)\n"
    )
    helped = inspect("--help", code=code)
    assert "python -m dpexp.inspect" in helped.stdout
    assert helped.stdout.splitlines()[-1] == "False"
    refused = inspect("num_devices=0", code=code)
    assert (refused.returncode, refused.stdout) == (1, "False\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["num_devices=0"], "num_devices=0: is not a number of devices"),
        (["modle=mlp"], "modle"),
        (["model=mpl"], "Try: model=mlp"),
        (["model=null"], "a config group needs one of its options"),
        (["seed=1,2"], "several choices are for a sweep"),
        (["a=[", "x"], "Try: quote what is text twice"),
        (["batch_size=auto"], "nothing is run here"),
        (["-m", "parallel=dp,ddp"], "is not an option of dpexp.inspect"),
        (["--config-dir", "nowhere"], "--config-dir='nowhere': is not a folder"),
        (["device=cuda:99"], "CUDA is not available here"),
        (["dataset=tensors", "dataset.path=no.npz"], "there is no such file"),
        (["model=custom", "model._target_=specimens.NoSuch"], "has no 'NoSuch'"),
        (["model=custom", "model._target_=usercode.Raising"], "raised RuntimeError: no such thing"),
        (["drop_last=true", "batch_size=101"], "nothing is left to do"),
        (["task=train", "dataset.targets=3"], "the model's output is of shape [30, 2]"),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_mistake_is_one_paragraph(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["dpexp.inspect", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("dpexp: ")
    assert len(told.err.splitlines()) == 1, told.err
    assert said in told.err


def test_a_model_that_does_not_fit_the_data_is_shown_without_its_output(
    inspect_here: Callable[..., str],
) -> None:
    shown = inspect_here("dataset.features=8", "task=train")
    assert "output unknown: RuntimeError: " in shown
    found = lines(shown)
    assert "forward unknown the model could not be called" in found
    assert "activations (estimate) unknown the model could not be called" in found
    assert "total at least 1.3 KiB without activations" in found


@pytest.mark.parametrize(
    "given",
    [["--config-dir", "my conf"], pytest.param(["--config-dir=my conf"], marks=pytest.mark.slow)],
)
def test_classes_and_configs_of_the_user(
    inspect: Inspect, tmp_path: Path, given: list[str]
) -> None:
    (tmp_path / "mynet.py").write_text("from torch import nn\ndef Net(): return nn.Linear(5, 2)\n")
    options = tmp_path / "my conf" / "model"
    options.mkdir(parents=True)
    (options / "mynet.yaml").write_text("_target_: mynet.Net\n")
    done = inspect(*given, "model=mynet")
    assert done.returncode == 0, done.stderr
    assert "parameters 12 48 B" in lines(done.stdout)


def test_pythons_own_inspect_is_not_shadowed(inspect: Inspect) -> None:
    code = "import dpexp.inspect, inspect; print(inspect.signature(dpexp.inspect.main))"
    assert inspect(code=code).stdout == "() -> 'None'\n"


def shown(strategy: str, num_devices: int, **overrides: object) -> list[str]:
    stream = io.StringIO()
    plan = make_plan_for(strategy, num_devices, task=Task.train, **overrides)
    print_anatomy(dissect(plan), Console(file=stream, width=120))
    return lines(stream.getvalue())


def test_equal_units_are_one_row() -> None:
    sizes = {"vocabulary": 11, "length": 4, "width": 4, "heads": 2, "layers": 3}
    dataset = {"_target_": "dpexp.datasets.tokens", "rows": 8, "length": 4, "vocabulary": 11}
    text = shown(
        "fsdp",
        2,
        model={"_target_": "dpexp.models.gpt", **sizes},
        dataset={**dataset, "seed": 0},
        batch_size=4,
    )
    assert any(line.startswith("blocks.0 to blocks.2 3 ") for line in text)
    assert any(line.startswith("the rest 1 ") for line in text)


def test_idle_devices_are_named_and_a_stream_has_no_last_batch() -> None:
    assert "3 0 idle" in shown("ddp", 4, batch_size=9)
    stream = shown("none", 1, dataset={"_target_": "specimens.Endless"}, epochs=None, steps=2)
    assert "last unknown: a stream has no length" in stream


def test_many_buckets_are_counted() -> None:
    model = {"_target_": "dpexp.models.mlp", "widths": [5, *[3] * 9, 2]}
    text = shown("ddp", 2, model=model, parallel={"bucket_cap_mb": 1e-6})
    assert "later 20 8 B, 24 B, 12 B, 36 B, 12 B, 36 B and 14 more" in text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 * 2**29, "1.5 GiB"),
        (2**50, "1,024.0 TiB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (600, "600 FLOP"),
        (9_999, "9,999 FLOP"),
        (10_000, "10 kFLOP"),
        (1_132_462_080, "1.13 GFLOP"),
        (999_900_000, "1 GFLOP"),
        (3 * 10**21, "3,000 EFLOP"),
    ],
)
def test_operations(count: int, text: str) -> None:
    assert operations(count) == text


def test_ranges() -> None:
    assert ranges([0]) == "0"
    assert ranges([0, 1, 2, 4, 6, 7]) == "0-2, 4, 6-7"


def test_a_figure_that_is_unknown_or_a_lower_bound_says_so() -> None:
    assert figure(Figure(None, "why")) == "unknown"
    assert figure(Figure(2048, at_least=True)) == "at least 2.0 KiB"
