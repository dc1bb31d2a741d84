"""What a run does beside its steps, by default and when asked."""

from __future__ import annotations

import pytest
from builders import make_config

from dpexp.extra_work import CALIBRATION_PAIRS, extra_work
from dpexp.schema import Task


@pytest.mark.parametrize(
    ("strategy", "device", "pairs"),
    [
        ("ddp", "cpu", CALIBRATION_PAIRS),
        ("ddp", "cuda", CALIBRATION_PAIRS),
        ("fsdp", "cpu", CALIBRATION_PAIRS),
        ("fsdp", "cuda", 0),
    ],
)
def test_a_sweep_calibrates_but_not_where_whole_gradients_may_not_fit(
    strategy: str, device: str, pairs: int
) -> None:
    config = make_config(strategy, task=Task.train)
    assert extra_work(config, device, 2, in_sweep=True)["calibration_pairs"] == pairs
    assert extra_work(config, device, 2, in_sweep=False)["calibration_pairs"] == 0
    asked = make_config(strategy, task=Task.train, measure={"calibration_pairs": 3})
    assert extra_work(asked, device, 2, in_sweep=False)["calibration_pairs"] == 3
    assert extra_work(asked, device, 1, in_sweep=False)["calibration_pairs"] == 0
