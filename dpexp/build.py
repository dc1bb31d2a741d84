"""Building the user's objects from `_target_` nodes, with errors that say which of three things
went wrong: the name cannot be imported, the arguments do not fit, or the constructor raised.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from torch import nn
from torch.nn.parameter import is_lazy

from dpexp.errors import ConfigError
from dpexp.extras import explain_broken


class UserCodeError(RuntimeError):
    """A constructor of the user raised; the cause is in ``__cause__``."""


def build(key: str, node: dict[str, Any], *, partial: bool = False) -> Any:
    """The object that a `_target_` node describes.

    Args:
        key: the node's place in the config, for messages.
        node: plain data; nested nodes with a `_target_` are built too. Lists stay plain lists.
        partial: return a callable that still lacks arguments.

    Raises:
        ConfigError: the target cannot be found, or does not take these arguments.
        UserCodeError: its constructor raised.
    """
    target = node["_target_"]
    try:
        return instantiate(node, _convert_="all", _partial_=partial)
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, ConfigError):
            raise cause from None
        if cause is None or "Error locating target" in str(error):
            reason = " ".join(str(cause or error).split())
            broken = explain_broken(target, cause or error)
            fix = "check the spelling; modules are searched in the folder where dpexp is started"
            raise ConfigError(
                f"{key}._target_",
                target,
                f"cannot be imported: {broken or _not_found(target) or reason}",
                fix=fix if broken is None else "the release of it that is made for this torch",
            ) from error
        raise explain_call(key, target, cause) from cause


def build_callable(key: str, node: dict[str, Any]) -> Any:
    """Something to call: an object of a class, or a function that the node gives arguments.

    Raises:
        ConfigError: as :func:`build`; or the result cannot be called or updated.
    """
    made = build(key, node, partial=not _is_class(node["_target_"]))
    if not callable(made) and not hasattr(made, "update"):
        raise ConfigError(
            f"{key}._target_",
            node["_target_"],
            f"gives a {type(made).__name__}, which cannot be called",
            allowed="a class whose objects can be called, or a function",
        )
    return made


def _is_class(target: str) -> bool:
    module, _, name = target.strip().rpartition(".")
    try:  # not Hydra's own look-up, which logs what it does not find
        return isinstance(getattr(importlib.import_module(module), name), type)
    except Exception:  # noqa: BLE001  # build says why
        return True


def _not_found(target: str) -> str | None:
    """Why there is no such class, where its module can be imported; else None."""
    module, _, name = target.strip().rpartition(".")
    if module == "__main__":
        return "the processes of a run do not have the main program; put the class into a module"
    try:
        importlib.import_module(module)
    except Exception:  # noqa: BLE001  # the caller has the reason already
        return None
    return f"module {module!r} has no {name!r}"


def explain_call(key: str, target: str, cause: BaseException) -> Exception:
    """Why calling a target failed: its arguments (ConfigError) or its code (UserCodeError)."""
    if isinstance(cause, ConfigError):
        return cause
    if isinstance(cause, TypeError) and _raised_by_caller(cause):
        return ConfigError(
            key,
            target,
            f"does not take these arguments: {cause}",
            fix=f"override or remove the argument ({key}.<name>=…, or ~{key}.<name>)",
        )
    return UserCodeError(
        f"{key}._target_={target} raised {type(cause).__name__}: {cause}. "
        f"Try: other arguments ({key}.<name>=…)"
    )


def _raised_by_caller(error: BaseException) -> bool:
    """Whether the call itself was refused: no frame of the callee is on the traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
    return name.startswith(("hydra.", "dpexp.build", "dpexp.optimizers", "dpexp.sinks.opening"))


def build_model(node: dict[str, Any], device: torch.device) -> nn.Module:
    """The model on its device, in train mode as torch makes it.

    Raises:
        ConfigError: the target is not a module, or see :func:`build`.
    """
    model = build("model", node)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            "model._target_",
            node["_target_"],
            f"gives a {type(model).__name__}, not a torch module",
            allowed="a class or function that gives a torch.nn.Module",
        )
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise ConfigError(
            "model._target_",
            node["_target_"],
            "has lazy layers, whose sizes are known only after a first call",
            fix="layers with sizes, such as Linear instead of LazyLinear",
        )
    for name in hidden_modules(model):
        warnings.warn(
            f"model: {name} holds modules or parameters in a plain list or dict; torch does not "
            "see them: they are not moved, copied to devices or trained (use nn.ModuleList)",
            stacklevel=2,
        )
    return model.to(device)


def hidden_modules(model: nn.Module) -> list[str]:
    """Attributes that hide modules or parameters in plain lists, tuples or dicts, by name."""
    found = []
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name.startswith("_"):
                continue
            entries = value.values() if isinstance(value, dict) else value
            if isinstance(value, (list, tuple, dict)) and any(
                isinstance(entry, (nn.Module, nn.Parameter)) for entry in entries
            ):
                found.append(f"{path}.{name}" if path else name)
    return found
