"""What ranks tell each other, as bytes from which only data can come when they are read.

A plain pickle can run anything in the process that reads it, and the connections between ranks are
open to whoever reaches them. So who reads makes no other objects than those of dpexp's records and
of classes that are in what it has written itself.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Iterator
from typing import Any, final

import torch

from dpexp import records

# Of `builtins` nothing else: eval is one of them.
_HARMLESS = {"bytearray", "complex", "frozenset", "range", "set", "slice"}
# NumPy's numbers and arrays may be on one rank and not on another.
_NUMBERS = {
    ("collections", "OrderedDict"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.numeric", "_frombuffer"),
    ("numpy.core.multiarray", "scalar"),  # of NumPy 1
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.numeric", "_frombuffer"),
}
# These read what they are given as a pickle of its own.
_READERS = {("torch.storage", "_load_from_bytes")}


class UntrustedError(pickle.UnpicklingError):
    """What was read names something else than data."""


def pack(value: Any) -> bytes:
    """`value` as bytes. Its tensors come back on the CPU and without gradients.

    Raises:
        Exception: something in it cannot be pickled.
    """
    packed = io.BytesIO()
    _Packer(packed, pickle.HIGHEST_PROTOCOL).dump(value)
    return packed.getvalue()


def unpack_all(packed: Iterable[bytes], own: bytes) -> Iterator[Any]:
    """What :func:`pack` has made into bytes, in other processes or in this one.

    Args:
        own: what this process has packed for the same purpose; the classes in it are allowed.

    Raises:
        UntrustedError: there is another class or a function in one of them.
    """
    known = _Reader(own, None)
    known.load()
    for each in packed:
        yield _Reader(each, known.found).load()


@final
class _Packer(pickle.Pickler):
    def persistent_id(self, found: Any) -> Any:
        # torch's own way would name a function that unpickles.
        if not isinstance(found, torch.Tensor) or found.layout is not torch.strided:
            return None
        plain = found.detach().cpu().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
        raw = plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        kind = None if type(found) is torch.Tensor else type(found)
        return str(found.dtype).removeprefix("torch."), tuple(found.shape), raw, kind


@final
class _Reader(pickle.Unpickler):
    """Args: allowed: names of classes, besides those of dpexp's records; None = all, noted."""

    def __init__(self, packed: bytes, allowed: set[tuple[str, str]] | None) -> None:
        super().__init__(io.BytesIO(packed))
        self._allowed = allowed
        self.found: set[tuple[str, str]] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.found.add((module, name))
        own = module == records.__name__ and isinstance(vars(records).get(name), type)
        known = own or (module, name) in _NUMBERS
        named = self._allowed is None or (module, name) in self._allowed
        if module == "builtins":
            named = name in _HARMLESS
        if not (known or named) or (module, name) in _READERS:
            raise UntrustedError(f"{module}.{name} is not expected in what a rank says")
        return super().find_class(module, name)

    def persistent_load(self, told: Any) -> torch.Tensor:
        name, shape, raw, kind = told
        dtype = getattr(torch, str(name))
        if not isinstance(dtype, torch.dtype):
            raise UntrustedError(f"{name} is no type of numbers")
        # An empty buffer is refused by frombuffer.
        flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        made = flat.reshape(shape)
        return made if kind is None else made.as_subclass(kind)
