"""What makes two runs the same run: their config, but for limits of time. Pure."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

# How long to wait before a run is given up, and how often it is tried: a run that ended well was
# not ended by them.
LIMITS = ("parallel.timeout_s", "parallel.max_restarts", "loader.timeout_s", "watchdog_s")


def config_hash(config: Mapping[str, Any]) -> str:
    """SHA-256 of a run's config as JSON with sorted keys, without :data:`LIMITS`.

    Args:
        config: as in ``run.json``, or as it will be written there.
    """
    text = json.dumps(identifying(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def identifying(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a config as JSON types without :data:`LIMITS`."""
    copied: dict[str, Any] = strict_json(config)
    for key in LIMITS:
        group, _, name = key.rpartition(".")
        node = copied.get(group) if group else copied
        if isinstance(node, dict):
            node.pop(name, None)
    return copied


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between two configs, a line for each key: ``batch_size: 30, now 60``."""
    before, now = _flat(identifying(old)), _flat(identifying(new))
    keys = [*before, *(key for key in now if key not in before)]
    return [
        f"{key}: {_shown(before, key)}, now {_shown(now, key)}"
        for key in keys
        if before.get(key, _GONE) != now.get(key, _GONE)
    ]


def strict_json(value: Any) -> Any:
    """`value` as strict JSON types: a non-finite number becomes None, a tuple a list."""
    if isinstance(value, Mapping):
        return {str(key): strict_json(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict_json(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return str(value)


_GONE = object()


def _flat(node: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in node.items():
        inner = _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else None
        found.update({f"{prefix}{key}": value} if inner is None else inner)
    return found


def _shown(flat: dict[str, Any], key: str) -> str:
    return json.dumps(flat[key]) if key in flat else "not there"
