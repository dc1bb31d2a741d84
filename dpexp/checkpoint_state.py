"""What a run carries from one step to the next: taken off it between two steps, and put back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from dpexp.batches import seed_all
from dpexp.carried import Tensors, UnsavableError, join, names_in, split
from dpexp.checkpoint import Checkpoint
from dpexp.checkpoint_storage import listed, read
from dpexp.comm import Comm
from dpexp.errors import ConfigError
from dpexp.generators import generators, set_generators
from dpexp.plan import RunPlan
from dpexp.training import Training

_MODEL, _STATE, _RANDOM = "model.", "optimizer.state.", "random."


@dataclass(frozen=True)
class Taken:
    """A rank's part of a state, on the host, with nothing of it shared with the run."""

    tensors: Tensors
    plain: dict[str, Any]  # JSON types; rank 0's is that of the run


def take(plan: RunPlan, comm: Comm, device: torch.device, training: Training) -> Taken:
    """Copy the state off the model. All ranks call it between the same two steps.

    Of what every rank has alike rank 0 gives its own: under ddp that are the model, with rank 0's
    buffers, and the optimizer.

    Raises:
        ConfigError: the optimizer or the schedule keeps something that is no tensor or number.
    """
    tensors: Tensors = {}
    try:
        model = {_MODEL + k: v for k, v in get_model_state_dict(training.model).items()}
        plain = {
            "model": split(
                {k: v for k, v in model.items() if not isinstance(v, torch.Tensor)},
                "extra",
                tensors,
            ),
            "optimizer": _optimizer(training, tensors),
            "training": split(training.state(), "training", tensors),
        }
    except UnsavableError as error:
        raise ConfigError(
            "checkpoint", error.place, f"a checkpoint cannot hold it: {error}", fix="no checkpoints"
        ) from error
    tensors.update({k: v for k, v in model.items() if isinstance(v, torch.Tensor)})
    own = tensors
    if comm.rank:
        sharded = _owned(training.optimizer) is not None
        own = {
            name: tensor
            for name, tensor in tensors.items()
            if isinstance(tensor, DTensor) or (sharded and name.startswith(_STATE))
        }
    own.update({f"{_RANDOM}{comm.rank}.{k}": v for k, v in generators(plan, device).items()})
    return Taken(_staged(own), plain)


def put_back(
    checkpoint: Checkpoint,
    plan: RunPlan,
    comm: Comm,
    device: torch.device,
    training: Training,
    group: dist.ProcessGroup | None,
) -> bool:
    """Load a checkpoint into what was built. All ranks call it, before the first step.

    Returns:
        Whether the random numbers go on too: the run has as many ranks and devices of the same kind
        as the one that saved it. If not they are drawn anew, from the seed and the step.

    Raises:
        ConfigError: the checkpoint is of another model, damaged, or no checkpoint.
    """
    state = checkpoint.state
    try:
        there = listed(checkpoint.path)
        model: dict[str, Any] = get_model_state_dict(training.model)
        wanted: Tensors = {
            _MODEL + k: v for k, v in model.items() if isinstance(v, torch.Tensor)
        }  # their own memory: read puts the numbers there
        plain = {key: state[key] for key in ("model", "optimizer", "training")}
        nested = names_in(plain)
        optimizer = _templates(training, there, nested)
        wanted |= {name: tensor for _, name, _, tensor in optimizer}
        wanted |= {name: _like(there[name]) for name in nested}
        same = _same_ranks(state, plan, comm)
        random_names = [name for name in there if name.startswith(f"{_RANDOM}{comm.rank}.")]
        wanted |= {name: _like(there[name]) for name in random_names if same}
        read(wanted, checkpoint.path, group)
        extra = {k.removeprefix(_MODEL): v for k, v in join(plain["model"], wanted).items()}
        set_model_state_dict(training.model, {**model, **extra})
        _put_optimizer(training, optimizer, join(plain["optimizer"], wanted))
        training.load(join(plain["training"], wanted))
    except Exception as error:
        raise ConfigError(
            "resume",
            str(checkpoint.path),
            f"this checkpoint cannot be loaded: {_reason(error)}",
            fix="remove it, then the one before is taken",
        ) from error
    if same:
        mine = {name.removeprefix(f"{_RANDOM}{comm.rank}."): wanted[name] for name in random_names}
        set_generators(mine, plan, device)
    else:
        drawn = np.random.SeedSequence([plan.config.seed, comm.rank, checkpoint.step])
        seed_all(int(drawn.generate_state(1, np.uint64)[0] >> 1))
    return same


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    if "weights_only" in text:  # torch then says how to run what the file holds
        return "a file of it is damaged, or holds more than tensors"
    return text if text and not isinstance(error, LookupError) else f"{type(error).__name__} {text}"


