"""Extra steps with and without the exchange of gradients."""

from __future__ import annotations

import pytest
import torch
from realruns import SPREAD, Runs, column, model
from torch import nn
from usermeasuring import Remembers

from dpexp.calibration import _held


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory)


def test_counters_buffers_and_generators_of_a_module_are_put_back() -> None:
    module, rows = Remembers(), torch.ones(1, 5)
    module(rows)
    put_back = _held(module)
    in_place = module.in_place
    first = [module(rows) for _ in range(3)]
    assert module.calls == 4
    put_back()
    assert (module.calls, float(module.in_place), float(module.replaced)) == (1, 1.0, 1.0)
    assert module.in_place is in_place  # others may hold it
    assert torch.equal(torch.stack([module(rows) for _ in range(3)]), torch.stack(first))


def test_what_is_no_plain_value_of_a_module_is_left_as_it_is() -> None:
    module = nn.Module()
    module.outputs = [1]
    put_back = _held(module)
    module.outputs.append(2)
    module.late = 3
    put_back()
    assert (module.outputs, module.late) == ([1, 2], 3)


@pytest.mark.parametrize("spread", ["ddp on 2", "fsdp on 2"])
def test_extra_steps_change_no_loss_even_if_the_model_counts_its_calls(
    spread: str, runs: Runs
) -> None:
    options = (*SPREAD[spread], *model("usermeasuring.Remembers"), "task=train", "epochs=2")
    plain = runs(*options)
    calibrated = runs(*options, "measure.calibration_pairs=3")
    assert calibrated.result.comm is not None
    assert calibrated.result.comm["calibration"]["pairs"] == 3
    assert column(calibrated, "loss") == column(plain, "loss")
    assert calibrated.result.model["final_sha256"] == plain.result.model["final_sha256"]


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("warmup_steps=0", "no warm-up before"),
        ("warmup_steps=9", "before its warm-up was over"),
        ("parallel.static_graph=true", "static_graph"),
        ("parallel.comm_hook=powersgd", "powersgd"),
    ],
)
def test_a_run_that_cannot_be_calibrated_says_why(option: str, reason: str, runs: Runs) -> None:
    run = runs(*SPREAD["ddp on 2"], "task=train", "measure.calibration_pairs=3", option)
    assert run.result.comm is not None
    assert run.result.comm["calibration"]["pairs"] == 0
    assert reason in run.result.comm["calibration"]["reason"]
