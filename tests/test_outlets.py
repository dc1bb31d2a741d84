"""Who reads the output may leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TESTS

SWEEP = [
    "-m", "dpexp", "-m", "model=custom", "model._target_=userodd.Chatty", "+model.in_features=5",
    "+model.out_features=2", "parallel=none,dp", "num_devices=2", "steps=2", "epochs=null",
    "hydra.sweep.dir=s",
]  # fmt: skip


@pytest.mark.slow
def test_a_sweep_goes_on_when_nobody_reads_its_output_any_more(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, *SWEEP],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=120) == 0
    cells = sorted((tmp_path / "s").glob("*/run.json"))
    ended = [json.loads(cell.read_text(encoding="utf-8"))["status"] for cell in cells]
    assert ended == ["skipped", "ok"]
    assert (tmp_path / "s/report.html").exists()


@pytest.mark.parametrize("python", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_what_is_written_into_a_closed_pipe_is_lost_and_no_error(
    tmp_path: Path, python: list[str]
) -> None:
    code = (
        "import sys; from dpexp.outlets import outlive_readers; outlive_readers()\n"
        "for _ in range(3): print('ä' * 9000, flush=True); print('x', file=sys.stderr)\n"
        "assert (sys.stdout.encoding, sys.stderr.errors) == ('utf-8', 'backslashreplace')\n"
        "print('the end')"
    )
    for closed in (False, True):
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb") as reader:
            if closed:
                reader.close()
            process = subprocess.Popen(
                [sys.executable, *python, "-X", "utf8", "-c", code],
                cwd=tmp_path, stdout=writing, stderr=writing,
            )  # fmt: skip
            os.close(writing)
            if not closed:
                assert reader.read().decode() == ("ä" * 9000 + "\nx\n") * 3 + "the end\n"
            assert process.wait(timeout=60) == 0
