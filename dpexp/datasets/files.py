"""Arrays from a user's file."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpexp.datasets.rows import Rows
from dpexp.errors import ConfigError
from dpexp.texts import first_line

SUFFIXES = (".npy", ".npz", ".pt", ".safetensors")


def tensors(path: str, inputs: str | None, target: str | None) -> Rows:
    """Rows from a ``.npy``, ``.npz``, ``.pt`` or ``.safetensors`` file.

    Args:
        path: the file, relative to the folder in which dpexp was started. A ``.pt`` file holds a
            tensor, a tuple of tensors or a dict of tensors, and is read with
            ``weights_only=True``.
        inputs: name of the array with the inputs; null = the first one, or ``x``.
        target: name of the array with the targets; null = the second one, or ``y``, if any.

    Raises:
        ConfigError: no such file, an unknown suffix, an array that is not there, or arrays of
            different lengths.
    """
    file = Path(path).expanduser()
    if file.suffix not in SUFFIXES:
        raise ConfigError(
            "dataset.path",
            path,
            "is not a kind of file that can be read",
            allowed=", ".join(SUFFIXES),
        )
    if not file.is_file():
        raise ConfigError(
            "dataset.path",
            path,
            f"there is no such file (searched from {Path.cwd()})",
            fix="dataset.path=<a file>",
        )
    arrays = _read(file, path)
    wanted = _choose(arrays, inputs, target)
    lengths = {name: len(arrays[name]) for name in wanted}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise ConfigError(
            "dataset.path",
            path,
            f"the arrays differ in rows: {shown}",
            fix="dataset.inputs=… dataset.target=…",
        )
    return Rows(*(arrays[name] for name in wanted))


def _read(file: Path, path: str) -> dict[str, torch.Tensor]:
    try:
        loaded = _load(file)
    except (ValueError, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        first = first_line(error)
        if file.suffix in (".npy", ".npz") and "pickle" in first:  # numpy advises to allow it
            first = "it is damaged, or holds Python objects"
        raise ConfigError(
            "dataset.path",
            path,
            f"cannot be read as {file.suffix}: {first}",
            allowed="plain arrays and tensors; nothing that has to be unpickled",
        ) from error
    if isinstance(loaded, torch.Tensor):
        loaded = {"0": loaded}
    if isinstance(loaded, (tuple, list)):
        loaded = {str(index): entry for index, entry in enumerate(loaded)}
    arrays = {
        str(name): entry
        for name, entry in (loaded.items() if isinstance(loaded, dict) else ())
        if isinstance(entry, torch.Tensor) and entry.dim() > 0
    }
    if not arrays:
        raise ConfigError(
            "dataset.path", path, "holds no array with rows", allowed=", ".join(SUFFIXES)
        )
    return arrays


def _load(file: Path) -> Any:
    if file.suffix == ".pt":
        return torch.load(file, map_location="cpu", weights_only=True)
    if file.suffix == ".safetensors":
        try:
            from safetensors.torch import load_file
        except ImportError as error:
            raise ConfigError(
                "dataset.path",
                str(file),
                "needs the safetensors package",
                fix='pip install "dpexp[safetensors]"',
            ) from error
        return load_file(file)
    loaded = np.load(file, allow_pickle=False)
    if file.suffix == ".npy":
        return torch.from_numpy(loaded)
    with loaded:
        return {name: torch.from_numpy(loaded[name]) for name in loaded.files}


def _choose(arrays: dict[str, torch.Tensor], inputs: str | None, target: str | None) -> list[str]:
    names = list(arrays)
    for key, name in (("inputs", inputs), ("target", target)):
        if name is not None and name not in arrays:
            raise ConfigError(
                f"dataset.{key}", name, "there is no such array", allowed=", ".join(names)
            )
    if inputs is None:
        inputs = "x" if "x" in arrays else next(n for n in names if n != target)
    if target is None:
        others = [name for name in names if name != inputs]
        target = "y" if "y" in others else next(iter(others), None)
    return [inputs] if target is None else [inputs, target]
