"""From a plan to its anatomy.

Only the rows of the first and the last batch are read, and the model is built without memory (see
specimen.py). Nothing here starts a process or writes a file.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

from dpexp.anatomy.data import (
    Anatomy,
    BatchShapes,
    DeviceMemory,
    DeviceShapes,
    Figure,
    Layout,
    ModelFacts,
)
from dpexp.anatomy.memory import State, memory_of, optimizer_state
from dpexp.anatomy.parts import Cut, Ends, micro_batch, micro_sizes, read_ends
from dpexp.anatomy.specimen import Fakes, Specimen, build_specimen, facts_of, quiet, replaced
from dpexp.anatomy.trace import Caller, Counted, add_up, reason_of, tensors_in
from dpexp.anatomy.traffic import ddp_buckets, exchanges, fsdp_units, unit_facts
from dpexp.batches import Inputs, seed_all
from dpexp.build import build
from dpexp.errors import ConfigError
from dpexp.losses import Loss, make_loss
from dpexp.plan import RunPlan
from dpexp.prepare import prepare_model
from dpexp.schema import StrategyName, Task
from dpexp.schema_workload import Preload
from dpexp.shapes import call_shape, shape_of, show
from dpexp.transfer import Copying

CPU = torch.device("cpu")
# A model that had to be built on the CPU is called there too, if need be, up to this size.
SMALL_BYTES = 2**30
LEFT_OUT = (
    "memory is without tensors that live for a moment, what the allocator keeps unused, and torch "
    "itself"
)


@dataclass(frozen=True)
class _Seen:
    """What calling the model told."""

    first: list[Counted]  # of each device with rows
    last: list[Counted]
    activations: Figure
    state: State | None  # None: not training
    called_on: str  # meta or cpu


def dissect(plan: RunPlan) -> Anatomy:
    """Everything about a run that follows from its config, its data's sizes and its model.

    Raises:
        ConfigError: as in the run.
        dpexp.build.UserCodeError: a constructor raises.
    """
    config = plan.config
    with quiet(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        seed_all(config.seed)
        ends = read_ends(build("dataset", config.dataset), plan)
        seed_all(config.seed)
        specimen = _prepared(build_specimen(config.model), plan)
        seen = _call(specimen, ends, plan)
        anatomy = _anatomy(specimen, ends, plan, seen)
    own = [str(each.message) for each in told if str(each.message).startswith("model: ")]
    notes = (*plan.notes, *_notes(plan, specimen, seen), *dict.fromkeys(own))
    return replace(anatomy, notes=notes)


def _prepared(specimen: Specimen, plan: RunPlan) -> Specimen:
    """As in a run, but for what changes no size: the values of weights, and SyncBatchNorm."""
    config = plan.config
    without = replace(config.prepare, init_from=None, sync_batchnorm=False)
    bare = replace(plan, config=replace(config, prepare=without))
    model, _ = prepare_model(specimen.model, bare)
    model.train(config.task is not Task.evaluate)
    return replace(specimen, model=model)


def _call(specimen: Specimen, ends: Ends, plan: RunPlan) -> _Seen:
    """Call the model without memory; where that fails and it lies on the CPU, there."""
    loss_of = _loss(plan)
    try:
        seen = _without_memory(specimen.model, ends, plan, loss_of)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  # a scripted module takes no other tensors
        seen = _unknown(ends, plan, reason_of(error))
    small = facts_of(specimen).parameter_bytes <= SMALL_BYTES
    if seen.first[0].problem and specimen.built_on == "cpu" and small:
        caller = Caller(specimen.model, nullcontext(), CPU, plan.config.precision, loss_of)
        return _see(caller, ends, plan, None, seen.state)
    return seen


def _without_memory(model: nn.Module, ends: Ends, plan: RunPlan, loss_of: Loss | None) -> _Seen:
    config = plan.config
    # Fake tensors of other accelerators are not known well enough: a CPU's stand for them.
    device = torch.device(plan.device_type if plan.device_type == "cuda" else "cpu")
    fakes = Fakes(device)
    with replaced(model, fakes):
        state = None
        if config.task is Task.train:
            state = optimizer_state(config.optimizer, model, fakes.mode)
        caller = Caller(model, fakes.mode, device, config.precision, loss_of)
        return _see(caller, ends, plan, fakes, state)


def _unknown(ends: Ends, plan: RunPlan, reason: str) -> _Seen:
    first = [Counted(problem=reason)] * len(ends.first.parts)
    last = [] if ends.last is None else [Counted(problem=reason)] * len(ends.last.parts)
    state = State(reason=reason) if plan.config.task is Task.train else None
    return _Seen(first, last, Figure(None, reason), state, "meta")


def _see(
    caller: Caller, ends: Ends, plan: RunPlan, fakes: Fakes | None, state: State | None
) -> _Seen:
    transfer = Copying(CPU, plan.config.prepare.channels_last)
    known: dict[str, Counted] = {}

    def placed(inputs: Inputs) -> Inputs:
        return transfer.place(inputs if fakes is None else Inputs(*map(fakes.of, inputs)))

    def counted(inputs: Inputs) -> Counted:
        key = str(shape_of(tuple(inputs)))
        if key not in known:
            known[key] = caller.count(placed(inputs))
        return known[key]

    first = [counted(part) for part in ends.first.parts]
    last = [] if ends.last is None else [counted(part) for part in ends.last.parts]
    kept = Figure(None, first[0].problem)
    if not first[0].problem:
        kept = caller.kept(placed(micro_batch(ends.first, plan)))
    return _Seen(first, last, kept, state, "cpu" if fakes is None else "meta")


def _loss(plan: RunPlan) -> Loss | None:
    config = plan.config
    if config.task is not Task.train:
        return None
    custom = build("loss", config.loss) if isinstance(config.loss, dict) else None
    return make_loss(config.loss, custom)


def _anatomy(specimen: Specimen, ends: Ends, plan: RunPlan, seen: _Seen) -> Anatomy:
    model, config = specimen.model, plan.config
    facts = facts_of(specimen)
    micro_batches = len(micro_sizes(ends.first.rows, plan))
    ddp = plan.strategy is StrategyName.ddp and config.task is Task.train
    fsdp = plan.strategy is StrategyName.fsdp
    return Anatomy(
        model=facts,
        layout=_layout(plan, ends, micro_batches),
        first=_shapes(ends.first, seen.first),
        last=None if ends.last is None else _shapes(ends.last, seen.last),
        forward_flops=add_up(seen.first, both=False),
        step_flops=add_up(seen.first, both=True),
        loss_shape=seen.first[0].loss,
        memory=_memory(specimen, ends, plan, seen, facts),
        exchanges=exchanges(model, facts, plan, micro_batches),
        buckets=ddp_buckets(model, plan, seen.first[0].arrival) if ddp else None,
        units=unit_facts(fsdp_units(model, config.parallel.wrap)) if fsdp else (),
        problem=next((c.problem for c in (*seen.first, *seen.last) if c.problem), ""),
    )


def _layout(plan: RunPlan, ends: Ends, micro_batches: int) -> Layout:
    return Layout(
        label=plan.label,
        strategy=plan.strategy.value,
        task=plan.config.task.value,
        precision=plan.config.precision.value,
        device=plan.device_type,
        num_devices=plan.num_devices,
        num_processes=plan.num_processes,
        emulated=plan.emulated,
        batch_rows=plan.batch_rows,
        batch_rows_per_device=plan.batch_rows_per_device,
        micro_batches=micro_batches,
        dataset_rows=ends.dataset_rows,
        steps=ends.steps,
    )


def _shapes(batch: Cut, counted: list[Counted]) -> BatchShapes:
    devices = []
    for device, rows in enumerate(batch.sizes):
        if not rows:
            devices.append(DeviceShapes(device, 0))
            continue
        part = batch.parts[device]
        target = part.target
        if batch.whole is not None:  # the one process compares with the outputs put together
            target = batch.whole.target if device == 0 else None
        devices.append(
            DeviceShapes(
                device,
                rows,
                show(call_shape(part.args, part.kwargs)),
                "" if target is None else show(shape_of(target)),
                counted[device].output,
            )
        )
    return BatchShapes(batch.step, batch.rows, tuple(devices))


def _memory(
    specimen: Specimen, ends: Ends, plan: RunPlan, seen: _Seen, facts: ModelFacts
) -> tuple[DeviceMemory, ...]:
    first = ends.first
    own = _bytes(first.parts[0] if first.whole is None else first.whole)
    sizes = own, _bytes(first.parts[min(1, len(first.parts) - 1)])
    return memory_of(specimen.model, facts, plan, seen.state, seen.activations, sizes)


def _bytes(inputs: Inputs) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(tuple(inputs)))


def _notes(plan: RunPlan, specimen: Specimen, seen: _Seen) -> list[str]:
    config, notes = plan.config, []
    if specimen.reason:
        notes.append(
            f"the model was built on the CPU, since its constructor does not work on the meta "
            f"device ({specimen.reason})"
        )
    if seen.called_on == "cpu":
        notes.append("the model was called on the CPU, since it cannot be called without memory")
    if plan.device_type not in ("cpu", "cuda"):
        notes.append(f"activations are those of a CPU; {plan.device_type} may keep others")
    if config.prepare.compile:
        notes.append("prepare.compile: a compiled model may keep fewer activations")
    if config.loader.preload is Preload.device:
        notes.append("loader.preload=device puts the dataset on the device; it is not in memory")
    if plan.strategy is StrategyName.dp and plan.num_devices > 1 and config.task is Task.train:
        notes.append("dp: the loss is computed on device 0, over the outputs of all devices")
    if plan.emulated:
        notes.append("dp is emulated: all devices share the memory of one process")
    return [*notes, LEFT_OUT]
