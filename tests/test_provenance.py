"""The code and environment behind a run, and the runs that were made with another."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dpexp.provenance import code_of, git_state, with_notes


def git(folder: Path, *arguments: str) -> str:
    names = ("-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *names, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_commit_and_whether_tracked_files_differ(tmp_path: Path) -> None:
    assert git_state(tmp_path) == (None, None)
    git_state.cache_clear()
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("1\n")
    git(tmp_path, "add", "a.py")
    git(tmp_path, "commit", "-qm", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs/run.json").write_text("{}")  # not tracked
    assert git_state(tmp_path) == (commit, False)
    (tmp_path / "a.py").write_text("2\n")
    assert git_state(tmp_path) == (commit, False)  # asked once in a process
    git_state.cache_clear()
    assert git_state(tmp_path) == (commit, True)
    git_state.cache_clear()


def test_the_users_own_sources_are_hashed_and_not_imported(tmp_path: Path) -> None:
    (tmp_path / "pkg/sub").mkdir(parents=True)
    (tmp_path / "pkg/__init__.py").write_text("raise SystemExit\n")
    (tmp_path / "pkg/sub/__init__.py").write_text("")
    (tmp_path / "pkg/sub/nets.py").write_text("class Net: pass\n")
    (tmp_path / "alone.py").write_text("raise SystemExit\n")
    config = {
        "model": {"_target_": "pkg.sub.nets.Net", "inner": [{"_target_": "alone.f"}]},
        "dataset": {"_target_": "dpexp.datasets.RandomDataset"},
        "optimizer": {"_target_": "torch.optim.SGD"},
        "loss": {"_target_": "nowhere.at.all"},
        "metric": {"_target_": "pkg.sub.nets.Outer.inner"},
        "lr_scheduler": {"_target_": "json.loads"},
    }
    before = set(sys.modules)
    found = code_of(config, tmp_path)["sources"]
    assert not {"pkg", "alone"} & (set(sys.modules) - before)
    nets = hashlib.sha256(b"class Net: pass\n").hexdigest()
    alone = hashlib.sha256(b"raise SystemExit\n").hexdigest()
    assert found == {"alone": alone, "pkg.sub.nets": nets, "pkg.sub.nets.Outer": nets}


def run(torch: str = "2.13.0", status: str = "ok", **code: Any) -> dict[str, Any]:
    environment = {"torch": torch, "python": "3.11.7", "code": code}
    return {"status": status, "environment": environment, "notes": ["own"]}


def test_equal_runs_get_no_note() -> None:
    runs = {"0": run(git_commit="a" * 40), "1": run(git_commit="a" * 40)}
    assert with_notes(runs) == runs


@pytest.mark.parametrize(
    ("odd", "note"),
    [
        (run("2.12.1"), "measured with torch 2.12.1, others with torch 2.13.0"),
        (
            run(git_commit="b" * 40, git_dirty=True),
            "measured with commit bbbbbbbbbbbb and uncommitted changes, others with commit "
            "aaaaaaaaaaaa",
        ),
        (
            run(git_commit="a" * 40, sources={"m": "c" * 64}),
            "measured with module m (sha256 cccccccc), others with module m (sha256 dddddddd)",
        ),
    ],
)
def test_the_odd_one_out_says_so(odd: dict[str, Any], note: str) -> None:
    usual = run(git_commit="a" * 40, git_dirty=False, sources={"m": "d" * 64})
    runs = {"0": odd, "1": usual, "2": usual, "3": run("2.9", status="failed")}
    noted = with_notes(runs)
    assert noted["0"]["notes"] == ["own", note]
    assert [noted[name] for name in "123"] == [runs[name] for name in "123"]
    assert runs["0"]["notes"] == ["own"]  # as it was
