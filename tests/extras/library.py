"""Libraries that only some environments have."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

import pytest

from dpexp.extras import EXTRAS, explain_broken


def library(name: str) -> ModuleType:
    """The library, or skip the module that asks for it, with the reason.

    `make test-extras` imports them all first, so that there nothing is skipped unseen.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        pytest.skip(f"needs {name} (the extra {EXTRAS[name]})", allow_module_level=True)
    # scikit-learn, which they import when it is there, sets a variable of the environment.
    importlib.import_module("sklearn")
    try:
        return importlib.import_module(name)
    except Exception as error:
        reason = explain_broken(f"{name}.x", error)
        if reason is None:
            raise
        pytest.skip(reason, allow_module_level=True)
