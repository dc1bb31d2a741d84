"""Where a run was and what it left to go on from, a line each. Pure; on plain run.json data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MOST = 8  # hosts or ranks that a line names


def hosts_line(run: dict[str, Any]) -> str | None:
    """Which ranks were on which host; None where there was one host."""
    hosts = run.get("hosts") or []
    if len(hosts) < 2:
        return None
    parts = [f"{each['host']} ({_counted('rank', each['ranks'])})" for each in hosts]
    return f"on {len(hosts)} hosts: {_first(parts)}"


def pinned_line(run: dict[str, Any]) -> str | None:
    """Which cores the ranks kept to; None for a run that was not pinned."""
    pinned = run.get("pinned")
    if not pinned:
        return None
    parts = [f"rank {rank} to {_counted('core', cores)}" for rank, cores in enumerate(pinned)]
    return f"pinned: {_first(parts)}"


def checkpoints_line(run: dict[str, Any]) -> str | None:
    """How many checkpoints were saved; None for a run that was to save none."""
    found = run.get("checkpoint")
    if found is None:
        return None
    told = "none was due"
    if found["count"]:
        told = f"{found['count']:,} saved, the last after {found['last_step']:,} steps"
    elif found["failed"] or found["gone_on_from"] is not None:
        told = "none saved"
    failed = f"; {found['failed']:,} could not be saved" if found["failed"] else ""
    return f"checkpoints: {told}{failed}"


def _first(parts: Sequence[str]) -> str:
    left = len(parts) - MOST
    return ", ".join(parts[:MOST]) + (f" and {left:,} more" if left > 0 else "")


def _counted(name: str, numbers: Sequence[int]) -> str:
    """``rank 3``, ``cores 0-3 and 8``: numbers that follow each other as a range."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][-1] == number - 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    parts = ["-".join(map(str, span)) for span in spans]
    told = " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
    return f"{name}{'s' * (len(numbers) > 1)} {told}"
