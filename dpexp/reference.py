"""The single device that a run is compared with, inside rank 0 of that run."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, final

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from dpexp.arrays import largest_in
from dpexp.assembly import Assembly, put_together
from dpexp.batches import Inputs, cut, map_tensors, seed_all
from dpexp.comm import Comm, LocalComm
from dpexp.loop import Progress, Work, forward_backward
from dpexp.plan import RunPlan
from dpexp.recorder import Recorder
from dpexp.schema import ParallelConfig, StrategyName
from dpexp.schema_workload import Preload
from dpexp.shapes import ShapeLog
from dpexp.timing import Clock, make_clock
from dpexp.training import Training
from dpexp.uncut import same, uncut


def undisturbed(plan: RunPlan) -> RunPlan:
    """The plan of a run that is replayed: nothing is compiled, injected or written."""
    config = plan.config
    inject = replace(
        config.inject,
        collective_delay_s=0.0,
        slow_rank=None,
        data_delay_s=0.0,
        noisy_rank=None,
        die_rank=None,
        hang_rank=None,
    )
    return replace(
        plan,
        config=replace(
            config,
            prepare=replace(config.prepare, compile=False),
            shapes=replace(config.shapes, depth=0, print=False),
            save_weights=False,
            inject=inject,
        ),
    )


def alone(plan: RunPlan) -> RunPlan:
    """The plan of one device that does what all devices of `plan` do together."""
    config = plan.config
    unset: dict[str, Any] = {field.name: None for field in fields(ParallelConfig)}
    timeout_s = config.parallel.timeout_s
    parallel = ParallelConfig(
        **{**unset, "strategy": StrategyName.none, "timeout_s": timeout_s},
    )
    loader = replace(config.loader, workers=0, preload=Preload.none, pin_memory=False)
    return replace(
        plan,
        config=replace(config, parallel=parallel, num_devices=1, accumulate=1, loader=loader),
        strategy=StrategyName.none,
        num_devices=1,
        num_processes=1,
        batch_rows_per_device=plan.batch_rows,
        emulated=False,
        backend=None,
    )


def switch_off(model: nn.Module, *, batch_norm: bool = True) -> list[str]:
    """Let no layer draw random numbers, nor look at the other rows of its device.

    Args:
        batch_norm: put BatchNorm into eval mode; else only dropout is switched off.

    Returns:
        What was switched off: ``["BatchNorm2d x20"]``.
    """
    found: Counter[str] = Counter()
    for module in model.modules():
        name = type(module).__name__.removeprefix("FSDP")
        if isinstance(module, _DropoutNd):
            if module.p and module.training:
                found[name] += 1
            module.eval()
            module.p = 0.0  # some models hand it to attention as a number
        elif isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
            if module.dropout and module.training:
                found[f"dropout of {name}"] += 1
            module.dropout = 0.0
        elif batch_norm and isinstance(module, _BatchNorm) and module.training:
            found[name] += 1
            module.eval()
    return [f"{name} x{count}" for name, count in sorted(found.items())]


def work_of(
    built: Assembly,
    plan: RunPlan,
    comm: Comm,
    clock: Clock[Any],
    shapes: ShapeLog,
    progress: Progress,
) -> Work:
    """What :func:`forward_backward` needs; nothing is recorded."""
    return Work(
        strategy=built.strategy,
        transfer=built.transfer,
        clock=clock,
        recorder=Recorder(plan, comm, clock, []),
        shapes=shapes,
        progress=progress,
        split=built.split,
        autocast=built.autocast,
        training=built.training,
    )


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """Random numbers drawn inside the block are not missing outside of it."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


@dataclass(frozen=True)
class ReferenceStep:
    """A batch on the single device. The gradients stay at the parameters."""

    loss: float
    # With other random numbers, and the two halves of the rows in each other's place: the loss,
    # and by how much the largest entry of each parameter's gradient changes. None where the model
    # cannot be copied for that.
    other_loss: float | None
    noise: dict[str, float] | None


