"""Whether a run's figures may be compared with those of others. Pure; on plain run.json data."""

from __future__ import annotations

from typing import Any

from dpexp.report.parity import parity_failed


def untrusted(run: dict[str, Any]) -> str | None:
    """Why the run has no speed-up and is no baseline; None if it may be compared."""
    return parity_failed(run) or went_on(run)


def went_on(run: dict[str, Any]) -> str | None:
    """That the run did not come from its beginning to its end in one go, and so was disturbed."""
    restarts = run.get("restarts")
    if restarts:
        count, lost_s = restarts["count"], restarts["lost_s"]
        times = f"{count} time{'' if count == 1 else 's'}"
        return f"started again {times} after a rank was lost, {lost_s:.1f} s lost"
    step = (run.get("checkpoint") or {}).get("gone_on_from")
    return None if step is None else f"went on from a checkpoint after {step} steps"
