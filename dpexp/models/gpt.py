"""A small decoder-only transformer."""

from __future__ import annotations

from typing import final

import torch
from torch import nn
from torch.nn import functional

from dpexp.errors import ConfigError


def gpt(vocabulary: int, length: int, width: int, heads: int, layers: int) -> nn.Module:
    """A decoder like GPT-2: [batch, time] int64 -> logits [batch, time, vocabulary].

    Logits at t depend on the tokens up to t only. No dropout; the head has weights of its own.

    Args:
        vocabulary: tokens are in 0 <= token < vocabulary.
        length: the most tokens that a row may have.
        width: numbers per token between the layers, a multiple of `heads`.
        heads: of the attention.
        layers: blocks of attention and a perceptron four times as wide.

    Raises:
        ConfigError: a size is too small, or the heads do not divide the width. In a forward call:
            the rows are longer than `length`.
    """
    sizes = {
        "vocabulary": vocabulary,
        "length": length,
        "width": width,
        "heads": heads,
        "layers": layers,
    }
    for key, value in sizes.items():
        if value < 1:
            raise ConfigError(f"model.{key}", value, "is too small", allowed="1 or more")
    if width % heads:
        raise ConfigError(
            "model.width",
            width,
            f"the {heads} heads do not divide it",
            allowed="a multiple of model.heads",
            fix=f"model.width={width + heads - width % heads}",
        )
    return GPT(vocabulary, length, width, heads, layers)


@final
class Block(nn.Module):
    """Attention to the tokens before, then a perceptron: [batch, time, width] -> the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, time, width = hidden.shape
        packed = self.attention(self.before_attention(hidden))
        # [batch, time, 3 * width] -> three of [batch, heads, time, width / heads]
        shape = (batch, time, 3, self._heads, width // self._heads)
        query, key, value = packed.view(shape).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(mixed.transpose(1, 2).reshape(batch, time, width))
        return hidden + self.mlp(self.before_mlp(hidden))  # type: ignore[no-any-return]


@final
class GPT(nn.Module):
    """See :func:`gpt`. The blocks are in a ModuleList, whose entries fsdp shards one by one."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self._length = length
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        time = tokens.shape[1]
        if time > self._length:
            raise ConfigError(
                "model.length",
                self._length,
                f"the dataset's rows have {time} tokens",
                fix=f"model.length={time}",
            )
        places = torch.arange(time, device=tokens.device)
        hidden = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]
