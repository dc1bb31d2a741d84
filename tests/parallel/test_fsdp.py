"""The strategy fsdp without any process group: what it decides by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import make_context
from torch import nn

from dpexp.errors import ConfigError
from dpexp.models import gpt
from dpexp.parallel import fsdp, make_strategy
from dpexp.parallel.fsdp import FullyShardedDataParallel, units
from dpexp.schema import StrategyName, Task


class Block(nn.Module):
    """6 + 2 = 8 parameters of its own, and a norm of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.norm = nn.LayerNorm(2)


class Tower(nn.Module):
    """Two blocks of 12 parameters in a list, and a head of 3: 27."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(2, 1)


def names(model: nn.Module, wrap: Any) -> list[str]:
    """The names of the units, in their order."""
    known = {id(module): name for name, module in model.named_modules()}
    return [known[id(unit)] for unit in units(model, wrap)]


@pytest.mark.parametrize(
    ("wrap", "expected"),
    [
        ("model", []),
        ("blocks", ["blocks.1", "blocks.0"]),
        (["Block"], ["blocks.1", "blocks.0"]),
        (["Linear"], ["head", "blocks.1.layer", "blocks.0.layer"]),
        (
            ["Block", "LayerNorm"],
            ["blocks.1.norm", "blocks.1", "blocks.0.norm", "blocks.0"],
        ),
    ],
)
def test_units_are_the_blocks_or_the_modules_of_the_named_classes_inner_ones_first(
    wrap: Any, expected: list[str]
) -> None:
    assert names(Tower(), wrap) == expected


@pytest.mark.parametrize(
    ("least", "expected"),
    [
        (3, ["head", "blocks.1.norm", "blocks.1.layer", "blocks.0.norm", "blocks.0.layer"]),
        (4, ["blocks.1.norm", "blocks.1.layer", "blocks.0.norm", "blocks.0.layer"]),
        (8, ["blocks.1.layer", "blocks.0.layer"]),
        (9, ["blocks.1", "blocks.0"]),  # the smallest that are large enough
        (12, ["blocks.1", "blocks.0"]),
        (13, []),  # only the list of both, which is no module to call
        (28, []),
    ],
)
def test_a_number_takes_every_smallest_module_of_so_many_parameters(
    least: int, expected: list[str]
) -> None:
    assert names(Tower(), least) == expected


def test_blocks_of_blocks_are_units_too_inner_ones_first() -> None:
    model = nn.Sequential(Tower(), Tower())
    inner = [f"{tower}.blocks.{block}" for tower in (1, 0) for block in (1, 0)]
    assert names(model, "blocks") == [*inner[:2], "1", *inner[2:], "0"]


def test_blocks_are_modules_with_parts_and_another_of_their_kind_beside() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), Tower(), nn.Sequential(nn.ReLU()))
    assert names(model, "blocks") == ["2.blocks.1", "2.blocks.0"]
    assert units(nn.ModuleList([Block()]), "blocks") == []
    assert units(nn.Linear(1, 1), "blocks") == []


def test_a_module_that_stands_in_two_places_is_one_unit() -> None:
    shared = Block()
    assert names(nn.ModuleList([shared, shared]), "blocks") == ["0"]


def test_the_blocks_of_the_built_in_decoder_are_its_layers() -> None:
    model = gpt(vocabulary=11, length=6, width=8, heads=2, layers=3)
    found = units(model, "blocks")
    assert len(found) == 3
    assert len({type(unit) for unit in found}) == 1


def test_a_class_that_is_not_in_the_model_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match="no module of class Bloc, Lin") as caught:
        units(Tower(), ["Lin", "Block", "Bloc"])
    assert caught.value.key == "parallel.wrap"
    assert caught.value.allowed == "Block, LayerNorm, Linear, ModuleList"


# The strategy


def on_rank(rank: int, world_size: int, **overrides: Any) -> FullyShardedDataParallel:
    context = make_context("fsdp", world_size, rank=rank, world_size=world_size, **overrides)
    strategy = make_strategy(StrategyName.fsdp, context)
    assert isinstance(strategy, FullyShardedDataParallel)
    return strategy


class Sharded(nn.Module):
    """Stands in for a model that torch has sharded."""

    sync = True

    def set_requires_gradient_sync(self, wanted: bool) -> None:
        self.sync = wanted


@pytest.fixture
def on_streams(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """torch shards nothing; what fsdp asked for to time the collectives."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(fsdp, "init_device_mesh", lambda kind, shape: (kind, shape))
    monkeypatch.setattr(fsdp, "fully_shard", lambda unit, **_options: unit)
    monkeypatch.setattr(
        fsdp, "time_collectives", lambda units, log, **options: asked.append(options)
    )
    return asked


