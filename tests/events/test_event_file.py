"""The event file, read back with TensorBoard's own reader."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.summary.writer.record_writer import RecordWriter

from dpexp.events.file import PATTERN, EventFile, code_block


def read(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance={"images": 0})
    accumulator.Reload()
    return accumulator


def written(folder: Path, tag: str, value: float) -> None:
    file = EventFile(folder)
    file.scalars({tag: value}, step=0)
    file.close()


def test_a_file_that_is_there_is_continued(tmp_path: Path) -> None:
    written(tmp_path, "first", 1.0)
    written(tmp_path, "second", 2.0)
    assert len(list(tmp_path.glob(PATTERN))) == 1
    board = read(tmp_path)
    assert [board.Scalars(tag)[0].value for tag in ("first", "second")] == [1.0, 2.0]


@pytest.mark.parametrize("lost", [1, 4, 20])
def test_what_is_added_after_a_record_that_was_cut_short_can_be_read(
    tmp_path: Path, lost: int
) -> None:
    written(tmp_path, "whole", 1.0)
    (path,) = tmp_path.glob(PATTERN)
    before = path.read_bytes()
    written(tmp_path, "cut", 2.0)
    path.write_bytes(path.read_bytes()[:-lost])
    assert len(path.read_bytes()) > len(before)
    written(tmp_path, "added", 3.0)
    board = read(tmp_path)
    assert set(board.Tags()["scalars"]) == {"whole", "added"}


def test_the_bytes_are_those_of_tensorboards_record_writer(tmp_path: Path) -> None:
    file = EventFile(tmp_path)
    for step in range(200):  # of every length, so that a carry in a checksum is among them
        file.scalars({"t" * step: 1.5 * step}, step)
    file.close()
    (path,) = tmp_path.glob(PATTERN)
    records = list(RawEventFileLoader(str(path)).Load())
    assert len(records) == 1 + 200
    theirs = io.BytesIO()
    for record in records:
        RecordWriter(theirs).write(record)
    assert path.read_bytes() == theirs.getvalue()


def test_a_picture_has_the_size_of_its_png_file(tmp_path: Path) -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", 3, 2, 8, 0, 0, 0, 0)
    rows = zlib.compress(b"\0\1\2\3" * 2)
    signature = b"\x89PNG\r\n\x1a\n"
    png = signature + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    file = EventFile(tmp_path)
    file.image("figure", png)
    file.close()
    (shown,) = read(tmp_path).Images("figure")
    assert (shown.width, shown.height, shown.encoded_image_string) == (3, 2, png)


def test_a_code_block_keeps_blank_lines_and_bars() -> None:
    assert code_block("seed: 0\n\nloss: a|b\n") == "    seed: 0\n    \n    loss: a|b"
