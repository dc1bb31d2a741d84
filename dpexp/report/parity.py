"""What a run's parity certificate says, in words. Pure; works on plain run.json data."""

from __future__ import annotations

from typing import Any

_KINDS = ("loss", "gradients", "weights")


def parity_failed(run: dict[str, Any]) -> str | None:
    """Why the run's steps are not those of a single device; None if that is not known to be so."""
    certificate = run.get("parity") or {}
    if certificate.get("verdict") != "fail":
        return None
    return f"parity failed: {certificate['reason']}"


def parity_line(run: dict[str, Any]) -> str | None:
    """One line for a run's summary; None where parity was not checked."""
    certificate = run.get("parity")
    if certificate is None:
        return None
    steps = certificate["steps"]
    counted = f"{steps} step{'' if steps == 1 else 's'}"
    if certificate["verdict"] != "pass":
        return f"parity: {certificate['verdict']} ({counted}): {certificate['reason']}"
    found = {kind: certificate[kind] for kind in _KINDS}
    parts = [f"{kind} {_near(each)}" for kind, each in found.items()]
    off = certificate.get("switched_off") or []
    without = f"; without {', '.join(off)}" if off else ""
    return f"parity: pass ({counted}; {', '.join(parts)} allowed{without})"


def parity_row(run: dict[str, Any]) -> tuple[str, ...] | None:
    """Verdict, reason, and of loss, gradients and weights the difference of what is allowed."""
    certificate = run.get("parity")
    if certificate is None:
        return None
    found = [certificate.get(kind) for kind in _KINDS]
    parts = [_near(each) if each else "–" for each in found]
    return (certificate["verdict"], *parts, certificate.get("reason") or "")


def _near(found: dict[str, Any]) -> str:
    return f"{_number(found['difference'])} of {_number(found['tolerance'])}"


def _number(value: float | None) -> str:
    """As in 2e-07; a difference that JSON cannot hold is infinite."""
    return "inf" if value is None else f"{value:.1g}"
