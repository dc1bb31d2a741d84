"""What sizes went into and came out of a model."""

from __future__ import annotations

from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from dpexp.records import ShapeRecord
from dpexp.shapes import (
    ShapeLog,
    call_shape,
    current_replica,
    shape_of,
    show,
    show_size,
    watch_submodules,
)

Pair = namedtuple("Pair", "left right")


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape)


VALUES: list[tuple[Any, str]] = [
    (zeros(10, 5), "[10, 5]"),
    (zeros(0, 5), "[0, 5]"),
    (torch.tensor(1.0), "[]"),
    (zeros(2), "[2]"),
    ((zeros(10, 5), zeros(10, 3)), "([10, 5], [10, 3])"),
    ([zeros(2, 3)], "([2, 3])"),
    ((), "()"),
    (Pair(zeros(1), zeros(2)), "([1], [2])"),
    ({"x": zeros(10, 5), "n": 3}, "{x: [10, 5], n: int}"),
    ({}, "{}"),
    ({3: [zeros(1), (zeros(2), None)]}, "{3: ([1], ([2], NoneType))}"),
    (Output(zeros(4, 2), torch.tensor(0.0)), "{logits: [4, 2], loss: []}"),
    ("text", "str"),
    (["a"] * 3, "(str, str, str)"),
    (["a"] * 4, "(4 x str)"),
    ([1, 2, 3, "a"], "(int, int, int, str)"),
    ([zeros(2)] * 4, "([2], [2], [2], [2])"),
    (None, "NoneType"),
]


@pytest.mark.parametrize(("value", "text"), VALUES, ids=[text for _, text in VALUES])
def test_a_nested_value_is_shown_by_its_shapes(value: Any, text: str) -> None:
    shape = shape_of(value)
    hash(shape)
    assert show(shape) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (zeros(10, 5), "torch.Size([10, 5])"),
        (torch.tensor(1.0), "torch.Size([])"),
        ((zeros(1), zeros(2)), "([1], [2])"),
    ],
)
def test_a_tensors_size_is_shown_as_the_exercise_prints_it(value: Any, text: str) -> None:
    assert show_size(shape_of(value)) == text


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((zeros(4, 5),), {}, "[4, 5]"),
        ((zeros(4, 5), zeros(4)), {}, "([4, 5], [4])"),
        ((), {"x": zeros(4, 5), "y": 1}, "{x: [4, 5], y: int}"),
        ((zeros(4, 5),), {"delta": 3}, "([4, 5], int)"),
        ((), {}, "()"),
    ],
)
def test_the_inputs_of_a_call(args: tuple[Any, ...], kwargs: dict[str, Any], text: str) -> None:
    assert show(call_shape(args, kwargs)) == text


def test_the_same_shapes_at_one_place_are_one_record_with_a_count() -> None:
    log = ShapeLog()
    for step, rows in enumerate((30, 30, 30, 10)):
        log.step = step
        log.note(0, (rows, 5), (rows, 2))
    assert log.records() == (
        ShapeRecord("", 0, "[30, 5]", "[30, 2]", count=3, first_step=0, last_step=2),
        ShapeRecord("", 0, "[10, 5]", "[10, 2]", count=1, first_step=3, last_step=3),
    )


def test_records_come_by_module_replica_and_first_step() -> None:
    log = ShapeLog()
    log.note(1, (1,), (1,), "layer")
    log.note(1, (1,), (1,))
    log.note(0, (2,), (2,))
    log.step = 1
    log.note(0, (1,), (1,))
    found = [(row.module, row.replica, row.first_step) for row in log.records()]
    assert found == [("", 0, 0), ("", 0, 1), ("", 1, 0), ("layer", 1, 0)]


def test_replicas_are_numbered_over_the_whole_run() -> None:
    log = ShapeLog(first_replica=3)
    log.note(0, (1,), (1,))
    assert [row.replica for row in log.records()] == [3]


def test_a_muted_log_notes_nothing_and_tells_no_one() -> None:
    log = ShapeLog()
    calls: list[Any] = []
    log.on_call = lambda *call: calls.append(call)
    log.muted = True
    log.note(0, (1,), (1,))
    assert log.records() == ()
    assert calls == []


def test_a_listener_hears_of_the_models_own_calls_and_not_of_its_submodules() -> None:
    log = ShapeLog(first_replica=1)
    calls: list[Any] = []
    log.on_call = lambda *call: calls.append(call)
    log.step = 4
    log.note(0, (1,), (2,))
    log.note(0, (1,), (2,), "layer")
    assert calls == [(4, 1, (1,), (2,))]


def test_notes_from_many_threads_are_all_counted() -> None:
    log = ShapeLog()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: [log.note(0, (1,), (1,)) for _ in range(200)], range(8)))
    assert [row.count for row in log.records()] == [1600]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))


@pytest.mark.parametrize(
    ("depth", "modules"), [(0, []), (1, ["0", "1"]), (2, ["0", "1", "1.0", "1.1"])]
)
def test_submodules_are_watched_down_to_the_depth(depth: int, modules: list[str]) -> None:
    log, net = ShapeLog(), model()
    with watch_submodules(net, depth, log):
        net(zeros(3, 5))
    assert [row.module for row in log.records()] == modules


def test_a_submodules_shapes_are_those_of_its_own_call() -> None:
    log, net = ShapeLog(), model()
    with watch_submodules(net, 2, log):
        net(zeros(3, 5))
    shapes = {row.module: (row.input_shape, row.output_shape) for row in log.records()}
    assert shapes == {
        "0": ("[3, 5]", "[3, 4]"),
        "1": ("[3, 4]", "[3, 2]"),
        "1.0": ("[3, 4]", "[3, 4]"),
        "1.1": ("[3, 4]", "[3, 2]"),
    }


def test_a_submodules_record_carries_the_replica_it_ran_in() -> None:
    log, net = ShapeLog(), model()
    token = current_replica.set(2)
    try:
        with watch_submodules(net, 1, log):
            net(zeros(3, 5))
    finally:
        current_replica.reset(token)
    assert {row.replica for row in log.records()} == {2}


def test_outside_of_dp_a_submodule_runs_in_the_processs_only_replica() -> None:
    log, net = ShapeLog(first_replica=5), model()
    with watch_submodules(net, 1, log):
        net(zeros(3, 5))
    assert {row.replica for row in log.records()} == {5}


def test_watching_ends_with_the_block_also_after_an_error() -> None:
    log, net = ShapeLog(), model()
    with pytest.raises(KeyError), watch_submodules(net, 2, log):
        raise KeyError
    net(zeros(3, 5))
    assert log.records() == ()
