"""The judge on rank 0, given steps by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from builders import make_plan_for

from dpexp.batches import Inputs
from dpexp.judge import Judge
from dpexp.reference import Reference
from dpexp.schema import CommHook, Precision, Task

CPU = torch.device("cpu")
MODEL = {"_target_": "torch.nn.Linear", "in_features": 5, "out_features": 2}


class Replay:
    """A run of one device whose results can be changed before the judge sees them."""

    def __init__(self, strategy: str = "none", **config: Any) -> None:
        plan = make_plan_for(strategy, **{"task": Task.train, "model": MODEL, **config})
        self.judge = Judge(plan, CPU)
        self.cell = Reference(plan, CPU, batch_norm=True)
        for name, parameter in self.cell.parameters.items():
            self.judge.begin(name, parameter)

    def step(
        self,
        number: int,
        loss: float = 1.0,
        gradient: float = 1.0,
        weight: float = 1.0,
        rows: Inputs | None = None,
    ) -> None:
        """One step whose loss, gradients and weights are multiplied by these numbers."""
        inputs = rows or batch()
        made = self.cell.step(inputs, 10)
        self.judge.take(number, [(inputs, 10)], lambda packed: packed, made.loss * loss)
        scale = self.cell.training.loss_scale
        for name, parameter in self.cell.parameters.items():
            assert parameter.grad is not None
            self.judge.gradient(name, parameter.grad * gradient, scale)
        self.cell.update()
        self.judge.update()
        for name, parameter in self.cell.parameters.items():
            with torch.no_grad():
                parameter.mul_(weight)
            self.judge.weight(name, parameter)

    def verdict(self) -> tuple[str, str | None]:
        certificate = self.judge.certificate([])
        return certificate["verdict"], certificate["reason"]


def batch(value: float = 1.0) -> Inputs:
    source = torch.Generator().manual_seed(0)
    inputs = torch.randn(10, 5, generator=source) * value
    return Inputs((inputs,), {}, torch.randn(10, 2, generator=source))


def test_a_run_that_does_the_same_passes_without_any_difference() -> None:
    replay = Replay()
    replay.step(0)
    replay.step(1)
    certificate = replay.judge.certificate(["Dropout x1"])
    assert certificate["verdict"] == "pass"
    assert (certificate["reason"], certificate["steps"]) == (None, 2)
    assert certificate["initial_weights_identical"] is True
    assert certificate["switched_off"] == ["Dropout x1"]
    assert certificate["terms"] == 50  # 10 rows of 5 features
    for kind in ("loss", "gradients", "weights"):
        assert certificate[kind]["largest_absolute"] == 0.0
        assert certificate[kind]["tolerance"] > 0.0


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"loss": 1.0001}, "losses differ"),
        ({"gradient": 1.0001}, "gradients differ"),
        ({"weight": 1.0001}, "weights differ"),
    ],
)
def test_each_that_differs_fails_and_is_named_with_its_step(
    changed: dict[str, float], named: str
) -> None:
    replay = Replay()
    replay.step(0)
    replay.step(1, **changed)
    verdict, reason = replay.verdict()
    assert verdict == "fail"
    assert reason is not None
    assert reason.startswith(f"{named} from a single device's by 0.0001 of their size")
    assert "(step 1, " in reason


@pytest.mark.parametrize("name", ["loss", "gradient", "weight"])
def test_a_difference_that_rounding_explains_passes(name: str) -> None:
    replay = Replay()
    replay.step(0, **{name: 1 + 2.0**-23})
    assert replay.verdict() == ("pass", None)


def test_a_run_that_is_compiled_says_that_the_check_was_not() -> None:
    assert Replay(prepare={"compile": True}).judge.certificate([])["without_compile"] is True
    assert Replay().judge.certificate([])["without_compile"] is False


def test_each_step_is_judged_from_the_weights_that_the_run_had() -> None:
    replay = Replay()
    replay.step(0, weight=1.5)
    replay.step(1)  # right again, though the weights are not those of a single device
    certificate = replay.judge.certificate([])
    assert certificate["verdict"] == "fail"
    assert certificate["weights"]["step"] == 0
    assert certificate["gradients"]["largest_absolute"] == 0.0


def test_other_initial_weights_are_told_and_taken_over() -> None:
    replay = Replay()
    weight = replay.cell.parameters["weight"]
    with torch.no_grad():
        weight.add_(1.0)
    replay.judge.begin("weight", weight)
    replay.judge.begin("bias", replay.cell.parameters["bias"])
    replay.step(0)
    certificate = replay.judge.certificate([])
    assert certificate["initial_weights_identical"] is False
    assert certificate["verdict"] == "pass"


# Numbers that are not finite


def test_a_loss_that_is_not_finite_on_both_sides_is_unknown() -> None:
    replay = Replay()
    replay.step(0, rows=batch(math.inf))
    assert replay.verdict() == ("unknown", "the loss of step 0 is not finite")


def test_a_gradient_that_is_not_finite_on_one_side_fails() -> None:
    replay = Replay()
    replay.step(0, gradient=math.inf)
    assert replay.verdict()[0] == "fail"


def test_under_a_scaler_an_overflow_on_both_sides_only_leaves_the_step_out() -> None:
    replay = Replay(precision=Precision.fp16)
    replay.step(0, rows=batch(1e3))  # times the scale of 65536: too large for fp16
    assert replay.judge.certificate([])["gradients"] is None
    for step in range(1, 12):
        replay.step(step)
    assert replay.verdict() == ("pass", None)


def test_under_a_scaler_an_overflow_on_one_side_is_unknown() -> None:
    replay = Replay(precision=Precision.fp16)
    replay.step(0, gradient=math.inf)
    verdict, reason = replay.verdict()
    assert verdict == "unknown"
    assert reason is not None
    assert reason.endswith("is not finite on one side only")


# What cannot be compared


def test_approximate_gradients_are_compared_until_they_begin() -> None:
    replay = Replay("ddp", parallel={"comm_hook": CommHook.powersgd, "powersgd_start": 2})
    for step in range(3):
        replay.step(step)
    certificate = replay.judge.certificate([])
    assert certificate["steps"] == 2
    assert replay.verdict() == ("unknown", "powersgd sends approximate gradients from step 2 on")


def test_a_model_that_fails_on_a_single_device_alone_is_unknown() -> None:
    node = {"_target_": "userparity.OnlySharded", "most": 9}
    judge = Judge(make_plan_for(task=Task.train, model=node), CPU)
    judge.take(0, [(batch(), 10)], lambda packed: packed, 1.0)
    judge.gradient("layer.weight", None, 1.0)  # the run goes on
    certificate = judge.certificate([])
    assert certificate["verdict"] == "unknown"
    assert certificate["reason"] == (
        "the single device failed: OutOfMemoryError: no memory for 10 rows"
    )


def test_a_model_that_cannot_even_be_built_there_is_unknown() -> None:
    judge = Judge(make_plan_for(task=Task.train, model={"_target_": "usercode.Raising"}), CPU)
    judge.begin("weight", torch.ones(1))
    verdict = judge.certificate([])["verdict"]
    assert verdict == "unknown"


def test_a_failure_before_the_comparison_ended_stays_a_failure() -> None:
    replay = Replay()
    replay.step(0, gradient=2.0)
    replay.step(1, rows=batch(math.inf))
    assert replay.verdict()[0] == "fail"
