"""A disk without room, and one that is read-only: what is told, and what is kept."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Cli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system in memory; its size can be changed by mounting it again."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "dpexp-test", folder],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if mounted.returncode:
        pytest.skip(f"mounting needs root: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.slow
def test_a_sweep_on_a_disk_that_is_full_shows_its_table_all_the_same(cli: Cli, disk: Path) -> None:
    model = ("model=custom", "model._target_=usercode.Filling", f"+model.path={disk / 'fill'}")
    folder = disk / "sweep"
    ended = cli("-m", *model, "parallel=none,dp", "num_devices=1", f"hydra.sweep.dir={folder}")
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert "0_none_n1: failed (crash)" in ended.stderr
    assert "a file of the run cannot be written: no space left on device" in ended.stderr
    assert f"{folder}/0_none_n1/run.json" in ended.stderr
    assert "failed (crash)" in ended.stdout  # the table
    assert f"the report cannot be written to {folder}: no space left on device" in ended.stderr
    assert not list(folder.rglob("*run.json*"))  # no half of one


def test_a_read_only_folder_is_one_error_with_its_path(cli: Cli, disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    ended = cli(f"hydra.run.dir={disk / 'run'}")
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1
    assert str(disk / "run") in ended.stderr and "read-only file system" in ended.stderr
