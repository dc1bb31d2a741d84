"""A run's event file, of which there is exactly one: two would be read as one zigzag."""

from __future__ import annotations

import os
import socket
import struct
import time
from pathlib import Path
from typing import Any, BinaryIO, final

import google_crc32c
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.text.metadata import create_summary_metadata

from dpexp.files import UNENCODABLE

PATTERN = "events.out.tfevents.*"
_LENGTH, _CHECKSUM = struct.Struct("<Q"), struct.Struct("<I")
_HEADER_BYTES = _LENGTH.size + _CHECKSUM.size


@final
class EventFile:
    """Writes events; nothing happens between the calls.

    Does not use EventFileWriter, whose thread would write on while the next steps are measured, nor
    its record writer, which makes the checksums in Python: a quarter of a millisecond a step. What
    was added is in the file after `flush`.

    Args:
        folder: the run's. The event file that is there is continued, else one is begun.
    """

    def __init__(self, folder: Path) -> None:
        there = next(iter(folder.glob(PATTERN)), None)
        self.begun = there is None
        if there is None:
            name = f"{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.dpexp"
            self._file: BinaryIO = (folder / f"events.out.tfevents.{name}").open("xb")
        else:
            self._file = there.open("r+b")
            # A process that was killed may have left a part of a record, which hides all that
            # comes after it.
            self._file.truncate(_whole_bytes(there))
            self._file.seek(0, os.SEEK_END)
        if self.begun:
            self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def add(self, summary: Any, step: int = 0) -> None:
        """One event with all values of a ``Summary``."""
        self._write(Event(wall_time=time.time(), step=step, summary=summary))

    def scalars(self, values: dict[str, float], step: int) -> None:
        """One event with a value per tag. TensorBoard keeps them as 32-bit floats."""
        pairs = values.items()
        self.add(Summary(value=[Summary.Value(tag=t, simple_value=v) for t, v in pairs]), step)

    def text(self, tag: str, markdown: str) -> None:
        """A page of the Text tab."""
        metadata = create_summary_metadata(display_name=None, description=None)
        content = markdown.encode(errors=UNENCODABLE)
        self.add(Summary(value=[string_value(f"{tag}/text_summary", content, metadata)]))

    def image(self, tag: str, png: bytes) -> None:
        """A picture of the Images tab, of a PNG file's bytes."""
        # The first chunk of a PNG file begins with its size in pixels.
        width, height = struct.unpack(">II", png[16:24])
        shown = Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=png)
        self.add(Summary(value=[Summary.Value(tag=tag, image=shown)]))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, event: Event) -> None:
        self._file.write(_framed(event.SerializeToString()))


def string_value(tag: str, content: bytes, metadata: SummaryMetadata) -> Summary.Value:
    """A value of a summary that is one string; its metadata tells the plugin it belongs to."""
    # Without a dimension: TensorBoard shows a list of texts as a table, one of a single text too.
    tensor = TensorProto(dtype=DT_STRING, string_val=[content], tensor_shape=TensorShapeProto())
    return Summary.Value(tag=tag, metadata=metadata, tensor=tensor)


def code_block(content: str) -> str:
    """Markdown that shows `content` as it is, in one block."""
    return "\n".join("    " + line for line in content.splitlines())


def _framed(data: bytes) -> bytes:
    """A record of TensorFlow's TFRecord format: length, its checksum, the data, its checksum."""
    length = _LENGTH.pack(len(data))
    return b"".join((length, _masked_checksum(length), data, _masked_checksum(data)))


def _masked_checksum(data: bytes) -> bytes:
    # TFRecord turns a CRC-32C by 15 bits and adds a constant.
    plain = google_crc32c.value(data)
    turned = plain >> 15 | plain << 17 & 0xFFFFFFFF
    return _CHECKSUM.pack(turned + 0xA282EAD8 & 0xFFFFFFFF)


def _whole_bytes(path: Path) -> int:
    """Where the last whole record of an event file ends."""
    size, end = path.stat().st_size, 0
    with path.open("rb") as file:
        while len(header := file.read(_HEADER_BYTES)) == _HEADER_BYTES:
            after = end + _HEADER_BYTES + _LENGTH.unpack_from(header)[0] + _CHECKSUM.size
            if after > size:
                break
            end = after
            file.seek(end)
    return end
