"""State dicts: fingerprints, and files that are read and written without unpickling code."""

from __future__ import annotations

import hashlib
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpexp.errors import ConfigError
from dpexp.texts import first_line

StateDict = dict[str, Any]
KEY = "prepare.init_from"


def fingerprint(state: StateDict) -> str:
    """SHA-256 over the names, shapes and bytes of a state_dict."""
    digest = hashlib.sha256()
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor):
            digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
            plain = tensor.detach().to("cpu").contiguous().flatten()
            digest.update(plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    return digest.hexdigest()


def save_weights(state: StateDict, path: Path) -> None:
    """Write a model's own state_dict (no wrapper's prefix), whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        torch.save(state, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load_weights(model: nn.Module, name: str) -> tuple[str, ...]:
    """Put the weights of a file into the model: every key of one must be in the other.

    Args:
        name: a ``.pt``, ``.pth`` or ``.safetensors`` file with a state_dict, or with a dict that
            has one as `state_dict` or `model`.

    Returns:
        Notes on what had to be done: a wrapper's prefix ``module.`` was taken off the names.

    Raises:
        ConfigError: no such file, not a state_dict, or one of another model.
    """
    state, notes = _read(Path(name).expanduser(), name), []
    own = model.state_dict()
    stripped = {key.removeprefix("module."): value for key, value in state.items()}
    if state.keys() != own.keys() and stripped.keys() == own.keys():
        state = stripped
        notes.append(f"{KEY}: the names in {name} begin with a wrapper's 'module.', taken off")
    missing = [key for key in own if key not in state]
    extra = [key for key in state if key not in own]
    if missing or extra:
        raise _refused(
            name,
            "is of another model: "
            + "; ".join(
                f"{what} {len(keys)} ({', '.join(keys[:3])}{', …' if len(keys) > 3 else ''})"
                for what, keys in (("it lacks", missing), ("the model does not have", extra))
                if keys
            ),
        )
    for key, value in own.items():
        if isinstance(value, torch.Tensor) and _kind(value) != _kind(state[key]):
            kinds = f"{_kind(state[key])}, that of the model {_kind(value)}"
            raise _refused(name, f"is of another model: its {key} is {kinds}")
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:]] or [str(error)]
        raise _refused(name, f"is of another model: {lines[0]}") from error
    return tuple(notes)


def _kind(value: Any) -> str:
    """What kind of numbers, of whatever width: torch would convert without a word."""
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    if value.is_complex():
        return "complex"
    return "real" if value.is_floating_point() else "whole or bool"


def _read(file: Path, name: str) -> StateDict:
    if not file.is_file():
        raise _refused(name, f"there is no such file (searched from {Path.cwd()})")
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            loaded: Any = load_file(file)
        else:
            loaded = torch.load(file, map_location="cpu", weights_only=True)
    except ImportError as error:
        fix = 'pip install "dpexp[safetensors]"'
        raise ConfigError(KEY, name, "needs the safetensors package", fix=fix) from error
    except Exception as error:  # safetensors has an error class of its own
        first = first_line(error)
        if isinstance(error, pickle.UnpicklingError):  # torch advises to allow it
            first = "it holds more than tensors and plain values, or is damaged"
        raise _refused(name, f"cannot be read: {first}") from error
    for inner in ("state_dict", "model"):
        if isinstance(loaded, dict) and isinstance(loaded.get(inner), dict):
            loaded = loaded[inner]
    if not (isinstance(loaded, dict) and loaded and all(isinstance(k, str) for k in loaded)):
        raise _refused(name, f"holds a {type(loaded).__name__}, not a state_dict")
    return loaded


def _refused(name: str, problem: str) -> ConfigError:
    return ConfigError(KEY, name, problem, fix="a state_dict of this model, as weights.pt is one")
