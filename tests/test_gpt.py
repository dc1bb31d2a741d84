"""The small decoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dpexp.errors import ConfigError
from dpexp.models import gpt

SIZES: dict[str, int] = {"vocabulary": 11, "length": 6, "width": 8, "heads": 2, "layers": 3}


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return gpt(**SIZES)


def random_tokens(batch: int, time: int) -> torch.Tensor:
    return torch.randint(0, 11, (batch, time), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("time", [1, 4, 6])
def test_each_token_gets_a_score_for_each_token_of_the_vocabulary(
    model: nn.Module, time: int
) -> None:
    assert model(random_tokens(2, time)).shape == (2, time, 11)


def test_its_parameters_are_those_of_the_sum_by_hand(model: nn.Module) -> None:
    embeddings = 11 * 8 + 6 * 8
    norms, attention = 2 * (8 + 8), (8 * 24 + 24) + (8 * 8 + 8)
    perceptron = (8 * 32 + 32) + (32 * 8 + 8)
    end = (8 + 8) + (8 * 11 + 11)
    by_hand = embeddings + 3 * (norms + attention + perceptron) + end
    assert sum(parameter.numel() for parameter in model.parameters()) == by_hand


@pytest.mark.parametrize("changed", range(6))
def test_a_token_changes_the_scores_from_its_own_place_on(model: nn.Module, changed: int) -> None:
    tokens = random_tokens(1, 6)
    other = tokens.clone()
    other[0, changed] = (other[0, changed] + 1) % 11
    before, after = model(tokens), model(other)
    assert torch.equal(before[:, :changed], after[:, :changed])
    moved = (before != after).any(dim=-1)[0]
    assert moved[changed:].all()


def test_the_order_of_the_tokens_before_matters(model: nn.Module) -> None:
    scores = model(torch.tensor([[1, 2, 3], [2, 1, 3]]))
    assert not torch.allclose(scores[0, 2], scores[1, 2])


def test_attention_is_softmax_of_scaled_products_over_the_tokens_so_far(model: nn.Module) -> None:
    block: Any = model.get_submodule("blocks.0")
    hidden = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(2))
    query, key, value = block.attention(block.before_attention(hidden))[0].chunk(3, dim=-1)
    heads = []
    for part in (slice(0, 4), slice(4, 8)):
        scores = query[:, part] @ key[:, part].T / 4**0.5
        later = torch.ones(5, 5, dtype=torch.bool).triu(1)
        heads.append(scores.masked_fill(later, float("-inf")).softmax(dim=-1) @ value[:, part])
    attended = hidden[0] + block.projection(torch.cat(heads, dim=-1))
    expected = attended + block.mlp(block.before_mlp(attended))
    torch.testing.assert_close(block(hidden)[0], expected)


def test_it_learns_a_sequence(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tokens = torch.arange(7).repeat(4, 1)
    losses = []
    for _ in range(40):
        loss = nn.functional.cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 < losses[0]


def test_its_blocks_are_in_a_module_list(model: nn.Module) -> None:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    assert [len(found) for found in lists] == [3]


def test_rows_that_are_too_long_are_refused_with_the_length_they_need(model: nn.Module) -> None:
    with pytest.raises(ConfigError) as caught:
        model(random_tokens(1, 7))
    assert (caught.value.key, caught.value.value) == ("model.length", 6)
    assert "7 tokens" in str(caught.value)
    assert caught.value.fix == "model.length=7"


@pytest.mark.parametrize("key", SIZES)
def test_a_size_of_0_is_refused(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        gpt(**{**SIZES, key: 0})
    assert (caught.value.key, caught.value.value) == (f"model.{key}", 0)


def test_heads_that_do_not_divide_the_width_are_refused_with_one_that_they_do() -> None:
    with pytest.raises(ConfigError) as caught:
        gpt(**{**SIZES, "width": 10, "heads": 4})
    assert (caught.value.key, caught.value.fix) == ("model.width", "model.width=12")
