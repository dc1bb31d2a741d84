"""Images and tokens made on the fly: any number of rows, none of them kept."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from numpy.random import PCG64, SeedSequence
from torch.utils.data import Dataset, get_worker_info

from dpexp.errors import ConfigError

Words = npt.NDArray[np.uint64]
# Image files have 8 bits per pixel and channel. Taking 8 bits of each random word for a pixel, not
# the 24 of a float, makes an image three times as fast.
LEVELS = 256
PIXELS_PER_WORD = 8


class _Generated(Dataset[Any]):
    """Rows that depend on the seed and their index only, whoever asks and in whatever order."""

    def __init__(self, rows: int, seed: int) -> None:
        self._rows = rows
        self._seed = seed

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> Any:
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    @abstractmethod
    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch of these rows; see the subclasses for shapes."""

    @staticmethod
    def collate_fn(batch: Any) -> Any:
        """The batch as it is: ``__getitems__`` has already put it together."""
        return batch

    def _words(self, index: int, count: int) -> Words:
        """`count` random words of 64 bits that are this row's own."""
        if not 0 <= index < self._rows:
            raise IndexError(f"row {index} of {self._rows}")
        # As a spawn key the index is kept apart from a seed of more than 32 bits.
        source = PCG64(SeedSequence(self._seed, spawn_key=(int(index),)))
        return source.random_raw(count)


@final
class _Images(_Generated):
    """See :func:`images`."""

    def __init__(self, rows: int, shape: tuple[int, int, int], classes: int, seed: int) -> None:
        super().__init__(rows, seed)
        self._shape = shape
        self._classes = classes

    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Images [len(indices), channels, height, width] and classes [len(indices)]."""
        size = math.prod(self._shape)
        pixels = _room((len(indices), *self._shape), torch.float32)
        classes = _room((len(indices),), torch.int64)
        flat, labels = pixels.view(len(indices), size).numpy(), classes.numpy()
        for place, index in enumerate(indices):
            words = self._words(index, 1 + -(-size // PIXELS_PER_WORD))
            labels[place] = words[0] % self._classes
            levels = words[1:].view(np.uint8)[:size]
            np.multiply(levels, np.float32(1 / LEVELS), out=flat[place])
        return pixels, classes


@final
class _Tokens(_Generated):
    """See :func:`tokens`."""

    def __init__(self, rows: int, length: int, vocabulary: int, seed: int) -> None:
        super().__init__(rows, seed)
        self._length = length
        self._vocabulary = vocabulary

    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and the tokens after them, both [len(indices), length]."""
        inputs = _room((len(indices), self._length), torch.int64)
        targets = _room((len(indices), self._length), torch.int64)
        before, after = inputs.numpy(), targets.numpy()
        for place, index in enumerate(indices):
            row = self._words(index, self._length + 1) % self._vocabulary
            before[place], after[place] = row[:-1], row[1:]
        return inputs, targets


def images(
    rows: int, channels: int, height: int, width: int, classes: int, seed: int
) -> Dataset[Any]:
    """Random images with random classes, made when they are asked for.

    Args:
        rows: how many; a larger number costs nothing.
        channels: of an image, with `height` and `width` in pixels. Input batches are float32 of
            shape [batch, channels, height, width], uniform over 256 levels in 0 <= x < 1.
        classes: targets are int64 in 0 <= y < classes, shape [batch].
        seed: row i is the same for the same seed and i.

    Raises:
        ConfigError: an argument is too small.
    """
    _refuse_small(rows=rows, channels=channels, height=height, width=width, classes=classes)
    _refuse_seed(seed)
    return _Images(rows, (channels, height, width), classes, seed)


def tokens(rows: int, length: int, vocabulary: int, seed: int) -> Dataset[Any]:
    """Random tokens, made when they are asked for, with the token after each as its target.

    Args:
        rows: how many; a larger number costs nothing.
        length: tokens per row. Inputs and targets are int64 of shape [batch, length]; the target
            at t is the input at t+1.
        vocabulary: tokens are uniform in 0 <= token < vocabulary.
        seed: row i is the same for the same seed and i.

    Raises:
        ConfigError: an argument is too small.
    """
    _refuse_small(rows=rows, length=length, vocabulary=vocabulary)
    _refuse_seed(seed)
    return _Tokens(rows, length, vocabulary, seed)


def _room(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor; in a loader process, in the memory that it shares with its rank.

    As torch's own collation does: what lies elsewhere is copied there before it is sent.
    """
    size = math.prod(shape) * dtype.itemsize
    if size == 0 or get_worker_info() is None:
        return torch.empty(shape, dtype=dtype)
    storage: torch.UntypedStorage = torch.UntypedStorage._new_shared(size)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=dtype).set_(storage).view(shape)


def _refuse_small(**arguments: int) -> None:
    for key, value in arguments.items():
        if value < 1:
            raise ConfigError(f"dataset.{key}", value, "is too small", allowed="1 or more")


def _refuse_seed(seed: int) -> None:
    if seed < 0:
        raise ConfigError("dataset.seed", seed, "is too small", allowed="0 or more")