@final
class Reference:
    """A single device's model and optimizer, built with the seed of the run.

    Args:
        plan: of the run; see :func:`undisturbed` and :func:`alone`.
        batch_norm: as of :func:`switch_off`.
    """

    def __init__(self, plan: RunPlan, device: torch.device, *, batch_norm: bool) -> None:
        self._plan, self._device = alone(undisturbed(plan)), device
        comm, clock, shapes = LocalComm(), make_clock(device), ShapeLog()
        with aside(device):
            self._built = put_together(self._plan, comm, device, clock, shapes)
        switch_off(self._built.model, batch_norm=batch_norm)
        self._work = work_of(self._built, self._plan, comm, clock, shapes, Progress())
        assert self._built.training is not None  # parity is for task=train
        self.training: Training = self._built.training
        self.parameters = dict(self._built.model.named_parameters())
        self._constants = plan.config.forward_kwargs
        self._seed = plan.config.seed

    @property
    def reads_by_index(self) -> bool:
        """Whether :meth:`gets` can tell anything: ranks that read a stream compare it always."""
        return not self._built.feed.streamed

    def gets(self, inputs: Inputs) -> bool:
        """Whether a single device, fetching the next batch itself, gets these rows."""
        with aside(self._device):
            _, fetched = next(self._built.feed.batches)
        own = self._built.split(fetched)
        return same(tuple(own), tuple(inputs))

    def step(self, inputs: Inputs, rows: int) -> ReferenceStep:
        """Forward and backward of a batch; :meth:`update` comes next."""
        with aside(self._device):
            other = self._copy()
            seed_all(self._seed)
            _, loss = forward_backward(self._placed(inputs), rows, self._work, [])
            assert loss is not None
            if other is None:
                return ReferenceStep(float(loss), None, None)
            seed_all(self._seed + 1)
            other_loss = self._loss(other, self._swapped(inputs, rows))
            (other_loss * self.training.loss_scale).backward()  # type: ignore[no-untyped-call]
            return ReferenceStep(float(loss), float(other_loss.detach()), self._changes(other))

    def update(self) -> None:
        """The optimizer's step."""
        with aside(self._device):
            self.training.update(self._built.strategy)

    def draws(self, inputs: Inputs) -> bool:
        """Whether the loss of a batch depends on the random numbers drawn in forward."""
        losses: list[float] = []
        with aside(self._device), torch.no_grad():
            for model in (self._copy(), self._copy()):
                if model is None:
                    return False  # cannot be told
                seed_all(self._seed + len(losses))
                losses.append(float(self._loss(model, inputs)))
        return losses[0] != losses[1]

    def _copy(self) -> nn.Module | None:
        """The model as it is now, so that calling the copy changes nothing in it."""
        try:
            return copy.deepcopy(self._built.model)
        except Exception:  # noqa: BLE001  # whatever a user's module holds; or no memory for it
            return None

    def _loss(self, model: nn.Module, inputs: Inputs) -> torch.Tensor:
        placed = self._placed(inputs)
        with self._built.autocast:
            return self.training.loss_of(model(*placed.args, **placed.kwargs), placed.target)

    def _placed(self, inputs: Inputs) -> Inputs:
        # A copy, since forward may write into its inputs.
        def placed(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(self._device, copy=True)

        return Inputs(*(map_tensors(placed, part) for part in inputs))

    def _swapped(self, inputs: Inputs, rows: int) -> Inputs:
        if rows == 1:
            return inputs
        sizes = [rows // 2, rows - rows // 2]
        first, second = cut(inputs, rows, sizes, constants=self._constants)
        return uncut([(second, sizes[1]), (first, sizes[0])], self._constants)

    def _changes(self, other: nn.Module) -> dict[str, float]:
        changes = {}
        for name, parameter in other.named_parameters():
            own = self.parameters[name].grad
            if own is not None and parameter.grad is not None and own.numel():
                changes[name] = largest_in(parameter.grad - own) / self.training.loss_scale
        return changes
