"""Bringing batches to the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import Any, final

import torch

from dpexp.batches import Inputs, map_tensors, move
from dpexp.loading import Batches


def make_transfer(device: torch.device, *, channels_last: bool, pin: bool) -> Transfer:
    """The way of batches to `device`.

    Args:
        channels_last: images [rows, channels, height, width] get the channels last in memory.
        pin: batches pass through page-locked memory, so that a copy need not wait for the host.
    """
    if device.type == "cuda":
        return CopyingAhead(device, channels_last, pin)
    return Copying(device, channels_last)


class Transfer(ABC):
    """The life of a batch: :meth:`ahead` when it is fetched, :meth:`place` when it is needed."""

    def __init__(self, device: torch.device, channels_last: bool) -> None:
        self._device = device
        self._channels_last = channels_last
        self._nothing_to_do = device.type == "cpu" and not channels_last

    @abstractmethod
    def ahead(self, batches: Batches) -> Batches:
        """The same batches, maybe on their way to the device already."""

    @abstractmethod
    def place(self, inputs: Inputs) -> Inputs:
        """The batch on the device. Times the `transfer` phase."""

    def _formatted(self, inputs: Inputs) -> Inputs:
        if not self._channels_last:
            return inputs
        return Inputs(*(map_tensors(_channels_last, part) for part in inputs))


@final
class Copying(Transfer):
    """A copy when the batch is needed; on a CPU there is nothing to copy."""

    def ahead(self, batches: Batches) -> Batches:
        return batches

    def place(self, inputs: Inputs) -> Inputs:
        if self._nothing_to_do:
            return inputs
        if self._device.type != "cpu":
            inputs = Inputs(*(move(part, self._device) for part in inputs))
        return self._formatted(inputs)


@final
class CopyingAhead(Transfer):
    """The next batch is copied while the current one is worked on. Not run on a GPU yet.

    The copies have a stream of their own. `place` makes the current stream wait for the copy of
    its batch: a synchronisation of the two streams, not of the host.
    """

    def __init__(self, device: torch.device, channels_last: bool, pin: bool) -> None:
        super().__init__(device, channels_last)
        self._pin = pin
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._arrivals: deque[torch.cuda.Event] = deque()

    def ahead(self, batches: Batches) -> Batches:
        waiting: tuple[Any, Any] | None = None
        for batch, fetched in batches:
            sent = batch, self._send(fetched)
            if waiting is not None:
                yield waiting
            waiting = sent
        if waiting is not None:
            yield waiting

    def place(self, inputs: Inputs) -> Inputs:
        current = torch.cuda.current_stream(self._device)
        current.wait_event(self._arrivals.popleft())

        def used_here(tensor: torch.Tensor) -> torch.Tensor:
            # Else the allocator could hand the memory to the copy of a later batch too early.
            tensor.record_stream(current)
            return tensor

        return self._formatted(Inputs(*(map_tensors(used_here, part) for part in inputs)))

    def _send(self, fetched: Any) -> Any:
        if self._pin:
            fetched = map_tensors(_pinned, fetched)
        with torch.cuda.stream(self._stream):
            sent = move(fetched, self._device)
            arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrival.record(self._stream)
        self._arrivals.append(arrival)
        return sent


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
