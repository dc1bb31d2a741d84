"""Mistakes on the command line: one paragraph, status 1, nothing left behind, no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli

MODEL = "model=custom"
DDP2 = ("parallel=ddp", "num_devices=2")


def typed(cases: Sequence[tuple[tuple[str, ...], Any]]) -> list[str]:
    """What a test is called after."""
    return [" ".join(arguments) for arguments, _ in cases]


@pytest.fixture
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables with which importing torch ends the process with status 99."""
    package = tmp_path_factory.mktemp("poison") / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("import os\nos._exit(99)\n")
    return {"PYTHONPATH": os.pathsep.join([str(package.parent)])}


REFUSED = [
    (("parallel=dpp",), ("parallel", "dpp", "ddp, dp, fsdp, none")),
    (("parallel=null",), ("parallel", "null", "ddp, dp, fsdp, none")),
    (("~parallel",), ("parallel", "ddp, dp, fsdp, none")),
    (("foo=1",), ("foo", "+foo")),
    (("+seed=3",), ("seed=3",)),
    (("=3",), ("3",)),
    (("num_devices=two",), ("num_devices", "two")),
    (("batch_size=1,2",), ("batch_size", "1,2", "--multirun")),
    (("device='cuda: 0'",), ("device", "'cuda: 0'", "Try: device=cuda:0")),
    (("num_devices=4",), ("num_devices=4", "parallel=dp")),
    (("dataset=tensors",), ("dataset.path",)),
    (("model.in_features=${dataset.dimm}",), ("model.in_features", "dataset.dimm")),
    (("--cfg", "job", "--resolve", "model.in_features=${dataset.dimm}"), ("dataset.dimm",)),
    (("--config-dir", "/nowhere"), ("/nowhere",)),
    (("-m", "parallel=none,dpp"), ("parallel", "dpp")),
    (("-m", "batchsize=1,2"), ("batchsize", "batch_size")),
    (("steps=0",), ("steps",)),
    (("dataset.rows=ten",), ("dataset.rows",)),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED, ids=typed(REFUSED))
def test_a_mistake_ends_it_with_1_one_paragraph_no_folder_and_without_torch(
    cli: Cli,
    tmp_path: Path,
    without_torch: dict[str, str],
    arguments: tuple[str, ...],
    words: tuple[str, ...],
) -> None:
    ended = cli(*arguments, env=without_torch)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert ended.stderr.startswith("dpexp: ")
    assert "Try: " in ended.stderr or "Allowed: " in ended.stderr
    for word in words:
        assert word in ended.stderr
    assert list(tmp_path.iterdir()) == []


IN_RANKS = [
    (("dataset=tensors", "dataset.path=no.npy"), ("dataset.path", "no.npy")),
    ((*DDP2, MODEL, "model._target_=usercode.Nett"), ("model._target_", "usercode.Nett")),
]


@pytest.mark.parametrize(("arguments", "words"), IN_RANKS, ids=typed(IN_RANKS))
def test_a_mistake_found_in_the_ranks_is_printed_once(
    cli: Cli, tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    ended = cli(*arguments)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    for word in words:
        assert word in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_constructor_that_raises_is_shown_with_the_users_own_frame_once(
    cli: Cli, tmp_path: Path
) -> None:
    ended = cli(*DDP2, MODEL, "model._target_=usercode.Raising")
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("RuntimeError: no such thing") == 1
    assert ended.stderr.count("raise RuntimeError(text)") == 1
    assert "usercode.py" in ended.stderr
    assert "site-packages" not in ended.stderr
    assert "dpexp/worker.py" not in ended.stderr
    (record,) = tmp_path.glob("outputs/runs/*/*/run.json")
    assert json.loads(record.read_text(encoding="utf-8"))["status"] == "failed"


def test_hydras_switch_shows_the_traceback_of_a_refusal(cli: Cli) -> None:
    ended = cli("num_devices=two", env={"HYDRA_FULL_ERROR": "1"})
    assert ended.returncode == 1
    assert "Traceback" in ended.stderr
    assert "num_devices='two'" in ended.stderr.splitlines()[-1]


def test_a_number_in_a_users_yaml_is_a_number(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "own/optimizer").mkdir(parents=True)
    (tmp_path / "own/optimizer/mine.yaml").write_text("_target_: torch.optim.SGD\nlr: 1e-3\n")
    ended = cli("--config-dir", "own", "optimizer=mine", "task=train", "steps=1")
    assert ended.returncode == 0, ended.stderr
    (record,) = tmp_path.glob("outputs/runs/*/*/run.json")
    assert json.loads(record.read_text())["config"]["optimizer"]["lr"] == 0.001


# No torch where none is needed


def test_a_run_does_import_torch(cli: Cli, without_torch: dict[str, str]) -> None:
    assert cli("steps=1", env=without_torch).returncode == 99


NOT_RUN = [
    (("--help",), ("num_devices", "parallel", "+experiment", "tutorial")),
    (("--cfg", "job"), ("batch_size: 30", "strategy: none")),
    (("--cfg", "job", "--resolve", "parallel=ddp"), ("strategy: ddp",)),
    (("--shell-completion", "install=bash"), ()),
]


@pytest.mark.parametrize(("arguments", "words"), NOT_RUN, ids=typed(NOT_RUN))
def test_torch_is_not_imported_for_help_and_printing(
    cli: Cli, without_torch: dict[str, str], arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    ended = cli(*arguments, env=without_torch)
    assert ended.returncode == 0, ended.stderr
    for word in words:
        assert word in ended.stdout
