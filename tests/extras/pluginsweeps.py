"""For tests of sweeps under Hydra's plugins."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

TOLD = ("model=custom", "model._target_=userlaunched.Told")
JOBLIB = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
WARNING = "run at the same time"


def needs(name: str) -> pytest.MarkDecorator:
    """Skip where a plugin of Hydra is not installed."""
    absent = importlib.util.find_spec("hydra_plugins") is None or (
        importlib.util.find_spec(f"hydra_plugins.{name}") is None
    )
    return pytest.mark.skipif(absent, reason=f"needs {name} (the extra launchers)")


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """The results of a sweep's cells by the names of their folders."""
    files = sorted(folder.glob("*/run.json"))
    return {path.parent.name: json.loads(path.read_text()) for path in files}


def statuses(folder: Path) -> dict[str, str]:
    """How they ended."""
    return {name: run["status"] for name, run in results(folder).items()}
