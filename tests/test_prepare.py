"""What is done to a model after it is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_config, make_facts, make_plan_for
from torch import nn

from dpexp.errors import ConfigError
from dpexp.prepare import compile_model, prepare_model
from dpexp.schema_workload import CompileMode

CUDA = make_facts(accelerator="cuda", num_accelerators=2, nccl=True)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten())


def prepared(model: nn.Module, strategy: str = "none", **prepare: Any) -> nn.Module:
    facts = CUDA if strategy != "none" else make_facts()
    plan = make_plan_for(strategy, 1 if strategy == "none" else 2, facts=facts, prepare=prepare)
    return prepare_model(model, plan)[0]


def test_by_default_a_model_stays_as_it_was_built() -> None:
    model = network()
    weight = model[0].weight
    ready = prepared(model)
    assert ready is model
    assert model[0].weight is weight
    assert not weight.is_contiguous(memory_format=torch.channels_last)
    assert type(model[1]) is nn.BatchNorm2d


def test_convolutions_get_the_channels_last() -> None:
    ready: Any = prepared(network(), channels_last=True)
    assert ready[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert ready(torch.zeros(2, 3, 5, 5)).shape == (2, 4 * 3 * 3)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_batchnorm_goes_over_all_ranks_where_there_are_several(strategy: str) -> None:
    model = network()
    before = list(model.state_dict())
    ready: Any = prepared(model, strategy, sync_batchnorm=True)
    assert type(ready[1]) is nn.SyncBatchNorm
    assert list(ready.state_dict()) == before


def test_on_a_single_device_batchnorm_sees_the_whole_batch_anyway() -> None:
    ready: Any = prepared(network(), sync_batchnorm=True)
    assert type(ready[1]) is nn.BatchNorm2d


def test_initial_weights_come_from_the_file_and_its_notes_are_passed_on(tmp_path: Path) -> None:
    model, file = nn.Linear(1, 1), tmp_path / "w.pt"
    torch.save({"module.weight": torch.tensor([[3.0]]), "module.bias": torch.tensor([4.0])}, file)
    plan = make_plan_for(prepare={"init_from": str(file)})
    ready, notes = prepare_model(model, plan)
    assert ready(torch.ones(1, 1)).item() == 7.0
    assert len(notes) == 1
    assert "taken off" in notes[0]


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "w.pt")
    with pytest.raises(ConfigError, match="is of another model"):
        prepared(nn.Linear(1, 1), init_from=str(tmp_path / "w.pt"))


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        (CompileMode.default, "default"),
        (CompileMode.reduce_overhead, "reduce-overhead"),
        (CompileMode.max_autotune, "max-autotune"),
    ],
)
def test_a_model_is_compiled_in_place_in_the_mode_asked_for(
    monkeypatch: pytest.MonkeyPatch, mode: CompileMode, name: str
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(nn.Module, "compile", lambda _module, **options: asked.append(options))
    compile_model(nn.Linear(1, 1), make_config(prepare={"compile_mode": mode}).prepare)
    assert asked == []
    compile_model(
        nn.Linear(1, 1), make_config(prepare={"compile": True, "compile_mode": mode}).prepare
    )
    assert asked == [{"mode": name}]
