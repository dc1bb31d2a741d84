"""The models of libraries: each option of conf/model is built from its file and called once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import yaml
from library import library

from dpexp.build import build
from dpexp.compose import config_folder

library("torchvision")
library("transformers")

# Published counts, or for the tiny one the sum by hand.
BLOCK = 2 * 128 + (64 * 192 + 192) + (64 * 64 + 64) + (64 * 256 + 256) + (256 * 64 + 64)
PARAMETERS = {
    "resnet18": 11_689_512 - 990 * 513,  # the published one has 1000 classes
    "resnet50": 25_557_032,
    "vit_b_16": 86_567_656,
    "gpt2_tiny": 256 * 64 + 128 * 64 + 2 * BLOCK + 128,
    "gpt2_small": 124_439_808,
}
CLASSES = {"resnet18": 10, "resnet50": 1000, "vit_b_16": 1000}
VOCABULARY = {"gpt2_tiny": 256, "gpt2_small": 50257}


def node(name: str) -> dict[str, Any]:
    found = yaml.safe_load((config_folder() / "model" / f"{name}.yaml").read_text("utf-8"))
    assert isinstance(found, dict)
    return found


def made(name: str, device: str = "meta") -> torch.nn.Module:
    """The model; on the meta device it has shapes without numbers."""
    with torch.device(device):
        model = build("model", node(name))
    assert isinstance(model, torch.nn.Module)
    return model


def test_these_are_all_the_options_of_libraries() -> None:
    files = (config_folder() / "model").glob("*.yaml")
    named = {file.stem for file in files if not node(file.stem)["_target_"].startswith("dpexp.")}
    assert named - {"custom"} == set(PARAMETERS) == {*CLASSES, *VOCABULARY}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_model_has_the_parameters_of_the_one_it_is_named_after(name: str) -> None:
    model = made(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", CLASSES)
def test_a_model_of_images_scores_the_classes(name: str) -> None:
    device = "cpu" if name == "resnet18" else "meta"
    model = made(name, device)
    size = 224 if name == "vit_b_16" else 64
    images = torch.zeros(2, 3, size, size, device=device)
    assert model(images).shape == (2, CLASSES[name])


@pytest.mark.parametrize("name", VOCABULARY)
def test_a_model_of_text_scores_its_vocabulary_and_gives_its_loss(name: str) -> None:
    model = made(name, "cpu")  # transformers looks into its masks, so meta will not do
    tokens = torch.zeros(2, 128, dtype=torch.int64)
    output = model(input_ids=tokens, labels=tokens)
    assert output.logits.shape == (2, 128, VOCABULARY[name])
    assert output.loss.shape == ()
    assert output.past_key_values is None


@pytest.mark.parametrize(("name", "chance"), [("gpt2_tiny", 0.0), ("gpt2_small", 0.1)])
def test_dropout_is_off_in_the_tiny_model_and_as_published_in_the_small_one(
    name: str, chance: float
) -> None:
    model = made(name)
    dropouts = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    assert set(dropouts) == {chance}
