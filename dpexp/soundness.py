"""Whether the parts of a result are of the types that they should have. Pure.

A ``run.json`` may have been edited by hand. What reads results relies on the types below, so a
result that has others is refused as a whole, with the place. Any part may be null or missing: an
earlier version did not write it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

# What a part may be: a type; AMOUNT and FIGURE; {key: what}, with ANY for all other keys; [what].
AMOUNT: Final = "a finite number of 0 or more"
FIGURE: Final = "a finite number"
ANY: Final = "*"
# Squares and quotients of larger ones are no floats any more.
_LARGEST = 1e100
_NAMES = {str: "a text", int: "a whole number", bool: "true or false", dict: "a set of keys"}

_INTERVAL = {"low": AMOUNT, "high": AMOUNT}
_DIFFERENCE = {"difference": AMOUNT, "tolerance": AMOUNT}
RESULT: Final[dict[str, Any]] = {
    "label": str,
    "parallel": str,
    "device": str,
    "emulated": bool,
    "scaling": str,
    "repeat": int,
    "num_devices": int,
    "num_processes": int,
    "threads_per_process": int,
    "pinned": [[int]],
    "claimed_devices": [str],
    "samples_seen": int,
    "timing_rank": int,
    "config": dict,
    "environment": {
        "cores": AMOUNT,
        "variables": dict,
        "code": {"git_commit": str, "sources": {ANY: str}},
    },
    "error": {
        **dict.fromkeys(
            ("kind", "type", "message", "traceback", "user_frames", "phase", "during", "host"), str
        ),
        "rank": int,
        "step": int,
        "stacks": {ANY: str},
    },
    "batch": {"global": int, "per_device": int},
    "steps": {"measured": int, "warmup": int},
    "checkpoint": {
        **dict.fromkeys(("count", "last_step", "bytes", "failed", "gone_on_from"), int),
        **dict.fromkeys(("copy_s", "write_s"), AMOUNT),
        "folder": str,
    },
    "restarts": {
        "count": int,
        "lost_s": AMOUNT,
        "causes": [{"rank": int, "kind": str, "message": str, "step": int, "gone_on_from": int}],
    },
    "timing": {ANY: {ANY: AMOUNT}},
    "throughput": {ANY: AMOUNT},
    "memory": {"peak_bytes": [AMOUNT], "peak_device_bytes": {ANY: AMOUNT}},
    "loss": {"first": FIGURE, "last": FIGURE},
    "metric": {"name": str, "value": FIGURE},
    "uncertainty": {"relative_standard_error": AMOUNT, "step_mean_s": _INTERVAL},
    "comm": {
        "calibration": {
            "rows": AMOUNT,
            "exchange_quartiles_s": [FIGURE],
            "backward_without_exchange_s": FIGURE,
        },
        "ranks": [{ANY: FIGURE}],
    },
    "stragglers": {
        "rank": int,
        "host": str,
        "phase": str,
        "ranks": [{"rank": int}],
        "clock_offsets_s": [FIGURE],
        "clock_error_s": AMOUNT,
    },
    "parity": {
        "verdict": str,
        "reason": str,
        "steps": int,
        "switched_off": [str],
        **dict.fromkeys(("loss", "gradients", "weights"), _DIFFERENCE),
    },
    "compute": {"mfu": AMOUNT, "achieved_flops_per_s_per_device": AMOUNT},
    "energy": {"per_sample_j": AMOUNT},
    "machine": {"warnings": [str]},
    "ranks": [{"rank": int, "phase_mean_s": {ANY: FIGURE}}],
    "hosts": [{"host": str, "ranks": [int]}],
    "injected": [str],
    "notes": [str],
}


def fault(node: Any, what: Any = RESULT, place: str = "") -> str | None:
    """The first part that is of another type: ``batch.global is 'x', not a whole number``."""
    if node is None:
        return None
    if isinstance(what, dict):
        if not isinstance(node, Mapping):
            return _told(place, node, dict)
        parts = [(each, what.get(key, what.get(ANY)), key) for key, each in node.items()]
    elif isinstance(what, list):
        if not isinstance(node, list):
            return f"{place} is {_shown(node)}, not a list"
        parts = [(each, what[0], str(number)) for number, each in enumerate(node)]
    else:
        return None if _fits(node, what) else _told(place, node, what)
    inner = (
        fault(each, wanted, f"{place}.{key}".lstrip("."))
        for each, wanted, key in parts
        if wanted is not None
    )
    return next((found for found in inner if found is not None), None)


def _fits(node: Any, what: Any) -> bool:
    if isinstance(what, type):
        whole = what is int and not isinstance(node, bool) and isinstance(node, int)
        return abs(node) < _LARGEST if whole else what is not int and isinstance(node, what)
    number = isinstance(node, (int, float)) and not isinstance(node, bool)
    # NaN is not smaller than anything.
    return number and abs(node) < _LARGEST and (what is FIGURE or node >= 0)


def _told(place: str, node: Any, what: Any) -> str:
    return f"{place} is {_shown(node)}, not {_NAMES[what] if isinstance(what, type) else what}"


def _shown(node: Any) -> str:
    text = repr(node) if not isinstance(node, int) or abs(node) < _LARGEST else "too large"
    return text if len(text) <= 60 else text[:57] + "..."
