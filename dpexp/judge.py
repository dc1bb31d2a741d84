"""Compares a run's steps with a single device's, as they are made. On rank 0 only."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, final

import numpy as np
import torch

from dpexp.arrays import array, largest_in, roundoff
from dpexp.batches import Inputs
from dpexp.plan import RunPlan
from dpexp.reference import Reference, ReferenceStep
from dpexp.schema import CommHook, Precision
from dpexp.texts import first_line
from dpexp.tolerance import (
    FP16_SPACING,
    SINGLE,
    UNIT_ROUNDOFF,
    Allowed,
    Array,
    Deviation,
    deviation,
    gradient_tolerance,
    largest_of,
    relative_tolerance,
    verdict,
    weight_tolerance,
    worse,
)
from dpexp.uncut import numbers_in, uncut

_KINDS = ("loss", "gradients", "weights")


@final
class Judge:
    """Takes what the ranks bring, step by step, and gives the certificate.

    For each step: :meth:`take`, :meth:`gradient` of each parameter, :meth:`update`, :meth:`weight`
    of each. After a step the reference goes on from the weights of the run: so each step is judged
    by itself, and a difference that rounding made in one is not blown up by the next.

    What fails in the reference alone (a model that fits no single device) ends the comparison, not
    the run.
    """

    def __init__(self, plan: RunPlan, device: torch.device) -> None:
        self._plan, self._device = plan, device
        self._reference: Reference | None = None
        self._found: dict[str, Deviation | None] = dict.fromkeys(_KINDS)
        self._unknown: str | None = None
        self._steps, self._step, self._terms = 0, -1, 0
        self._largest_loss = self._largest_gradient = 0.0
        self._errors: dict[str, float] = {}  # of each gradient, the most that was allowed so far
        self._held: dict[str, tuple[torch.Tensor, float]] = {}
        self._noise: dict[str, float] = {}
        self._comparable = True
        self._short = _short(plan)
        self._rows_identical: bool | None = None
        self._rows_reason: str | None = None
        self._weights_identical: bool | None = None
        self._attempt(self._build)

    def begin(self, name: str, parameter: torch.Tensor | None) -> None:
        """Compare an initial weight, and take it over."""
        self._attempt(self._begin, name, parameter)

    def take(
        self, step: int, pieces: list[tuple[Any, int]], unpack: Callable[[Any], Inputs], loss: float
    ) -> None:
        """A step's rows and the run's loss.

        Args:
            pieces: (packed inputs, rows) of each rank that had any, in order of the ranks.
        """
        self._step = step
        self._attempt(self._take, pieces, unpack, loss)

    def gradient(self, name: str, gradient: torch.Tensor | None, scale: float) -> None:
        """The run's gradient of a parameter before the update, multiplied by `scale`."""
        self._attempt(self._gradient, name, gradient, scale)

    def update(self) -> None:
        """The run has updated its weights; so does the reference."""
        self._attempt(self._update)

    def weight(self, name: str, parameter: torch.Tensor | None) -> None:
        """The run's weight after the update."""
        self._attempt(self._weight, name, parameter)

    def certificate(self, switched_off: list[str]) -> dict[str, Any]:
        """``parity`` of ``run.json``."""
        judged, reason = verdict(self._found, self._unknown)
        return {
            "verdict": judged,
            "reason": reason,
            "steps": self._steps,
            **{kind: found and asdict(found) for kind, found in self._found.items()},
            "terms": self._terms,
            "rows_identical": self._rows_identical,
            "rows_reason": self._rows_reason,
            "initial_weights_identical": self._weights_identical,
            "switched_off": switched_off,
            "without_compile": self._plan.config.prepare.compile,
        }

    def _attempt(self, part: Callable[..., None], *arguments: Any) -> None:
        if self._unknown is not None:
            return
        try:
            part(*arguments)
        except Exception as error:  # noqa: BLE001  # of the user's code, or no memory left
            text = first_line(error)
            self._stop(f"the single device failed: {type(error).__name__}: {text}")

    def _stop(self, why: str) -> None:
        """Compare nothing more, and free what was for it."""
        self._unknown, self._reference = why, None
        self._held.clear()
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _build(self) -> None:
        synced = self._plan.config.prepare.sync_batchnorm
        self._reference = Reference(self._plan, self._device, batch_norm=not synced)
        self._short += _short_parameters(self._reference)

    def _own(self) -> Reference:
        assert self._reference is not None
        return self._reference

    def _begin(self, name: str, parameter: torch.Tensor) -> None:
        own = self._own().parameters[name]
        alike = bool(torch.equal(own, parameter))
        self._weights_identical = alike and self._weights_identical is not False
        _overwrite(own, parameter)

    def _take(
        self, pieces: list[tuple[Any, int]], unpack: Callable[[Any], Inputs], loss: float
    ) -> None:
        config, reference = self._plan.config, self._own()
        inputs = uncut([(unpack(piece), rows) for piece, rows in pieces], config.forward_kwargs)
        rows = sum(count for _, count in pieces)
        self._terms = max(self._terms, numbers_in(inputs, rows))
        self._compare_rows(inputs)
        self._comparable = True
        made = reference.step(inputs, rows)
        self._judge_loss(loss, made, inputs)
        gradients = [p.grad for p in reference.parameters.values() if p.grad is not None]
        largest = max((largest_in(gradient) for gradient in gradients), default=0.0)
        self._largest_gradient = largest / reference.training.loss_scale
        start = config.parallel.powersgd_start
        if config.parallel.comm_hook is CommHook.powersgd and start and self._step >= start:
            self._stop(f"powersgd sends approximate gradients from step {start} on")

    def _compare_rows(self, inputs: Inputs) -> None:
        if self._rows_identical is False or not self._own().reads_by_index:
            return
        try:
            self._rows_identical = self._own().gets(inputs)
        except Exception as error:  # noqa: BLE001  # the comparison of the steps can go on
            self._rows_identical, self._rows_reason = None, f"{type(error).__name__}: {error}"
            return
        if not self._rows_identical:
            self._rows_reason = (
                f"in step {self._step} the ranks got other rows than a single device: the dataset "
                "draws random numbers (augmentation) or looks at its rank"
            )

    def _judge_loss(self, loss: float, made: ReferenceStep, inputs: Inputs) -> None:
        if not math.isfinite(made.loss) and not math.isfinite(loss):
            self._stop(f"the loss of step {self._step} is not finite")
            return
        self._largest_loss = max(self._largest_loss, abs(made.loss))
        limit = relative_tolerance(self._terms, self._short or None) * self._largest_loss
        self._noise = made.noise or {}
        if made.other_loss is not None and not abs(made.other_loss - made.loss) <= limit:
            if self._own().draws(inputs):
                self._stop("the model draws random numbers in forward")
                return
            self._noise = {}  # the model looks at the order of its rows: that is no rounding
        self._note("loss", np.array([loss]), np.array([made.loss]), limit, "loss")

    def _gradient(self, name: str, gradient: torch.Tensor | None, scale: float) -> None:
        reference = self._own()
        held = reference.parameters[name].grad
        if held is None and gradient is None:
            return
        filled = reference.parameters[name] if held is None or gradient is None else held
        zeros = np.zeros(tuple(filled.shape))
        own_scale = reference.training.loss_scale
        own = zeros if held is None else _unscaled(array(held), own_scale)
        got = zeros if gradient is None else _unscaled(array(gradient), scale)
        largest = largest_of(own)
        if not math.isfinite(largest) or not math.isfinite(largest_of(got)):
            self._not_finite(name, math.isfinite(largest), math.isfinite(largest_of(got)))
            return
        hook = self._plan.config.parallel.comm_hook
        sent = UNIT_ROUNDOFF.get(hook.value, 0.0) if hook is not None else 0.0
        spacing = FP16_SPACING * self._plan.num_processes if hook is CommHook.fp16 else 0.0
        allowed = gradient_tolerance(
            relative_tolerance(self._terms, self._short + sent or None),
            largest,
            self._largest_gradient,
            self._noise.get(name, 0.0),
            spacing,
        )
        self._errors[name] = max(self._errors.get(name, 0.0), allowed)
        if held is not None:
            self._held[name] = held, largest
        self._note("gradients", got, own, allowed, name)

    def _not_finite(self, name: str, own: bool, got: bool) -> None:
        """A gradient overflowed. With a scaler that is usual, and the update is left out."""
        self._comparable = False
        scaled = self._plan.config.precision is Precision.fp16
        if own == got and scaled:
            return
        if own == got or scaled:
            where = "" if own == got else " on one side only"
            self._stop(f"the gradient of {name} in step {self._step} is not finite{where}")
            return
        infinite = Deviation(math.inf, math.inf, math.inf, 0.0, math.inf, self._step, name)
        self._found["gradients"] = worse(self._found["gradients"], infinite)
        self._stop(f"the gradient of {name} in step {self._step} is not finite")

    def _update(self) -> None:
        reference = self._own()
        groups = reference.training.optimizer.param_groups
        self._rate = max(float(group.get("lr", 1.0)) for group in groups)
        self._normalises = not isinstance(reference.training.optimizer, torch.optim.SGD)
        reference.update()
        self._steps += 1

    def _weight(self, name: str, parameter: torch.Tensor) -> None:
        own = self._own().parameters[name]
        if self._comparable:
            allowed = self._update_allowance(name, own)
            self._note("weights", array(parameter), array(own), allowed, name)
        _overwrite(own, parameter)

    def _update_allowance(self, name: str, own: torch.Tensor) -> Allowed:
        held, before = self._held.pop(name, (None, 0.0))
        gradient = None if held is None else array(held).reshape(-1)
        # The gradient as the optimizer got it: maybe clipped.
        after = 0.0 if gradient is None else largest_of(gradient)
        error = self._errors.get(name, 0.0) * (after / before if before else 1.0)
        largest, rounded = largest_in(own), roundoff(own)

        def allowed(part: slice) -> Array | float:
            return weight_tolerance(
                largest,
                None if gradient is None else gradient[part],
                error,
                self._rate,
                self._steps - 1,
                normalises=self._normalises,
                roundoff=rounded,
            )

        return allowed

    def _note(self, kind: str, got: Array, own: Array, allowed: Allowed | float, name: str) -> None:
        if not math.isfinite(largest_of(own)) and not math.isfinite(largest_of(got)):
            self._stop(f"the {kind} of step {self._step} are not finite ({name})")
            return
        found = deviation(got, own, allowed, self._step, name)
        self._found[kind] = worse(self._found[kind], found)


def _unscaled(values: Array, scale: float) -> Array:
    return values if scale == 1.0 else values / scale


def _short(plan: RunPlan) -> float:
    """The unit roundoff of arithmetic that is coarser than single precision; else 0."""
    precision = plan.config.precision
    return 0.0 if precision is Precision.fp32 else UNIT_ROUNDOFF[precision.value]


def _short_parameters(reference: Reference) -> float:
    coarsest = max(map(roundoff, reference.parameters.values()), default=SINGLE)
    return coarsest if coarsest > SINGLE else 0.0


def _overwrite(own: torch.Tensor, parameter: torch.Tensor) -> None:
    with torch.no_grad():
        own.copy_(parameter)
