"""Packages that dpexp itself does not need: which extra brings them, and what it means that one is
missing or does not fit."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from dpexp.errors import ConfigError
from dpexp.texts import first_line

# The extra that brings a package.
EXTRAS = {
    "torchvision": "vision",
    "transformers": "hf",
    "datasets": "hf",
    "sklearn": "digits",
    "safetensors": "safetensors",
    "mlflow": "mlflow",
    "wandb": "wandb",
}
# Targets of dpexp's own that need a package.
NEEDS = {
    "dpexp.datasets.image_folder": "torchvision",
    "dpexp.datasets.cifar10": "torchvision",
    "dpexp.datasets.hf": "datasets",
    "dpexp.datasets.digits": "sklearn",
    "dpexp.sinks.MlflowSink": "mlflow",
    "dpexp.sinks.WandbSink": "wandb",
}
# Where pip knows a package by another name.
PIP_NAMES = {"sklearn": "scikit-learn"}


def refuse_missing(key: str, node: Any) -> None:
    """Refuse the first `_target_` in a config node whose package is not installed.

    Packages that are in no extra are left to the import.

    Args:
        key: the node's place in the config.
        node: plain data; nodes in it are looked at too.

    Raises:
        ConfigError: names the target, the package and the extra that brings it.
    """
    if isinstance(node, dict):
        target = node.get("_target_")
        if isinstance(target, str):
            package = NEEDS.get(target) or target.strip().split(".")[0]
            if package in EXTRAS and not _is_there(package, own=target in NEEDS):
                raise missing(f"{key}._target_", target, package)
        for name, entry in node.items():
            refuse_missing(f"{key}.{name}", entry)
    elif isinstance(node, (list, tuple)):
        for index, entry in enumerate(node):
            refuse_missing(f"{key}[{index}]", entry)


def missing(key: str, value: object, package: str) -> ConfigError:
    """The refusal of what needs a package of :data:`EXTRAS` that is not installed."""
    return ConfigError(
        key,
        value,
        f"needs {PIP_NAMES.get(package, package)}, which is not installed",
        fix=f'pip install "dpexp[{EXTRAS[package]}]"',
    )


def load(target: str, key: str) -> Any:
    """Import the package that a target of dpexp's own needs.

    Raises:
        ConfigError: it is not installed, or cannot be imported.
    """
    package = NEEDS[target]
    try:
        return importlib.import_module(package)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise missing(key, target, package) from error
        reason = explain_broken(target, error)
        if reason is None:
            raise
        fix = f"install the {package} that is made for it"
        raise ConfigError(key, target, reason, fix=fix) from error


def explain_broken(target: str, error: BaseException) -> str | None:
    """Why a package of :data:`EXTRAS` that is installed could not be imported, as a clause.

    torchvision holds compiled code for one version of torch. With another one its import fails
    with errors that name neither ("operator torchvision::nms does not exist").

    Args:
        target: the `_target_` whose import failed.
        error: what was raised, with its causes.

    Returns:
        None where the failure has another reason: a package that is not installed, a name that the
        package does not have, or an error that its code raised when called.
    """
    for failure in _from_the_root(error):
        package = _imported_by(failure.__traceback__)
        if package is None or isinstance(failure, ModuleNotFoundError):
            continue
        first = first_line(failure)
        fits = package == "torchvision" or "torch" in first
        problem = "does not fit this torch" if fits else "cannot be imported"
        reason = f"{package} is installed but {problem} ({first})"
        named = package in (NEEDS.get(target), target.strip().split(".")[0])
        return reason if named else f"{reason}; {target} imports it"
    return None


def _is_there(package: str, *, own: bool) -> bool:
    """Whether a package can be imported, by ranks that have the user's folder on their path.

    Args:
        own: the library itself is needed. A folder without code that happens to have its name
            (``datasets/``) will not do; for a target of the user's it may hold their module.
    """
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module without a spec is loaded already
        return True
    if own:
        return spec is not None and spec.origin is not None
    here = Path.cwd()
    return spec is not None or (here / package).is_dir() or (here / f"{package}.py").is_file()


def _from_the_root(error: BaseException) -> Iterator[BaseException]:
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return reversed(chain)


def _imported_by(trace: TracebackType | None) -> str | None:
    """The innermost package of EXTRAS whose module was being loaded when an error was raised."""
    found = None
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_name == "<module>":
            package = str(frame.f_globals.get("__name__", "")).split(".")[0]
            found = package if package in EXTRAS else found
        trace = trace.tb_next
    return found
