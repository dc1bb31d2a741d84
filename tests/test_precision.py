"""The number format of a step's arithmetic."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from dpexp.precision import autocast, make_scaler, set_float32
from dpexp.schema import Precision

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        (Precision.fp32, torch.float32),
        (Precision.tf32, torch.float32),
        (Precision.bf16, torch.bfloat16),
        (Precision.fp16, torch.float16),
    ],
)
def test_a_layer_computes_in_the_format_and_its_parameters_stay_as_they_are(
    precision: Precision, dtype: torch.dtype
) -> None:
    layer, context = nn.Linear(2, 2), autocast(precision, CPU)
    for _ in range(2):  # one context for all micro-batches and steps
        with context:
            assert layer(torch.zeros(1, 2)).dtype == dtype
        assert layer(torch.zeros(1, 2)).dtype == torch.float32
    assert layer.weight.dtype == torch.float32


@pytest.mark.parametrize("precision", list(Precision))
def test_only_fp16_scales_the_loss(precision: Precision) -> None:
    scaler = make_scaler(precision, CPU)
    assert (scaler is not None) is (precision is Precision.fp16)


@pytest.fixture
def float32() -> Iterator[None]:
    """The process-wide switches are put back."""
    precision, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = convolutions


@pytest.mark.usefixtures("float32")
@pytest.mark.parametrize(
    ("precision", "matmul", "convolutions"),
    [(Precision.tf32, "high", True), (Precision.fp32, "highest", False)],
)
def test_on_cuda_tf32_is_allowed_only_where_it_is_asked_for(
    precision: Precision, matmul: str, convolutions: bool
) -> None:
    set_float32(precision, torch.device("cuda"))
    assert torch.get_float32_matmul_precision() == matmul
    assert torch.backends.cudnn.allow_tf32 is convolutions


@pytest.mark.usefixtures("float32")
def test_elsewhere_the_switches_are_left_alone() -> None:
    torch.set_float32_matmul_precision("medium")
    set_float32(Precision.fp32, CPU)
    assert torch.get_float32_matmul_precision() == "medium"
