"""Models and datasets for the tests of dpexp.anatomy, named through `_target_`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset


class Recurrent(nn.Module):
    """[rows, time, 8] -> [rows, 16], the last state of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(8, 16, batch_first=True)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.cells(rows)[0][:, -1]


class Encoder(nn.Module):
    """Layers that torch copies in its constructor, and calls by a fused kernel in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layers(rows)


class Spectral(nn.Module):
    """A Fourier transform, which torch's counter has no formula for, and maybe a layer."""

    def __init__(self, layer: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2) if layer else None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = torch.fft.fft(rows).abs()
        return rows if self.layer is None else self.layer(rows)


class Elementwise(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * 2


class Rates(nn.Module):
    """Its constructor reads numbers, as those with a growing drop rate do; forward too if asked."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.rates = [float(rate) for rate in torch.linspace(0, 0.1, 3)]
        self.layer = nn.Linear(5, 2)
        self.branches = branches

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.branches and rows.sum().item() > 1e9:
            return rows
        return self.layer(rows)


class Branching(nn.Module):
    """Goes another way for other numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows) if rows.sum() > 0 else self.layer(-rows)


class Detached(nn.Module):
    """Its output has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows).detach()


def scripted() -> nn.Module:
    return torch.jit.script(nn.Linear(5, 2))


def traced() -> nn.Module:
    return torch.jit.trace(nn.Linear(5, 2), torch.zeros(3, 5))


class Careless(nn.Module):
    """Makes tensors on the default device, and keeps one in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)
        self._scale = torch.full((5,), 2.0)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows * self._scale + torch.arange(5))


class Tied(nn.Module):
    """Two names for one matrix of 7 x 5; [rows, time] -> [rows, time, 7]."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(tokens))


class Normed(nn.Module):
    """With buffers: 3 + 3 numbers and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images).mean(dim=(2, 3))


class Captioned(nn.Module):
    """Takes keywords of several kinds; returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, pixels: torch.Tensor, texts: list[str], extra: None) -> dict[str, Any]:
        assert len(texts) == len(pixels)
        assert extra is None
        return {"logits": self.layer(pixels)}


class Decoder(nn.Module):
    """A decoder of torch's own layers: [rows, time] int64 -> [rows, time, vocabulary]."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.packed = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.wide = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows, time, width = hidden.shape
        packed = self.packed(hidden).view(rows, time, 3, self.heads, width // self.heads)
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(rows, time, width))
        return hidden + self.narrow(self.wide(hidden).relu())


class Sequences(Dataset[Any]):
    """Rows [time, 8] without a target."""

    def __init__(self, rows: int = 10, time: int = 7, features: int = 8) -> None:
        self.rows, self.shape = rows, (time, features)
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        return torch.zeros(self.shape)


class Captions(Dataset[Any]):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pixels": torch.zeros(4), "texts": f"number {index}", "extra": None}


class Endless(IterableDataset[Any]):
    """Pairs ([5], [2]) without end."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.zeros(5), torch.zeros(2)


class Unreadable(Dataset[Any]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        raise KeyError("pixels")


class ClosureOnly(torch.optim.SGD):
    """Its step needs a function, which dpexp does not give."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)
