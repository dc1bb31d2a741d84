"""Files written whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dpexp.files import SharedLines, claim, write_whole


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_written_with_its_text_and_nothing_else_is_left(tmp_path: Path) -> None:
    write_whole(tmp_path / "run.json", "größer\n")
    assert (tmp_path / "run.json").read_text(encoding="utf-8") == "größer\n"
    assert names_in(tmp_path) == ["run.json"]


def test_an_existing_file_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text("a much longer old text")
    write_whole(file, "new")
    assert file.read_text() == "new"


def test_half_of_a_utf16_pair_is_written_as_its_number(tmp_path: Path) -> None:
    write_whole(tmp_path / "report.md", "\ud83d")
    assert (tmp_path / "report.md").read_text(encoding="utf-8") == "\\ud83d"


def test_the_old_file_is_still_there_when_writing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.json"
    file.write_text("old")

    def full(_fd: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(file, "new")
    assert file.read_text() == "old"
    assert names_in(tmp_path) == ["run.json"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_others_may_read_a_written_file_where_the_umask_lets_them(
    tmp_path: Path, umask: int, mode: int
) -> None:
    before = os.umask(umask)
    try:
        write_whole(tmp_path / "run.json", "x")
        claim(tmp_path / "claimed.json", "x")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()]
    assert modes == [mode, mode]


def test_only_the_first_claim_succeeds_and_its_text_stays(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    assert [claim(file, "first"), claim(file, "second")] == [True, False]
    assert file.read_text() == "first"
    assert names_in(tmp_path) == ["run.json"]


APPENDING = """
import sys
from pathlib import Path
from dpexp.files import SharedLines
lines = SharedLines(Path(sys.argv[1]), "head\\n")
for turn in range(50):
    lines.append("".join(f"{sys.argv[2]},{turn},{row},{'x' * 200}\\n" for row in range(30)))
"""


def test_lines_that_several_processes_append_at_once_are_all_there_and_whole(
    tmp_path: Path,
) -> None:
    """Each has its own in order, below a head that is there once."""
    path = tmp_path / "shared.csv"
    writers = [
        subprocess.Popen([sys.executable, "-c", APPENDING, str(path), str(number)])
        for number in range(4)
    ]
    assert [writer.wait(timeout=60) for writer in writers] == [0] * 4
    head, *lines = path.read_text().splitlines()
    assert head == "head"
    for number in range(4):
        own = [line for line in lines if line.startswith(f"{number},")]
        expected = [(turn, row) for turn in range(50) for row in range(30)]
        assert own == [f"{number},{turn},{row},{'x' * 200}" for turn, row in expected]
    assert len(lines) == 4 * 50 * 30
    assert names_in(tmp_path) == ["shared.csv"]


@pytest.mark.parametrize("half", ["", "a", "a,1", "x" * 10_000])
def test_half_a_line_of_a_killed_process_is_taken_away_by_the_next_one(
    tmp_path: Path, half: str
) -> None:
    path = tmp_path / "shared.csv"
    path.write_text("head\nfirst\n" + half)
    lines = SharedLines(path, "head\n")
    lines.append("second\n")
    lines.close()
    assert path.read_text() == "head\nfirst\nsecond\n"


def test_lines_go_to_a_file_system_without_locks_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(_handle: int, _operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    path = tmp_path / "shared.csv"
    path.write_text("head\nhalf")
    monkeypatch.setattr(fcntl, "flock", none)
    lines = SharedLines(path, "head\n")
    lines.append("whole\n")
    lines.close()
    assert path.read_text() == "head\nhalfwhole\n"


def test_another_reason_why_a_file_cannot_be_locked_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_handle: int, _operation: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    lines = SharedLines(tmp_path / "shared.csv", "head\n")
    monkeypatch.setattr(fcntl, "flock", broken)
    with pytest.raises(OSError, match="Input/output"):
        lines.append("x\n")
    lines.close()
