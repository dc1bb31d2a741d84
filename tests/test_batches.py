"""Batches as values: inputs and target, moving, sizes, seeds."""

from __future__ import annotations

import random
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from dpexp.batches import (
    Inputs,
    leading_sizes,
    make_split,
    map_tensors,
    move,
    seed_all,
    seed_of_rank,
)
from dpexp.errors import ConfigError
from dpexp.schema_workload import BatchConfig

Pair = namedtuple("Pair", "left right")

X, Y, Z = torch.zeros(4, 5), torch.ones(4, 2), torch.ones(4)
META = torch.device("meta")


def split(batch: Any, constants: dict[str, Any] | None = None, **entries: Any) -> Inputs:
    chosen = BatchConfig(**{"inputs": "auto", "target": "auto", **entries})
    return make_split(chosen, constants or {})(batch)


@pytest.mark.parametrize(
    ("batch", "args", "kwargs", "target"),
    [
        (X, (X,), {}, None),
        ([X], (X,), {}, None),
        ((X, Y), (X,), {}, Y),
        ([X, Y], (X,), {}, Y),
        ((X, Z, Y), (X, Z), {}, Y),
        (((X, Z), Y), (X, Z), {}, Y),
        (([X, Z], Y), (X, Z), {}, Y),
        (({"a": X, "b": Z}, Y), (), {"a": X, "b": Z}, Y),
        ({"a": X, "b": Z}, (), {"a": X, "b": Z}, None),
        ((X, {"boxes": Y}), (X,), {}, {"boxes": Y}),
        (Pair(X, Y), (X,), {}, Y),
    ],
    ids=[
        "tensor",
        "list of one",
        "tuple",
        "list",
        "three",
        "tuple in tuple",
        "list in tuple",
        "dict in tuple",
        "dict",
        "dict as target",
        "named tuple",
    ],
)
def test_by_convention_a_batch_is_split_into_inputs_and_target(
    batch: Any, args: Any, kwargs: Any, target: Any
) -> None:
    assert split(batch) == Inputs(args, kwargs, target)


@pytest.mark.parametrize("batch", [X, (X, Y), ({"a": X}, Y), {"a": X}])
def test_constant_keywords_join_every_call(batch: Any) -> None:
    assert split(batch, {"delta": 3}).kwargs["delta"] == 3


def test_a_constant_keyword_wins_and_the_batch_itself_is_not_changed() -> None:
    batch = {"a": X}
    assert split(batch, {"a": 1}).kwargs == {"a": 1}
    assert batch["a"] is X


@pytest.mark.parametrize("batch", ["text", 3, None])
def test_a_batch_of_another_kind_is_refused_by_its_type(batch: Any) -> None:
    with pytest.raises(ConfigError, match=type(batch).__name__):
        split(batch)


BATCH = {"image": {"pixels": X, "mask": Z}, "label": Y, "a.b": Z, "names": ["p", "q", "r", "s"]}


@pytest.mark.parametrize(
    ("batch", "inputs", "args", "kwargs"),
    [
        ((X, Y, Z), 0, (X,), {}),
        ((X, Y, Z), -1, (Z,), {}),
        ((X, Y, Z), [2, 0], (Z, X), {}),
        ((X, Y, Z), {"tokens": 0, "labels": 0}, (), {"tokens": X, "labels": X}),
        (((X, Z), Y), 0, (X, Z), {}),
        (((X, Z), Y), "0.1", (Z,), {}),
        (({"x": X}, Y), 0, (), {"x": X}),
        (({"x": X}, Y), "0.x", (X,), {}),
        (BATCH, "label", (Y,), {}),
        (BATCH, "a.b", (Z,), {}),
        (BATCH, "image.pixels", (X,), {}),
        (BATCH, "image", (), {"pixels": X, "mask": Z}),
        (BATCH, ["image.mask", "label"], (Z, Y), {}),
        (BATCH, ["image"], (BATCH["image"],), {}),
        (BATCH, {"x": "image.pixels", "n": "names"}, (), {"x": X, "n": BATCH["names"]}),
        ({0: X, 1: Y}, 0, (X,), {}),
        (Pair(X, Y), 1, (Y,), {}),
        (Pair(X, Y), "right", (Y,), {}),
        ({"pair": Pair(X, Y)}, "pair.left", (X,), {}),
    ],
)
def test_inputs_are_the_named_entries(batch: Any, inputs: Any, args: Any, kwargs: Any) -> None:
    assert split(batch, inputs=inputs, target="none") == Inputs(args, kwargs, None)


@pytest.mark.parametrize(
    ("batch", "target", "args", "kwargs", "wanted"),
    [
        ((X, Y), "none", (X, Y), {}, None),
        ((X, Y), None, (X, Y), {}, None),
        (X, None, (X,), {}, None),
        ({"a": X}, None, (), {"a": X}, None),
        ((X, Y, Z), 0, (Y, Z), {}, X),
        ((X, Y, Z), 1, (X, Z), {}, Y),
        ([X, Y, Z], -1, (X, Y), {}, Z),
        ((Y, {"a": X, "b": Z}), 0, (), {"a": X, "b": Z}, Y),
        ({"a": X, "y": Y}, "y", (), {"a": X}, Y),
        ({"a": X, "y": {"box": Y}}, "y.box", (), {"a": X, "y": {"box": Y}}, Y),
    ],
)
def test_the_target_is_the_named_entry_and_the_rest_are_the_inputs(
    batch: Any, target: Any, args: Any, kwargs: Any, wanted: Any
) -> None:
    assert split(batch, target=target) == Inputs(args, kwargs, wanted)


