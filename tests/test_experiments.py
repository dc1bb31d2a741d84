"""Every preset in conf/experiment composes and runs."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import dpexp
from dpexp import server
from dpexp.compose import config_folder
from dpexp.extras import EXTRAS

Cli = Callable[..., "subprocess.CompletedProcess[str]"]

EXPERIMENTS = sorted(path.stem for path in (config_folder() / "experiment").glob("*.yaml"))
SHORT = ("epochs=null", "steps=3", "warmup_steps=1")
SPREAD = {
    "none": ("parallel=none",),
    "dp": ("parallel=dp", "num_devices=2"),
    "ddp": ("parallel=ddp", "num_devices=2"),
    "fsdp": ("parallel=fsdp", "num_devices=2"),
}
# Presets of libraries; where one is missing, only `make test-extras` runs its preset.
NEEDED = {"resnet": "torchvision", "gpt2": "transformers"}


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Have one fork server for all."""
    server.start(several_ranks=True)


def test_the_promised_presets_are_there() -> None:
    assert {"tutorial", "scaling", "noise_floor", "digits", "gpt", *NEEDED} <= set(EXPERIMENTS)


@pytest.mark.parametrize("strategy", SPREAD)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_preset_runs_under_each_strategy(tmp_path: Path, name: str, strategy: str) -> None:
    package = NEEDED.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package} (the extra {EXTRAS[package]})")
    once = ("repeats=1",)  # for a preset that is a sweep
    run = dpexp.run([f"+experiment={name}", *SHORT, *once, *SPREAD[strategy]], folder=tmp_path)
    assert run.result.status == "ok", run.result.error
    assert run.result.steps == {"measured": 2, "warmup": 1}
    assert run.result.parallel == strategy


def test_the_digits_preset_lowers_its_loss(tmp_path: Path) -> None:
    run = dpexp.run(["+experiment=digits"], folder=tmp_path)
    assert run.result.status == "ok", run.result.error
    assert run.result.samples_seen == 3 * 1797
    assert run.result.loss["last"] < run.result.loss["first"]


@pytest.mark.slow
def test_the_scaling_preset_is_a_sweep_on_the_command_line(cli: Cli, tmp_path: Path) -> None:
    ended = cli("+experiment=scaling", "num_devices=1,2", *SHORT)
    assert ended.returncode == 0, ended.stderr
    (path,) = tmp_path.glob("outputs/sweeps/*/*/sweep.json")
    sweep = json.loads(path.read_text(encoding="utf-8"))
    cells = ["none_n1", "none_n2", "dp_n1", "dp_n2", "ddp_n1", "ddp_n2"]
    assert [cell["folder"].split("_", 1)[1] for cell in sweep["cells"]] == cells
    states = [cell["status"] for cell in sweep["cells"]]
    assert states == ["ok", "skipped", "ok", "ok", "ok", "ok"]