def on_device(device: str, backend: str) -> FullyShardedDataParallel:
    context = make_context("fsdp", 2, world_size=2, device=device, task=Task.train, batch_size=4)
    strategy = FullyShardedDataParallel(
        replace(context, plan=replace(context.plan, backend=backend))
    )
    strategy.wrap(Tower())
    return strategy


@pytest.mark.parametrize(("device", "streams"), [("cpu", False), ("meta", True)])
def test_on_a_device_the_collectives_run_on_streams_and_on_a_cpu_the_rank_stands_still(
    on_streams: list[dict[str, Any]], device: str, streams: bool
) -> None:
    strategy = on_device(device, "gloo" if device == "cpu" else "nccl")
    assert strategy.log is not None
    assert (strategy.log.blocking, strategy.notes) == (not streams, ())
    assert on_streams == [{"streams": streams}]


def test_what_gloo_carries_on_a_device_is_not_timed_and_a_note_says_so(
    on_streams: list[dict[str, Any]],
) -> None:
    strategy = on_device("meta", "gloo")
    assert (strategy.log, on_streams) == (None, [])
    (note,) = strategy.notes
    assert note.startswith("measure.comm: ") and "gloo" in note


def test_with_a_torch_that_has_other_insides_nothing_is_timed_and_a_note_says_so(
    on_streams: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsdp, "lacking", lambda _units: ["reshard", "finalize_backward"])
    assert on_device("cpu", "gloo").log is not None  # they are not needed there
    strategy = on_device("meta", "nccl")
    assert (strategy.log, len(on_streams)) == (None, 1)
    assert "no reshard, finalize_backward in FSDP" in strategy.notes[0]


@pytest.fixture
def sharded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[nn.Module, bool]]]:
    """What torch was asked to shard: (unit, whether it is freed after forward), in order."""
    asked: list[tuple[nn.Module, bool]] = []
    monkeypatch.setattr(fsdp, "init_device_mesh", lambda kind, shape: (kind, shape))

    def shard(unit: nn.Module, *, mesh: Any, reshard_after_forward: bool) -> None:
        assert mesh == ("cpu", (2,))
        asked.append((unit, reshard_after_forward))

    monkeypatch.setattr(fsdp, "fully_shard", shard)
    yield asked


@pytest.mark.parametrize("free", [True, False])
def test_the_units_are_sharded_and_the_model_last(
    sharded: list[tuple[nn.Module, bool]], free: bool
) -> None:
    model = Tower()
    on_rank(0, 2, parallel={"reshard_after_forward": free}).wrap(model)
    assert [unit for unit, _ in sharded] == [model.blocks[1], model.blocks[0], model]
    assert {freed for _, freed in sharded} == {free}


@pytest.mark.usefixtures("sharded")
def test_gradients_are_exchanged_in_the_last_micro_batch_only() -> None:
    strategy, model = on_rank(0, 2), Sharded()
    strategy.wrap(model)
    with strategy.synchronised(False):
        assert not model.sync
    assert model.sync
    with strategy.synchronised(True):
        assert model.sync


@pytest.mark.usefixtures("sharded")
def test_gradients_are_exchanged_again_after_a_failed_micro_batch() -> None:
    strategy, model = on_rank(0, 2), Sharded()
    strategy.wrap(model)

    @contextmanager
    def failing() -> Iterator[None]:
        with strategy.synchronised(False):
            yield
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"), failing():
        pass
    assert model.sync


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_the_mean_of_the_weighted_losses_of_five_rows_is_six(world_size: int) -> None:
    total, start = 0.0, 0
    for rank in range(world_size):
        strategy = on_rank(rank, world_size)
        rows = strategy.own_rows(5)
        chunk = torch.arange(5.0)[start : start + rows] if rows else torch.arange(2.0)
        start += rows
        total += strategy.weigh((chunk**2).mean(), rows, 5).item()
    assert total / world_size == pytest.approx(6.0, abs=1e-5)


def test_an_output_with_entries_is_no_loss_and_the_refusal_names_the_target() -> None:
    with pytest.raises(ConfigError, match=r"taken for its loss, but its shape is \[3\]") as caught:
        on_rank(0, 2).weigh(torch.zeros(3), 3, 5)
    assert "batch.target" in caught.value.fix


@pytest.mark.usefixtures("sharded")
def test_closing_lets_go_of_the_model() -> None:
    strategy = on_rank(0, 2)
    strategy.wrap(Tower())
    strategy.close()
    assert not hasattr(strategy, "_model")
