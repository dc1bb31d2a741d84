"""dpexp: how does this model, on this data, scale over devices, and can I trust the number?

Importing the package costs nothing: torch and Hydra are imported when :func:`run` or
:func:`sweep` is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpexp.api import Run, Sweep, run, sweep
    from dpexp.errors import ConfigError

__version__ = "0.1.0"
__all__ = ["ConfigError", "Run", "Sweep", "run", "sweep"]


def __getattr__(name: str) -> Any:
    if name == "ConfigError":
        from dpexp.errors import ConfigError

        return ConfigError
    if name in __all__:
        from dpexp import api

        return getattr(api, name)
    raise AttributeError(f"module 'dpexp' has no attribute {name!r}")
