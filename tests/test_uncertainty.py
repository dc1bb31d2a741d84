"""How well a mean step is known, from the steps of one run."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dpexp.uncertainty import block_length, relative_half_width, within_run

Values = npt.NDArray[np.float64]


def autocorrelated(seed: int, shape: tuple[int, int], rho: float) -> Values:
    """Rows of values around 0, each `rho` times the one before plus noise of deviation 1."""
    noise = np.random.default_rng(seed).normal(size=(shape[0], shape[1] + 100))
    values = noise.copy()
    for step in range(1, values.shape[1]):
        values[:, step] += rho * values[:, step - 1]
    return values[:, 100:]


def coverage(rows: Values, truth: float) -> tuple[float, float]:
    """How often the interval of within_run, and that of relative_half_width, holds the truth."""
    held = quick = 0
    for row in rows:
        interval = within_run(row, len(row))["step_mean_s"]
        held += interval["low"] <= truth <= interval["high"]
        half = relative_half_width(row)
        assert half is not None
        quick += abs(row.mean() - truth) <= half * row.mean()
    return held / len(rows), quick / len(rows)


def width(found: dict[str, Any]) -> float:
    interval = found["step_mean_s"]
    return float(interval["high"] - interval["low"])


def test_steps_that_all_take_as_long_have_an_interval_without_width() -> None:
    found = within_run([0.25] * 20, 600)
    assert found["step_mean_s"] == {"mean": 0.25, "low": 0.25, "high": 0.25}
    assert found["samples_per_s"] == {"mean": 120.0, "low": 120.0, "high": 120.0}
    assert found["relative_standard_error"] == 0.0
    assert (found["steps"], found["block_steps"], found["reason"]) == (20, 1, None)
    assert (found["level"], found["scope"]) == (0.95, "steps within this run")
    assert relative_half_width([0.25] * 20) == 0.0


@pytest.mark.parametrize("count", [0, 1, 7])
def test_fewer_than_eight_steps_have_no_interval_and_a_reason(count: int) -> None:
    found = within_run([0.25] * count, 30 * count)
    for name in ("step_mean_s", "samples_per_s", "relative_standard_error", "block_steps"):
        assert found[name] is None
    assert found["reason"] == f"{count} measured steps are too few: 8 are needed"
    assert relative_half_width([0.25] * count) is None


def test_samples_per_s_are_the_rows_of_a_mean_step_by_its_seconds() -> None:
    seconds = np.random.default_rng(1).lognormal(-4, 0.2, 50)
    found = within_run(seconds, 50 * 30)
    step, rate = found["step_mean_s"], found["samples_per_s"]
    assert step["low"] < step["mean"] < step["high"]
    assert step["mean"] == pytest.approx(seconds.mean())
    assert rate["mean"] == pytest.approx(30 / step["mean"])
    assert rate["low"] == pytest.approx(30 / step["high"])
    assert rate["high"] == pytest.approx(30 / step["low"])


def test_of_independent_steps_the_error_is_the_deviation_by_the_root_of_their_number() -> None:
    seconds = 1 + 0.1 * autocorrelated(2, (1, 1000), 0.0)[0]
    expected = 0.1 / math.sqrt(1000)  # 0.00316
    assert within_run(seconds, 1)["relative_standard_error"] == pytest.approx(expected, rel=0.15)
    assert relative_half_width(seconds) == pytest.approx(1.96 * expected, rel=0.15)


def test_steps_that_are_slow_in_a_row_say_less_than_as_many_independent_ones() -> None:
    seconds = 1 + 0.1 * autocorrelated(3, (1, 1000), 0.8)[0]
    shuffled = np.random.default_rng(3).permutation(seconds)
    # The mean of such steps has sqrt((1 + 0.8) / (1 - 0.8)) = 3 times the error.
    assert 2 < width(within_run(seconds, 1)) / width(within_run(shuffled, 1)) < 4
    quick, quick_shuffled = relative_half_width(seconds), relative_half_width(shuffled)
    assert quick is not None and quick_shuffled is not None
    assert 2 < quick / quick_shuffled < 4


def test_a_block_is_as_long_as_the_formula_of_politis_and_white_has_it() -> None:
    # For an autocorrelation of 0.5 per step: (1.5 (2 * 0.5 / (1 - 0.25))^2)^(1/3) 1000^(1/3).
    lengths = [block_length(row) for row in autocorrelated(4, (40, 1000), 0.5)]
    assert np.mean(lengths) == pytest.approx(13.9, rel=0.3)


def test_blocks_of_independent_steps_are_short_and_never_more_than_a_quarter() -> None:
    assert np.mean([block_length(row) for row in autocorrelated(5, (40, 1000), 0.0)]) < 4
    assert block_length(np.arange(1.0, 41.0)) <= 10


def test_many_steps_are_averaged_in_batches_first_and_say_the_same() -> None:
    seconds = 1 + 0.1 * autocorrelated(6, (1, 50_000), 0.0)[0]
    found = within_run(seconds, 1)
    assert found["steps"] == 50_000
    assert found["block_steps"] % 25 == 0  # 50,000 steps are 2,000 batches of 25
    expected = 0.1 / math.sqrt(50_000)
    assert found["relative_standard_error"] == pytest.approx(expected, rel=0.15)


def test_the_same_steps_give_the_same_interval() -> None:
    seconds = np.random.default_rng(7).lognormal(-4, 0.2, 100)
    assert within_run(seconds, 1) == within_run(list(seconds), 1)


@pytest.mark.parametrize(
    ("steps", "rho", "least"), [(20, 0.0, 0.91), (100, 0.0, 0.92), (1000, 0.5, 0.91)]
)
def test_about_95_of_100_intervals_hold_the_true_mean(steps: int, rho: float, least: float) -> None:
    held, quick = coverage(1 + 0.02 * autocorrelated(8, (300, steps), rho), 1.0)
    assert least <= held <= 0.99
    assert least <= quick <= 0.99


def test_a_few_very_slow_steps_make_the_interval_somewhat_too_narrow() -> None:
    """docs/measurement.md says so: ten slow steps do not tell how slow such steps are."""
    random = np.random.default_rng(9)
    rows = 1 + 0.02 * random.normal(size=(300, 200))
    rows += (random.random((300, 200)) < 0.05) * random.exponential(0.5, (300, 200))
    held, quick = coverage(rows, 1.025)
    assert 0.85 <= held <= 0.95
    assert 0.85 <= quick <= 0.95
