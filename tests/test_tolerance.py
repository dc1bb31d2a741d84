"""Tolerances, computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dpexp.tolerance import (
    FP16_SPACING,
    LARGEST_CHANGE,
    PART,
    SINGLE,
    UNIT_ROUNDOFF,
    Deviation,
    deviation,
    gradient_tolerance,
    largest_of,
    relative_tolerance,
    verdict,
    weight_tolerance,
    worse,
)

U = 2.0**-24


def found(share: float, **changes: object) -> Deviation:
    base = {
        "largest_absolute": 0.5,
        "largest_relative": 0.25,
        "difference": 0.25,
        "tolerance": 0.1,
        "share": share,
        "step": 1,
        "tensor": "layer.weight",
    }
    return Deviation(**{**base, **changes})  # type: ignore[arg-type]


# Of sums


def test_unit_roundoffs_are_half_the_distance_from_one_to_the_next_number() -> None:
    assert np.finfo(np.float32).eps / 2 == SINGLE == UNIT_ROUNDOFF["fp32"]
    assert np.finfo(np.float16).eps / 2 == UNIT_ROUNDOFF["fp16"] == UNIT_ROUNDOFF["tf32"]
    assert UNIT_ROUNDOFF["bf16"] == 1 / 256  # 7 bits behind the point
    assert np.finfo(np.float16).smallest_subnormal == FP16_SPACING


def test_the_tolerance_grows_with_the_square_root_of_the_number_of_terms() -> None:
    assert relative_tolerance(1) == 8 * U
    assert relative_tolerance(10_000) == 800 * U
    # 30 rows of 5 features: 12.247... * 8 * 2**-24
    assert relative_tolerance(150) == pytest.approx(5.8400e-6, rel=1e-4)


def test_a_shorter_format_adds_eight_of_its_roundings() -> None:
    assert relative_tolerance(10_000, 2.0**-8) == pytest.approx(800 * U + 0.03125)


def test_sums_in_another_order_stay_within_the_tolerance_and_use_a_part_of_it() -> None:
    source = np.random.default_rng(0)
    shares = []
    for _ in range(50):
        terms = source.standard_normal((4096, 8)).astype(np.float32)
        one = np.add.accumulate(terms)[-1]  # one after the other
        other = np.add.accumulate(terms[::-1])[-1]
        allowed = relative_tolerance(4096) * largest_of(one)
        shares.append(deviation(other, one, allowed, 0, "sum").share)
    assert 0.001 < max(shares) <= 1.0


# Of gradients


def test_a_gradient_is_compared_with_its_own_size() -> None:
    assert gradient_tolerance(1e-5, largest=2.0, largest_of_all=50.0) == pytest.approx(2e-5)


def test_what_cancels_may_differ_as_another_order_of_rows_does() -> None:
    # 1e-5 * 1e-9, and 8 * 3e-8
    allowed = gradient_tolerance(1e-5, largest=1e-9, largest_of_all=1.0, noise=3e-8)
    assert allowed == pytest.approx(1e-14 + 2.4e-7)


def test_but_no_more_than_the_largest_gradient_may() -> None:
    allowed = gradient_tolerance(1e-5, largest=0.1, largest_of_all=1.0, noise=0.5)
    assert allowed == pytest.approx(1e-6 + 1e-5)


def test_transport_in_fp16_loses_what_is_smaller_than_its_spacing() -> None:
    allowed = gradient_tolerance(1e-3, largest=1e-8, largest_of_all=1.0, spacing=FP16_SPACING)
    assert allowed == pytest.approx(8 * 2.0**-24, rel=1e-3)


# Of weights


def test_a_weight_without_a_gradient_may_differ_by_its_rounding() -> None:
    allowed = weight_tolerance(4.0, None, 0.0, 0.1, 0, normalises=False)
    assert allowed == 8 * U * 4.0


def test_plain_descent_carries_a_gradients_error_over_by_the_learning_rate() -> None:
    gradient = np.array([3.0, 0.0])
    first = weight_tolerance(1.0, gradient, 1e-6, 0.1, 0, normalises=False)
    assert first == pytest.approx(8 * U + 4e-7)
    third = weight_tolerance(1.0, gradient, 1e-6, 0.1, 2, normalises=False)  # momentum
    assert third == pytest.approx(8 * U + 12e-7)


def test_a_normalising_optimizer_may_move_an_entry_of_rounding_in_any_direction() -> None:
    gradient = np.array([1.0, 1e-5, 0.0])
    allowed = weight_tolerance(0.0, gradient, 1e-6, 0.1, 0, normalises=True)
    # 4 * 1e-6 / 1; 4 * 1e-6 / 1e-5 = 0.4; no more than 3; times the rate. What plain descent would
    # carry over, 4 * 0.1 * 1e-6, is added.
    assert allowed == pytest.approx([4e-7 + 4e-7, 0.04 + 4e-7, 0.3 + 4e-7])
    fourth = weight_tolerance(0.0, gradient, 1e-6, 0.1, 3, normalises=True)
    assert fourth == pytest.approx([8e-7 + 16e-7, 0.08 + 16e-7, 0.3 + 16e-7])


def test_a_weight_in_a_shorter_format_is_rounded_to_it() -> None:
    allowed = weight_tolerance(1.0, None, 0.0, 0.1, 0, normalises=False, roundoff=2.0**-8)
    assert allowed == 8 / 256


@pytest.mark.parametrize("steps", [1, 2, 3, 30])
def test_adam_never_moves_an_entry_by_more_than_half_of_the_largest_change(steps: int) -> None:
    # The gradients that move it most: each in proportion to its weight in the mean of gradients
    # over its weight in the mean of squares.
    age = np.arange(steps)[::-1]
    in_mean, in_squares = 0.9**age, 0.999**age
    gradients = torch.tensor(in_mean / in_squares)
    weight = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    optimizer = torch.optim.Adam([weight], lr=1.0, eps=0.0)
    for gradient in gradients:
        before = weight.item()
        weight.grad = gradient.clone()
        optimizer.step()
    expected = math.sqrt((in_mean**2 / in_squares).sum() * in_squares.sum()) / in_mean.sum()
    assert before - weight.item() == pytest.approx(expected)
    assert 1.0 - 1e-9 <= expected <= LARGEST_CHANGE / 2


# Differences


def test_a_difference_is_told_in_the_tensors_own_size() -> None:
    got, reference = np.array([1.0, -4.5, 2.0]), np.array([1.0, -4.0, 2.0])
    assert deviation(got, reference, 1.0, 2, "w") == Deviation(0.5, 0.125, 0.125, 0.25, 0.5, 2, "w")


def test_the_entry_nearest_to_its_own_limit_counts_not_the_one_that_differs_most() -> None:
    got, reference = np.array([10.1, 1.02]), np.array([10.0, 1.0])
    limits = np.array([1.0, 0.01])
    seen = deviation(got, reference, limits.__getitem__, 0, "w")
    assert seen.share == pytest.approx(2.0)
    assert (seen.largest_absolute, seen.difference) == (pytest.approx(0.1), pytest.approx(0.002))
    assert seen.tolerance == pytest.approx(0.001)


def test_a_large_tensor_is_compared_in_parts_and_seen_as_a_whole() -> None:
    reference = np.ones((3, PART), dtype=np.float32)
    reference[0, 5] = 4.0  # the size that all differences refer to
    got = reference.copy()
    got[1, 7] += 0.5
    got[2, PART - 1] += 0.25
    limits = np.ones(3 * PART)
    limits[3 * PART - 1] = 0.125
    seen = deviation(got, reference, limits.__getitem__, 0, "w")
    assert (seen.largest_absolute, seen.largest_relative) == (0.5, 0.125)
    assert (seen.difference, seen.tolerance, seen.share) == (0.0625, 0.03125, 2.0)
    assert deviation(got, reference, 0.25, 0, "w").share == 2.0


def test_equal_tensors_differ_by_nothing_whatever_is_allowed() -> None:
    seen = deviation(np.ones(2), np.ones(2), 0.0, 0, "w")
    assert (seen.largest_absolute, seen.share, seen.tolerance) == (0.0, 0.0, 0.0)
    assert deviation(np.ones(0), np.ones(0), 0.0, 0, "w").share == 0.0


def test_anything_differs_infinitely_from_nothing() -> None:
    seen = deviation(np.array([1e-30]), np.zeros(1), 0.0, 0, "w")
    assert math.isinf(seen.largest_relative) and math.isinf(seen.share)


def test_the_worse_of_two_keeps_the_largest_differences_of_both() -> None:
    near = found(0.9, largest_absolute=1e-9, largest_relative=1e-8, tensor="near")
    far = found(0.1, largest_absolute=5.0, largest_relative=1e-9, tensor="far")
    for both in (worse(near, far), worse(worse(None, far), near)):
        assert (both.tensor, both.share) == ("near", 0.9)
        assert (both.largest_absolute, both.largest_relative) == (5.0, 1e-8)


@pytest.mark.parametrize(
    ("values", "expected"), [([1.0, -3.0], 3.0), ([], 0.0), ([-1.0, math.inf], math.inf)]
)
def test_the_largest_value_is_an_absolute_one(values: list[float], expected: float) -> None:
    assert largest_of(np.array(values)) == expected
    assert math.isnan(largest_of(np.array([*values, math.nan])))


# Verdicts


def test_all_within_their_limits_pass() -> None:
    assert verdict({"loss": found(0.0), "weights": found(1.0)}, None) == ("pass", None)


def test_one_beyond_its_limit_fails_and_is_named() -> None:
    judged, reason = verdict({"loss": found(0.1), "gradients": found(2.5)}, None)
    assert judged == "fail"
    assert reason == (
        "gradients differ from a single device's by 0.25 of their size, where 0.1 is allowed "
        "(step 1, layer.weight)"
    )


def test_a_share_that_is_no_number_fails() -> None:
    assert verdict({"loss": found(math.nan)}, None)[0] == "fail"


def test_what_could_not_be_compared_is_unknown_unless_something_failed() -> None:
    assert verdict({"loss": found(0.1)}, "no memory") == ("unknown", "no memory")
    assert verdict({"loss": found(1.5)}, "no memory")[0] == "fail"
    assert verdict({"loss": None}, None) == ("unknown", "nothing was compared")
