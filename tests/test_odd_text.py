"""Texts that are hard to write down: in errors, on the command line."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from userodd import TEXTS

Cli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.mark.slow
def test_an_error_of_any_text_is_the_result_of_its_cell(tmp_path: Path, cli: Cli) -> None:
    names = [*TEXTS, "none"]
    done = cli(
        "-m", "model=custom", "model._target_=userodd.Failing", f"+model.text={','.join(names)}",
        "hydra.sweep.dir=s", env={"PYTHONIOENCODING": "utf-8:strict"},
    )  # fmt: skip
    assert done.returncode == 1
    assert "Error executing job" not in done.stderr
    # No escape reaches a terminal, nor Markdown; in run.json the text is as it was.
    assert "\x1b" not in done.stdout + done.stderr
    assert "| $x$ \\u001b[31m [/bold]" in done.stderr
    assert "\x1b" not in (tmp_path / "s/report.md").read_text(encoding="utf-8")
    for number, name in enumerate(names):
        cell = tmp_path / f"s/{number}_none_n1"
        error = json.loads((cell / "run.json").read_text(encoding="utf-8"))["error"]
        place = (error["kind"], error["rank"], error["phase"], error["step"])
        assert place == ("user_error", 0, "forward", 0)
        assert TEXTS.get(name, "its text cannot be shown") in error["message"]
        log = (cell / "dpexp.log").read_text(encoding="utf-8")
        assert ("half a pair \\ud83d" if name == "half" else "userodd.py") in log
    page = (tmp_path / "s/report.html").read_text(encoding="utf-8")
    assert "half a pair \\ud83d" in page
    assert "&lt;script&gt;alert(1)" in page
    assert "<script>alert(1)" not in page + (tmp_path / "s/report.md").read_text(encoding="utf-8")


def test_a_name_in_another_encoding_is_refused_with_its_key(tmp_path: Path, cli: Cli) -> None:
    done = cli("dataset=tensors", b'dataset.path="caf\xe9.npz"', "hydra.run.dir=r")  # type: ignore[arg-type]
    assert done.returncode == 1
    assert done.stderr.startswith("dpexp: dataset.path=")
    assert "is not UTF-8. Try: " in done.stderr
    assert not (tmp_path / "r").exists()


def test_an_override_that_cannot_be_read_is_refused_with_its_key(cli: Cli) -> None:
    done = cli("-m", "model._target_=mymodule.Größe,other.Model")
    assert done.returncode == 1
    assert done.stderr == (
        "dpexp: model._target_='mymodule.Größe,other.Model': cannot be read as an override. "
        "Try: quote what is text twice: 'model._target_=\"…\"'\n"
    )
