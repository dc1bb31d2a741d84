"""A user's own program around dpexp, with schemas of its own in Hydra's store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, width, fail=False):
        super().__init__()
        self.layer = nn.Linear(5, width)
        if fail:
            raise ValueError("asked to fail")

    def forward(self, rows):
        return self.layer(rows)
"""
SCRIPT = """
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore

from dpexp.__main__ import main

@dataclass
class Mine:
    _target_: str = "net.Net"
    width: int = 2
    fail: bool = False

ConfigStore.instance().store(group="model", name="mine", node=Mine)

if __name__ == "__main__":
    main()
"""
EXPERIMENT = """# @package _global_
defaults:
  - override /model: mine
dataset:
  rows: 60
"""
DDP2 = ("parallel=ddp", "num_devices=2")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(EXPERIMENT)
    return tmp_path


def train(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "train.py", "--config-dir", "conf", "+experiment=mine", *arguments]
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(
        command,
        check=False,
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_ranks_get_a_config_that_only_the_users_script_can_compose(project: Path) -> None:
    done = train(project, *DDP2, "hydra.run.dir=run")
    assert done.returncode == 0, done.stderr
    record = json.loads((project / "run" / "run.json").read_text(encoding="utf-8"))
    assert record["status"] == "ok"
    assert record["config"]["model"]["width"] == 2
    assert record["num_devices"] == 2


@pytest.mark.slow
def test_a_failure_in_a_rank_of_such_a_script_ends_all_of_it(project: Path) -> None:
    done = train(project, *DDP2, "model.fail=true", "hydra.run.dir=run")
    assert done.returncode == 1
    assert "asked to fail" in done.stderr
    record = json.loads((project / "run" / "run.json").read_text(encoding="utf-8"))
    assert (record["status"], record["error"]["phase"]) == ("failed", "set-up")


def test_a_value_that_does_not_fit_the_users_schema_is_named_with_the_type_it_needs(
    project: Path,
) -> None:
    done = train(project, "model.width=wide", "hydra.run.dir=run")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line == (
        "dpexp: model.width='wide': Value 'wide' of type 'str' could not be converted to Integer. "
        "Try: a value of that type"
    )
    assert not (project / "run").exists()
