"""The model without its numbers: built on the meta device, called as if it were on a real one.

A model on meta has sizes but no memory. Called there, code that makes tensors in ``forward`` would
mix devices, autocast would do nothing, and attention would not take the kernel of the real device.
So for a call its tensors are replaced by torch's fake ones: meta tensors that claim a device.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dpexp.anatomy.data import ModelFacts
from dpexp.batches import map_tensors
from dpexp.build import UserCodeError, build_model
from dpexp.texts import first_line

_TABLES = ("_parameters", "_buffers", "_modules")  # torch's own names in a module's __dict__
META, CPU = torch.device("meta"), torch.device("cpu")


@dataclass(frozen=True)
class Specimen:
    """A built model; `built_on` is meta or cpu, `reason` why not meta."""

    model: nn.Module
    built_on: str
    reason: str = ""


def build_specimen(node: dict[str, Any]) -> Specimen:
    """The model on the meta device, or on the CPU where its constructor needs numbers.

    Raises:
        ConfigError: as in a run.
        UserCodeError: the constructor fails on the CPU too.
    """
    try:
        with META:
            return Specimen(build_model(node, META), "meta")
    except UserCodeError as error:
        cause = error.__cause__ or error
        reason = f"{type(cause).__name__}: {short_line(cause)}"
    return Specimen(build_model(node, CPU), "cpu", reason)


def facts_of(specimen: Specimen) -> ModelFacts:
    """Numbers and bytes of the model; what modules share counts once."""
    model = specimen.model
    parameters, buffers = list(model.parameters()), list(model.buffers())
    by_dtype: dict[str, int] = {}
    for tensor in (*parameters, *buffers):
        name = str(tensor.dtype).removeprefix("torch.")
        by_dtype[name] = by_dtype.get(name, 0) + tensor.nbytes
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return ModelFacts(
        name=type(model).__name__,
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in trained),
        buffers=sum(b.numel() for b in buffers),
        parameter_bytes=sum(p.nbytes for p in parameters),
        gradient_bytes=sum(p.nbytes for p in trained),
        buffer_bytes=sum(b.nbytes for b in buffers),
        bytes_by_dtype=by_dtype,
        built_on=specimen.built_on,
    )


class Fakes:
    """Makes fake tensors that claim to be on `device`; one for each tensor, however often."""

    def __init__(self, device: torch.device) -> None:
        self.mode = FakeTensorMode()
        self._device = device
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, value: Any) -> Any:
        """`value` with every tensor in it replaced."""
        return map_tensors(self._fake, value)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._made:
            with self.mode:
                fake = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device
                )
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            self._made[id(tensor)] = (tensor, fake)  # the original is kept: its id stays its own
        return self._made[id(tensor)][1]


@contextmanager
def replaced(model: nn.Module, fakes: Fakes) -> Iterator[None]:
    """Inside the block the model holds fake tensors, its plain attributes included."""
    originals: list[tuple[dict[str, Any], str, Any]] = []
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
        for table in tables:
            for name, value in table.items():
                if name not in _TABLES and _holds_tensors(value):
                    originals.append((table, name, value))
                    table[name] = fakes.of(value)
    try:
        yield
    finally:
        for table, name, value in originals:
            table[name] = value


@contextmanager
def quiet() -> Iterator[None]:
    """torch logs a call of a fake tensor that fails, with a traceback; it is told in a figure."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def short_line(error: BaseException) -> str:
    """The first line of an error's message, not too long."""
    text = first_line(error)
    return text if len(text) <= 160 else text[:157] + "..."


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return any(_holds_tensors(entry) for entry in value)
    return isinstance(value, torch.Tensor)
