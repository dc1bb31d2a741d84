"""Files written whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dpexp.files import claim, write_whole


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


def test_others_may_read_a_written_file(tmp_path: Path) -> None:
    write_whole(tmp_path / "run.json", "x")
    claim(tmp_path / "claimed.json", "x")
    modes = [stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()]
    assert modes == [0o644, 0o644]


def test_only_the_first_claim_succeeds_and_its_text_stays(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    assert [claim(file, "first"), claim(file, "second")] == [True, False]
    assert file.read_text() == "first"
    assert names_in(tmp_path) == ["run.json"]
