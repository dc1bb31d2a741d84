"""A parity certificate in words."""

from __future__ import annotations

from typing import Any

import pytest

from dpexp.report.parity import parity_failed, parity_line


def certificate(verdict: str = "pass", **changes: Any) -> dict[str, Any]:
    found = {"difference": 1.26e-8, "tolerance": 5.84e-6, "largest_relative": 3.0}
    kinds = dict.fromkeys(("loss", "gradients", "weights"), found)
    return {"parity": {"verdict": verdict, "reason": "why", "steps": 3, **kinds, **changes}}


def test_only_a_failure_is_one() -> None:
    assert parity_failed(certificate("fail")) == "parity failed: why"
    assert parity_failed(certificate("pass")) is None
    assert parity_failed(certificate("unknown")) is None


@pytest.mark.parametrize("run", [{}, {"parity": None}])
def test_a_run_without_a_check_has_neither_failed_nor_a_line(run: dict[str, Any]) -> None:
    assert parity_failed(run) is None
    assert parity_line(run) is None


def test_a_pass_is_told_with_what_comes_nearest_to_its_limit() -> None:
    near = {"difference": 2e-7, "tolerance": 7e-6}
    assert parity_line(certificate(gradients=near)) == (
        "parity: pass (3 steps; loss 1e-08 of 6e-06, gradients 2e-07 of 7e-06, weights 1e-08 of "
        "6e-06 allowed)"
    )


@pytest.mark.parametrize("verdict", ["fail", "unknown"])
def test_anything_else_is_told_with_its_reason(verdict: str) -> None:
    run = certificate(verdict, steps=1, loss=None, gradients=None, weights=None)
    assert parity_line(run) == f"parity: {verdict} (1 step): why"


def test_a_difference_that_json_cannot_hold_is_infinite() -> None:
    line = parity_line(certificate(loss={"difference": None, "tolerance": 1e-6}))
    assert line is not None
    assert "loss inf of 1e-06" in line