def _same_ranks(state: Mapping[str, Any], plan: RunPlan, comm: Comm) -> bool:
    known = (state["ranks"], state["num_devices"], state["device_type"])
    return known == (comm.world_size, plan.num_devices, plan.device_type)


def _like(known: TensorStorageMetadata) -> torch.Tensor:
    return torch.empty(known.size, dtype=known.properties.dtype)


def _staged(tensors: Tensors) -> Tensors:
    """Copies on the host; a sharded tensor stays one."""
    stager = DefaultStager(StagingOptions(False, False, False, False))
    try:
        return stager.stage(tensors)  # type: ignore[return-value]
    finally:
        stager.close()


def _names(model: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _owned(optimizer: torch.optim.Optimizer) -> list[nn.Parameter] | None:
    """The parameters whose state this rank keeps, under ZeRO; None: of all."""
    inner = _inner(optimizer)
    if inner is optimizer:
        return None
    return [each for group in inner.param_groups for each in group["params"]]


def _inner(optimizer: torch.optim.Optimizer) -> Any:
    """Under ZeRO the optimizer of this rank's parameters. Its module takes most of a second to
    import, so it is known by its name.
    """
    zero = type(optimizer).__name__ == "ZeroRedundancyOptimizer"
    return getattr(optimizer, "optim") if zero else optimizer  # noqa: B009


def _optimizer(training: Training, tensors: Tensors) -> dict[str, Any]:
    """The optimizer's state by the names of the parameters.

    Not by torch's get_optimizer_state_dict: it lets an optimizer without a state, as sgd is, make a
    step at each call, and it cannot take a state apart that ZeRO keeps.
    """
    optimizer, names = training.optimizer, _names(training.model)
    inner = _inner(optimizer)
    zero = inner is not optimizer
    plain: dict[str, Any] = {}
    for parameter, values in inner.state.items():
        if parameter not in names:
            raise UnsavableError(f"{_STATE}{parameter}", values)
        name = names[parameter]
        for key, value in values.items():
            place = f"{_STATE}{name}.{key}"
            kept = split(value, place, tensors)
            if not isinstance(value, torch.Tensor):
                if zero:  # each rank has other parameters, and only rank 0's plain values are kept
                    raise UnsavableError(place, value)
                plain.setdefault(name, {})[key] = kept
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [names[parameter] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"values": plain, "groups": split(groups, "optimizer.groups", tensors)}


Template = tuple[int, str, str, torch.Tensor]


def _templates(
    training: Training, there: Mapping[str, TensorStorageMetadata], nested: list[str]
) -> list[Template]:
    """Where the optimizer's tensors are to be read to, of the parameters that this rank keeps.

    Args:
        nested: names of tensors inside of other values, which are left out.

    Returns:
        The parameter's index, the tensor's name in the checkpoint and in the state, the tensor.
    """
    names, owned = _names(training.model), _owned(training.optimizer)
    groups = training.optimizer.param_groups
    order = [parameter for group in groups for parameter in group["params"]]
    index_of = {names[parameter]: index for index, parameter in enumerate(order)}
    keeps = set(index_of) if owned is None else {names[parameter] for parameter in owned}
    found = []
    for key in there:
        if not key.startswith(_STATE) or key in nested:
            continue
        name = key.removeprefix(_STATE)
        while name and name not in index_of:  # the longest name of a parameter that it begins with
            name = name.rpartition(".")[0]
        if name in keeps:
            parameter = order[index_of[name]]
            tensor = _like(there[key])
            if isinstance(parameter, DTensor) and tensor.shape == parameter.shape:
                tensor = torch.zeros_like(parameter.detach(), dtype=tensor.dtype)
            own = key.removeprefix(f"{_STATE}{name}.")
            found.append((index_of[name], key, own, tensor))
    return found


def _put_optimizer(training: Training, tensors: list[Template], plain: dict[str, Any]) -> None:
    optimizer, names = training.optimizer, _names(training.model)
    owned = _owned(optimizer)
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for index, parameter in enumerate(order):
        values = plain["values"].get(names[parameter])
        if values and (owned is None or any(parameter is each for each in owned)):
            state[index] = values
    for index, _, key, tensor in tensors:
        state.setdefault(index, {})[key] = tensor
    groups = []
    start = 0
    for loaded, current in zip(plain["groups"], optimizer.param_groups, strict=True):
        count = len(current["params"])
        groups.append({**loaded, "params": list(range(start, start + count))})
        start += count
    optimizer.load_state_dict({"state": state, "param_groups": groups})
