"""State dicts: fingerprints, and files with weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dpexp.errors import ConfigError
from dpexp.weights import fingerprint, load_weights, save_weights

State = dict[str, Any]


def made(fill: float = 1.0) -> nn.Module:
    """Two layers: body.0.weight, body.0.bias, head.weight, and a counter."""
    model = nn.Module()
    model.body = nn.Sequential(nn.Linear(2, 3))
    model.head = nn.Linear(3, 1, bias=False)
    model.register_buffer("count", torch.tensor(7))
    for parameter in model.parameters():
        nn.init.constant_(parameter, fill)
    return model


def refusal(model: nn.Module, path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_weights(model, str(path))
    assert (caught.value.key, caught.value.value) == ("prepare.init_from", str(path))
    return caught.value.problem


# Files


@pytest.mark.parametrize("name", ["w.pt", "w.pth", "w.safetensors"])
def test_weights_come_from_a_file(tmp_path: Path, name: str) -> None:
    file, model = tmp_path / name, made(0.0)
    (save_file if name.endswith("safetensors") else torch.save)(made(2.5).state_dict(), file)
    assert load_weights(model, str(file)) == ()
    assert fingerprint(model.state_dict()) == fingerprint(made(2.5).state_dict())


def test_saved_weights_are_loaded_again_and_no_other_file_is_left(tmp_path: Path) -> None:
    save_weights(made(2.5).state_dict(), tmp_path / "weights.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["weights.pt"]
    model = made(0.0)
    load_weights(model, str(tmp_path / "weights.pt"))
    assert fingerprint(model.state_dict()) == fingerprint(made(2.5).state_dict())


def test_weights_that_cannot_be_saved_leave_the_old_file_and_no_other(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    file.write_text("old")
    with pytest.raises(Exception, match="pickle"):
        save_weights({"weight": lambda: None}, file)
    assert (file.read_text(), len(list(tmp_path.iterdir()))) == ("old", 1)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"model": state, "optimizer": {"state": {}}},
        lambda state: {"state_dict": {"model": state}},
    ],
    ids=["state_dict", "model", "both"],
)
def test_a_checkpoint_may_hold_the_state_dict_as_an_entry(
    tmp_path: Path, wrap: Callable[[State], State]
) -> None:
    torch.save(wrap(made(2.5).state_dict()), tmp_path / "c.pt")
    model = made(0.0)
    load_weights(model, str(tmp_path / "c.pt"))
    assert model.head.weight.tolist() == [[2.5, 2.5, 2.5]]


def test_a_wrappers_prefix_is_taken_off_and_noted(tmp_path: Path) -> None:
    file = tmp_path / "ddp.pt"
    torch.save({f"module.{key}": value for key, value in made(2.5).state_dict().items()}, file)
    model = made(0.0)
    (note,) = load_weights(model, str(file))
    assert (
        note
        == f"prepare.init_from: the names in {file} begin with a wrapper's 'module.', taken off"
    )
    assert model.head.weight.tolist() == [[2.5, 2.5, 2.5]]


def test_a_model_whose_own_names_begin_so_keeps_them(tmp_path: Path) -> None:
    model = nn.Module()
    model.module = nn.Linear(1, 1)
    torch.save(model.state_dict(), tmp_path / "own.pt")
    assert load_weights(model, str(tmp_path / "own.pt")) == ()


def test_numbers_are_taken_in_the_models_own_format(tmp_path: Path) -> None:
    half = made(2.5).half()  # its whole numbers stay whole
    torch.save(half.state_dict(), tmp_path / "half.pt")
    model = made(0.0)
    load_weights(model, str(tmp_path / "half.pt"))
    assert (model.head.weight.dtype, model.head.weight[0, 0].item()) == (torch.float32, 2.5)


def test_real_numbers_are_not_taken_for_whole_ones(tmp_path: Path) -> None:
    state = {key: value.half() for key, value in made(2.5).state_dict().items()}
    torch.save(state, tmp_path / "half.pt")
    with pytest.raises(ConfigError, match="its count is real, that of the model whole or bool"):
        load_weights(made(0.0), str(tmp_path / "half.pt"))


# Refusals


def without(*keys: str, **more: Any) -> State:
    state = {key: value for key, value in made(2.5).state_dict().items() if key not in keys}
    return {**state, **more}


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        (without("head.weight"), "it lacks 1 (head.weight)"),
        (without(tail=torch.zeros(1)), "the model does not have 1 (tail)"),
        (
            without("count", "head.weight", tail=torch.zeros(1)),
            "it lacks 2 (count, head.weight); the model does not have 1 (tail)",
        ),
        (
            {f"layer.{i}": torch.zeros(1) for i in range(5)},
            "the model does not have 5 (layer.0, layer.1, layer.2, …)",
        ),
        (without(**{"head.weight": torch.zeros(1, 4)}), "size mismatch for head.weight"),
        (without(**{"head.weight": 3}), "head.weight"),
    ],
    ids=["lacking", "more", "both", "many", "another size", "no tensor"],
)
def test_weights_of_another_model_are_refused_by_name(
    tmp_path: Path, state: State, problem: str
) -> None:
    torch.save(state, tmp_path / "w.pt")
    found = refusal(made(), tmp_path / "w.pt")
    assert found.startswith("is of another model: ")
    assert problem in found


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_file_with_objects_is_refused_and_none_of_its_code_runs(tmp_path: Path) -> None:
    trace = tmp_path / "was here"
    torch.save({**made().state_dict(), "more": Trap(trace)}, tmp_path / "w.pt")
    assert "more than tensors and plain values" in refusal(made(), tmp_path / "w.pt")
    assert not trace.exists()


def test_a_whole_pickled_model_is_refused(tmp_path: Path) -> None:
    torch.save(nn.Linear(1, 1), tmp_path / "model.pt")
    assert "more than tensors and plain values" in refusal(made(), tmp_path / "model.pt")


@pytest.mark.parametrize("content", [b"", b"garbage" * 20], ids=["empty", "garbage"])
@pytest.mark.parametrize(
    "name",
    [
        "w.pt",
        pytest.param(
            "w.safetensors",
        ),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert "cannot be read" in refusal(made(), tmp_path / name)


@pytest.mark.parametrize(
    ("held", "problem"),
    [
        ([torch.zeros(1)], "holds a list, not a state_dict"),
        (torch.zeros(1), "holds a Tensor, not a state_dict"),
        ({}, "holds a dict, not a state_dict"),
        pytest.param(
            {0: torch.zeros(1)},
            "holds a dict, not a state_dict",
        ),
    ],
    ids=["list", "tensor", "empty", "numbers as names"],
)
def test_a_file_with_something_else_is_refused_by_what_it_is(
    tmp_path: Path, held: Any, problem: str
) -> None:
    torch.save(held, tmp_path / "w.pt")
    assert problem in refusal(made(), tmp_path / "w.pt")


def test_a_file_that_is_not_there_is_refused_with_the_folder_searched(tmp_path: Path) -> None:
    assert f"there is no such file (searched from {Path.cwd()})" in refusal(
        made(), tmp_path / "no.pt"
    )
    assert "there is no such file" in refusal(made(), tmp_path)  # a folder is none


# Fingerprints


def test_equal_states_have_equal_fingerprints() -> None:
    assert fingerprint(made(2.5).state_dict()) == fingerprint(made(2.5).state_dict())
    turned = torch.arange(6.0).reshape(2, 3).t()
    assert fingerprint({"a": turned}) == fingerprint({"a": turned.contiguous()})


@pytest.mark.parametrize(
    "other",
    [
        {"b": torch.zeros(2)},
        {"a": torch.zeros(1, 2)},
        {"a": torch.zeros(2, dtype=torch.int32)},
        {"a": torch.tensor([0.0, 1e-45])},
        {"a": torch.zeros(2), "b": torch.zeros(0)},
    ],
    ids=["name", "shape", "type", "one bit", "one more"],
)
def test_a_fingerprint_tells_names_shapes_types_and_every_bit(other: State) -> None:
    assert fingerprint({"a": torch.zeros(2)}) != fingerprint(other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool, torch.complex64])
def test_tensors_of_any_type_have_a_fingerprint(dtype: torch.dtype) -> None:
    assert len(fingerprint({"a": torch.ones(2, dtype=dtype), "b": torch.tensor(1)})) == 64


def test_a_file_below_the_home_folder_may_be_named_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("HOME", os.fspath(tmp_path))
        torch.save(made(2.5).state_dict(), tmp_path / "w.pt")
        assert load_weights(made(), "~/w.pt") == ()
