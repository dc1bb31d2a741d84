"""The parity certificate: are a run's steps those of a single device?

Before anything is timed, the first steps of a training run are made once for the check. Beside
them rank 0 makes the same steps on one device, from the rows that the ranks computed on, and
compares loss, gradients and weights (judge.py) within what another order of summation and shorter
number formats explain (tolerance.py). Everything is built for the check alone and thrown away.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dpexp.assembly import Assembly, put_together
from dpexp.batches import Inputs, map_tensors
from dpexp.checkpoint import Checkpoint
from dpexp.comm import Comm
from dpexp.judge import Judge
from dpexp.loop import Progress, Work, forward_backward
from dpexp.plan import RunPlan
from dpexp.reference import switch_off, undisturbed, work_of
from dpexp.schedule import GlobalBatch
from dpexp.shapes import ShapeLog
from dpexp.timing import make_clock
from dpexp.wire import pack, unpack_all


def carried_parity(
    found: Checkpoint, plan: RunPlan
) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """The certificate of the run's first start, and why there is none."""
    certificate = found.state["parity"]
    if certificate is None:
        why = "there is none of its first start" if plan.parity_steps else ""
    elif found.state["label"] != plan.label:
        certificate, why = None, f"that of its first start is of {found.state['label']}"
    else:
        why = ""
    return certificate, (f"parity: a run that goes on is not checked: {why}",) if why else ()


def check_parity(
    plan: RunPlan, comm: Comm, device: torch.device, progress: Progress
) -> dict[str, Any] | None:
    """Replay the first ``plan.parity_steps`` steps. All ranks call it.

    Returns:
        On rank 0 the certificate, None on the others: ``verdict`` (pass, fail or unknown) with a
        ``reason``, the number of ``steps``, and of ``loss``, ``gradients`` and ``weights`` the
        largest differences (see :class:`dpexp.tolerance.Deviation`).

    Raises:
        Exception: what the run itself meets in these steps.
    """
    with _announced(progress):
        certificate = _replayed(plan, comm, device, progress)
    # The next DDP object comes only when this one is gone.
    gc.collect()
    return certificate


@contextmanager
def _announced(progress: Progress) -> Iterator[None]:
    """A failure inside says that it was in the check; it leaves no trace of steps behind."""
    progress.during = "the parity check"
    yield
    progress.step, progress.phase, progress.during = -1, "set-up", ""


def _replayed(
    plan: RunPlan, comm: Comm, device: torch.device, progress: Progress
) -> dict[str, Any] | None:
    quiet = undisturbed(plan)
    clock, shapes = make_clock(device), ShapeLog(first_replica=comm.rank)
    cell = put_together(quiet, comm, device, clock, shapes)
    switched_off = switch_off(cell.model, batch_norm=not quiet.config.prepare.sync_batchnorm)
    judge = Judge(plan, device) if comm.rank == 0 else None
    work = work_of(cell, quiet, comm, clock, shapes, progress)
    parameters = list(cell.model.named_parameters())
    with torch.enable_grad():
        for name, parameter in parameters:
            initial = whole(parameter)
            if judge is not None:
                judge.begin(name, initial)
        batches = cell.transfer.ahead(cell.feed.batches)
        for _ in range(plan.parity_steps):
            progress.phase = "data"
            item = next(batches, None)
            if item is None:
                break
            _step(item, cell, work, parameters, judge)
            del item
    cell.strategy.close()
    return None if judge is None else judge.certificate(switched_off)


def _step(
    item: tuple[GlobalBatch, Any],
    cell: Assembly,
    work: Work,
    parameters: list[tuple[str, nn.Parameter]],
    judge: Judge | None,
) -> None:
    """One step of the run as the loop makes it, with looks at what it made."""
    batch, fetched = item
    strategy, progress, training = work.strategy, work.progress, work.training
    assert training is not None
    comm, rows = strategy.comm, len(batch.indices)
    progress.step = work.shapes.step = batch.step
    inputs = cell.split(fetched)
    progress.phase = "transfer"
    inputs = work.transfer.place(inputs)

    progress.phase = "parity"
    own = strategy.own_rows(rows)
    brought = comm.gather((_packed(inputs) if own else None, own))
    _, loss = forward_backward(inputs, rows, work, [])
    progress.phase = "parity"
    strategy.check_gradients([p for _, p in parameters if p.requires_grad])
    strategy.agree()
    assert loss is not None
    divisor = strategy.loss_divisor
    summed = comm.sum(loss.detach().reshape(1).cpu().double()).item() / divisor
    if judge is not None and brought is not None:
        pieces = [piece for piece in brought if piece[1]]
        judge.take(batch.step, pieces, _unpacking(brought[0][0]), summed)
    for name, parameter in parameters:
        gradient = None if parameter.grad is None else whole(parameter.grad)
        if judge is not None:
            judge.gradient(name, gradient, training.loss_scale)

    progress.phase = "optimizer"
    training.update(strategy)
    progress.phase = "parity"
    if judge is not None:
        judge.update()
    for name, parameter in parameters:
        updated = whole(parameter)
        if judge is not None:
            judge.weight(name, updated)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that may be spread over the ranks. All ranks call it, in one order."""
    gather = getattr(tensor, "full_tensor", None)  # of a DTensor, whose import takes a second
    value: torch.Tensor = tensor.detach() if gather is None else gather().detach()
    return value


def _packed(inputs: Inputs) -> bytes | str:
    """A batch as it is before forward, which may write into it; or why it cannot be sent."""

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to("cpu", copy=True)

    try:
        return pack(tuple(map_tensors(copied, part) for part in inputs))
    except Exception as error:  # noqa: BLE001  # whatever the user's dataset puts into a batch
        return f"{type(error).__name__}: {error}"


def _unpacking(own: bytes | str | None) -> Callable[[bytes | str], Inputs]:
    """What makes inputs of what the ranks have sent; `own` is what rank 0 has packed itself."""
    trusted = own if isinstance(own, bytes) else pack(None)

    def unpacked(packed: bytes | str) -> Inputs:
        if isinstance(packed, str):
            raise TypeError(f"a batch cannot be sent to rank 0: {packed}")
        (parts,) = unpack_all([packed], trusted)
        return Inputs(*parts)

    return unpacked