def test_named_inputs_leave_the_target_to_the_convention() -> None:
    assert split((X, Z, Y), inputs=1) == Inputs((Z,), {}, Y)
    assert split({"a": X, "b": Y}, inputs="a") == Inputs((X,), {}, None)


def test_inputs_and_target_may_both_be_named_and_be_the_same() -> None:
    assert split((X, Y), inputs=[0], target=0) == Inputs((X,), {}, X)


def test_taking_the_target_out_does_not_change_the_batch() -> None:
    batch = {"a": X, "y": Y}
    split(batch, target="y")
    assert list(batch) == ["a", "y"]


@pytest.mark.parametrize("inputs", [0, [0], {"x": 0}])
def test_constant_keywords_join_named_inputs_too(inputs: Any) -> None:
    assert split((X, Y), {"delta": 3}, inputs=inputs).kwargs["delta"] == 3


@pytest.mark.parametrize(
    ("batch", "entries", "key", "what"),
    [
        ((X, Y), {"inputs": 2}, "batch.inputs", "a tuple of 2 entries"),
        ((X, Y), {"inputs": [0, "x"]}, "batch.inputs", "a tuple of 2 entries"),
        ([X, Y], {"target": -3}, "batch.target", "a list of 2 entries"),
        (BATCH, {"inputs": "pixels"}, "batch.inputs", "a dict with image, label, a.b, names"),
        (BATCH, {"inputs": {"x": "image.pix"}}, "batch.inputs", "a dict with image"),
        (BATCH, {"target": "labels"}, "batch.target", "a dict with image"),
        (X, {"inputs": 0}, "batch.inputs", "a Tensor"),
    ],
)
def test_an_entry_that_is_not_there_is_refused_with_those_that_are(
    batch: Any, entries: dict[str, Any], key: str, what: str
) -> None:
    with pytest.raises(ConfigError, match="has no such entry") as caught:
        split(batch, **entries)
    assert caught.value.key == key
    assert f"it is {what}" in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        X,
        (X, Y),
        [X, [Y]],
        {"a": X},
        Pair(X, {"b": Y}),
        OrderedDict(a=X),
        {"n": 3, "t": "text", "none": None},
    ],
    ids=lambda value: type(value).__name__,
)
def test_moving_keeps_the_structure_and_the_types_of_containers(value: Any) -> None:
    moved = move(value, META)
    assert type(moved) is type(value)
    assert leading_sizes(moved) == leading_sizes(value)


def test_every_tensor_is_moved_and_nothing_else() -> None:
    moved = move({"x": (X, [Y]), "n": 3, "t": "text"}, META)
    assert (moved["x"][0].device, moved["x"][1][0].device) == (META, META)
    assert (moved["n"], moved["t"]) == (3, "text")


class Keyed(dict[str, Any]):
    """A library's own dict, whose constructor takes something else."""

    def __init__(self, *, source: str) -> None:
        super().__init__()
        self.source = source


def test_a_librarys_own_dict_keeps_its_type_and_the_original_its_tensors() -> None:
    batch = Keyed(source="file")
    batch["x"] = X
    doubled = map_tensors(lambda tensor: tensor + 1, batch)
    assert (type(doubled), doubled.source) == (Keyed, "file")
    assert torch.equal(doubled["x"], torch.ones(4, 5))
    assert torch.equal(batch["x"], torch.zeros(4, 5))


def test_the_shapes_of_all_tensors_in_a_nested_value() -> None:
    nested = (X, {"a": [Y, 3], "b": Pair(None, Z)}, "text")
    assert [list(shape) for shape in leading_sizes(nested)] == [[4, 5], [4, 2], [4]]


def drawn() -> tuple[float, float, float]:
    return torch.rand(()).item(), float(np.random.random()), random.random()


@pytest.mark.parametrize("seed", [0, 2**32 + 5, 2**63 - 1])
def test_one_seed_fixes_torch_numpy_and_random(seed: int) -> None:
    seed_all(seed)
    first = drawn()
    seed_all(seed)
    assert drawn() == first
    seed_all(seed - 1 if seed else 1)
    assert all(new != old for new, old in zip(drawn(), first, strict=True))


def test_ranks_draw_from_seeds_of_their_own_that_depend_on_the_seed() -> None:
    seeds = [seed_of_rank(seed, rank) for seed in (0, 1, 2) for rank in range(8)]
    assert len(set(seeds)) == 24
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of_rank(1, 3) == seed_of_rank(1, 3)


def test_a_field_of_a_named_tuple_can_be_the_target() -> None:
    pair = namedtuple("Pair", "left right")(torch.zeros(2), torch.ones(2))
    inputs = make_split(BatchConfig(inputs="auto", target="left"), {})(pair)
    assert (len(inputs.args), inputs.args[0].tolist()) == (1, [1.0, 1.0])
    assert inputs.target.tolist() == [0.0, 0.0]
