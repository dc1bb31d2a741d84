"""Bringing batches to the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from dpexp.batches import Inputs
from dpexp.schedule import GlobalBatch
from dpexp.transfer import CopyingAhead, make_transfer

CPU, META = torch.device("cpu"), torch.device("meta")


def batch(step: int, rows: int = 2) -> GlobalBatch:
    return GlobalBatch(step, 0, np.arange(rows))


def test_on_a_cpu_nothing_is_copied() -> None:
    way = make_transfer(CPU, channels_last=False, pin=False)
    inputs = Inputs((torch.zeros(2),), {}, None)
    batches = iter([(batch(0), inputs)])
    assert way.ahead(batches) is batches
    assert way.place(inputs) is inputs


def test_elsewhere_every_tensor_is_put_on_the_device_and_nothing_else() -> None:
    inputs = Inputs((torch.zeros(2),), {"k": torch.zeros(1), "n": 3}, [torch.zeros(2), "a"])
    placed = make_transfer(META, channels_last=False, pin=False).place(inputs)
    assert (placed.args[0].device, placed.kwargs["k"].device) == (META, META)
    assert placed.target[0].device == META
    assert (placed.kwargs["n"], placed.target[1]) == (3, "a")


@pytest.mark.parametrize("device", [CPU, META], ids=str)
@pytest.mark.parametrize("wanted", [True, False])
def test_only_images_get_the_channels_last_and_only_if_asked(
    device: torch.device, wanted: bool
) -> None:
    images, table = torch.zeros(2, 3, 4, 4), torch.zeros(2, 3)
    inputs = Inputs((images, table), {"x": {"y": images}}, images)
    placed = make_transfer(device, channels_last=wanted, pin=False).place(inputs)
    for found in (placed.args[0], placed.kwargs["x"]["y"], placed.target):
        assert found.is_contiguous(memory_format=torch.channels_last) is wanted
        assert found.shape == (2, 3, 4, 4)
    assert placed.args[1].is_contiguous()


class Event:
    """Stands in for an event of CUDA."""

    def record(self, stream: Any) -> None:
        self.stream = stream


class Stream:
    """Stands in for a stream of CUDA."""

    def __init__(self, _device: Any = None) -> None:
        self.waited: list[Event] = []

    def wait_event(self, event: Event) -> None:
        self.waited.append(event)


@pytest.fixture
def compute(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """The stream on which the steps run; copies go from a CPU to a CPU here."""
    current = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    return current


def test_the_next_batch_is_on_its_way_before_the_current_one_is_worked_on(
    compute: Stream,
) -> None:
    fetched: list[int] = []

    def source() -> Iterator[tuple[GlobalBatch, Any]]:
        for step in range(3):
            fetched.append(step)
            yield batch(step), torch.full((2,), float(step))

    way, seen = CopyingAhead(CPU, False, False), []
    for (step, _, _), rows in way.ahead(source()):
        way.place(Inputs((rows,), {}, None))
        seen.append((step, rows.tolist(), list(fetched)))
    assert seen == [
        (0, [0.0, 0.0], [0, 1]),
        (1, [1.0, 1.0], [0, 1, 2]),
        (2, [2.0, 2.0], [0, 1, 2]),
    ]


def test_each_batch_waits_for_its_own_copy_only(compute: Stream) -> None:
    way = CopyingAhead(CPU, False, False)
    for count, (_, rows) in enumerate(
        way.ahead(iter((batch(s), torch.zeros(2)) for s in range(3)))
    ):
        way.place(Inputs((rows,), {}, None))
        assert len(compute.waited) == count + 1
    assert len(set(map(id, compute.waited))) == 3


@pytest.mark.usefixtures("compute")
def test_without_batches_there_is_nothing_to_copy() -> None:
    assert list(CopyingAhead(CPU, False, False).ahead(iter([]))) == []
