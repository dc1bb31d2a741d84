"""Checkpoints on disk: torch's distributed checkpoint, read without running what a pickle says.

torch's own reader loads ``.metadata`` with pickle, which runs whatever a file tells it to, and so
it does with all that is not a tensor. So here only tensors are given to torch, which loads them
with ``weights_only``, and ``.metadata`` is read by an unpickler that knows the few classes in it.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any, final

import torch
from torch import distributed as dist
from torch.distributed.checkpoint import metadata as parts
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.serialization import _get_layout

Tensors = dict[str, torch.Tensor]
METADATA = ".metadata"
_KNOWN: dict[tuple[str, str], Any] = {
    (each.__module__, each.__qualname__): each
    for each in (
        parts.BytesStorageMetadata,
        parts.ChunkStorageMetadata,
        parts.Metadata,
        parts.MetadataIndex,
        parts.StorageMeta,
        parts.TensorProperties,
        parts.TensorStorageMetadata,
        parts._MEM_FORMAT_ENCODING,
        _StorageInfo,
    )
} | {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("pathlib", "PosixPath"): PosixPath,  # later versions of Python have it in a module below
    ("pathlib._local", "PosixPath"): PosixPath,
}


class CheckpointFilesError(Exception):
    """The files of a checkpoint cannot be written or read; the text says what a rank met.

    torch's own error for it is no Exception.
    """


class UnsafeCheckpointError(Exception):
    """A file of a checkpoint holds what no checkpoint of dpexp does."""


def write(tensors: Tensors, folder: Path, group: dist.ProcessGroup | None) -> None:
    """Write the tensors of all ranks into `folder`. All ranks of `group` call it.

    Raises:
        CheckpointFilesError: one of the ranks could not write; it is raised on all of them.
        RuntimeError: a rank is lost.
    """
    writer = FileSystemWriter(folder)
    with _explained():
        save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)


def read(tensors: Tensors, folder: Path, group: dist.ProcessGroup | None) -> None:
    """Fill `tensors` in place with what lies in `folder`; those that are not there are an error.

    All ranks of `group` call it. A sharded tensor gets this rank's part, however it was saved.

    Raises:
        CheckpointFilesError: one of the ranks could not read; it is raised on all of them.
    """
    with _explained():
        load(
            dict(tensors),
            storage_reader=_Reader(folder),
            planner=_TensorsOnly(),
            process_group=group,
            no_dist=group is None,
        )


def listed(folder: Path) -> dict[str, TensorStorageMetadata]:
    """The tensors of a checkpoint by name, with their whole sizes.

    Raises:
        UnsafeCheckpointError: there is something else, or what pickle would run.
    """
    found = _Reader(folder).read_metadata().state_dict_metadata
    if not all(isinstance(each, TensorStorageMetadata) for each in found.values()):
        raise UnsafeCheckpointError(f"{folder} holds more than tensors")
    return dict(found)  # type: ignore[arg-type]


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointFilesError(f"{type(cause).__name__}: {cause} [rank {rank}]") from error


def quiet() -> None:
    """For good: torch warns of each save of a single process that it is one."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable")


@final
class _Reader(FileSystemReader):
    """torch's reader, with another way to read the metadata."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        text = Path(self.path, METADATA).read_bytes()
        try:
            read = _Unpickler(io.BytesIO(text)).load()
        except UnsafeCheckpointError as error:
            raise UnsafeCheckpointError(f"{self.path}: {error}") from None
        if not isinstance(read, Metadata):
            raise UnsafeCheckpointError(f"{self.path}: {METADATA} holds a {type(read).__name__}")
        for info in (read.storage_data or {}).values():
            name = PurePosixPath(info.relative_path)
            if name.is_absolute() or len(name.parts) != 1:
                raise UnsafeCheckpointError(f"{self.path}: it names a file elsewhere: {name}")
        read.storage_meta = parts.StorageMeta()
        return read


@final
class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is None and module == "torch":
            known = getattr(torch, name, None)
            known = known if isinstance(known, torch.dtype) else None
        if known is None:
            raise UnsafeCheckpointError(f"{METADATA} asks for {module}.{name}")
        return known


@final
class _TensorsOnly(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise UnsafeCheckpointError(f"{read_item.dest_index.fqn} is no tensor")
