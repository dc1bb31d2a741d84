"""Going on by the command line: what docs/clusters.md shows, and a launcher that was killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

PAGE = Path(__file__).parents[1] / "docs/clusters.md"
SECTIONS = ("Checkpoints", "When a rank is lost")
STEPS = [
    *("task=train", "device=cpu", "epochs=null", "steps=60", "optimizer=adamw"),
    *("checkpoint.every_steps=5", "inject.data_delay_s=0.05", "hydra.run.dir=run"),
]


def environment() -> dict[str, str]:
    programs = Path(sys.executable).parent
    path = f"{programs}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}


def blocks() -> list[tuple[str, list[str]]]:
    """Commands of the page's sections with the lines that it shows of them."""
    text = PAGE.read_text(encoding="utf-8")
    found = []
    for title in SECTIONS:
        own = text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        pattern = r"^```bash\n(.*?)^```\n\n```text\n(.*?)^```$"
        for code, shown in re.findall(pattern, own, re.DOTALL | re.MULTILINE):
            lines = [line for line in shown.splitlines() if line not in ("…", "")]
            found.append((code, lines))
    return found


def plain(line: str) -> str:
    return re.sub(r"\d[\d,.]*", "N", line.strip())


@pytest.mark.slow
@pytest.mark.parametrize(("code", "shown"), blocks(), ids=SECTIONS)
def test_a_command_of_the_page_does_what_it_shows(
    code: str, shown: list[str], tmp_path: Path
) -> None:
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    printed = [plain(line) for line in ended.stdout.splitlines()]
    assert [line for line in shown if plain(line) not in printed] == [], ended.stdout


def result(folder: Path) -> Any:
    return json.loads((folder / "run.json").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_a_run_whose_launcher_was_killed_goes_on_by_the_same_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dpexp", *STEPS]
    run = tmp_path / "run"
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE
    ) as started:
        deadline = time.monotonic() + 60
        while not (run / "checkpoints/step-10/state.json").exists():
            assert time.monotonic() < deadline and started.poll() is None
            time.sleep(0.05)
        family = psutil.Process(started.pid).children(recursive=True)
        started.send_signal(signal.SIGKILL)
    psutil.wait_procs(family, timeout=10)
    again = subprocess.run(
        [*command, "resume=true"], cwd=tmp_path, env=environment(), capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert "run goes on from step" in again.stderr
    went_on = result(run)
    assert went_on["checkpoint"]["gone_on_from"] >= 10
    assert not (run / ".lock").exists()
    whole = subprocess.run(
        [*command, "hydra.run.dir=whole"], cwd=tmp_path, env=environment(), check=False,
        capture_output=True, timeout=120,
    )  # fmt: skip
    assert whole.returncode == 0
    sums = [each["model"]["final_sha256"] for each in (went_on, result(tmp_path / "whole"))]
    assert sums[0] == sums[1]
    refused = subprocess.run(
        [*command, "resume=true", "seed=3"], cwd=tmp_path, env=environment(), check=False,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert refused.returncode == 1
    assert "seed: 0, now 3" in refused.stderr
    assert result(run) == went_on
