"""Tensors of any kind as plain numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dpexp.arrays import array, largest_in, roundoff


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_numbers_of_any_width_keep_their_values(dtype: torch.dtype) -> None:
    assert array(torch.tensor([0.5, -3.0], dtype=dtype)).tolist() == [0.5, -3.0]


def test_complex_numbers_are_pairs_and_sparse_ones_filled() -> None:
    assert array(torch.tensor([1 + 2j]).conj()).tolist() == [[1.0, -2.0]]
    sparse = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([4.0]), (3,))
    assert array(sparse).tolist() == [0.0, 4.0, 0.0]
    assert largest_in(sparse) == 4.0


def test_the_largest_value_is_an_absolute_one() -> None:
    assert largest_in(torch.tensor([1.0, -3.0])) == 3.0
    assert largest_in(torch.ones(0)) == 0.0
    assert math.isnan(largest_in(torch.tensor([1.0, float("nan")])))


def test_a_gradient_that_needs_none_itself_is_read_as_well() -> None:
    assert array(torch.ones(2, requires_grad=True)).sum() == 2.0


def test_the_unit_roundoff_is_that_of_the_format_but_no_finer_than_single() -> None:
    assert roundoff(torch.ones(1)) == np.finfo(np.float32).eps / 2
    assert roundoff(torch.ones(1, dtype=torch.float64)) == 2.0**-24
    assert roundoff(torch.ones(1, dtype=torch.bfloat16)) == 2.0**-8
    assert roundoff(torch.ones(1, dtype=torch.int64)) == 2.0**-24
