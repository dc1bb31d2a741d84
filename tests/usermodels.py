"""Models of many kinds, each with the data it needs, as users have them."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset
from usercode import own_rank

from dpexp.datasets import Rows


def drawn(seed: int = 0) -> torch.Generator:
    """Random numbers of a dataset's own."""
    return torch.Generator().manual_seed(seed)


class Residual(nn.Module):
    """Two convolutions with BatchNorm, and a shortcut around them."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outside)
        self.second = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outside)
        self.shortcut = nn.Conv2d(inside, outside, 1, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.first_norm(self.first(images)).relu()
        return (self.second_norm(self.second(hidden)) + self.shortcut(images)).relu()


class ResNet(nn.Module):
    """Images [rows, 3, height, width] -> logits [rows, classes]."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))
        self.blocks = nn.Sequential(Residual(4, 4), Residual(4, 8))
        self.head = nn.Linear(8, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))


class ViT(nn.Module):
    """Images [rows, 3, 8, 8], cut into four patches -> logits [rows, classes]."""

    def __init__(self, classes: int = 4, width: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, 5, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        first = self.first.expand(len(images), -1, -1)
        hidden = self.encoder(torch.cat([first, patches], dim=1) + self.places)
        return self.head(hidden[:, 0])


class ModelOutput(OrderedDict[str, Any]):
    """As Hugging Face's: a dict whose entries are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass
class PlainOutput:
    """The same as a dataclass, which nn.DataParallel cannot gather."""

    loss: torch.Tensor
    logits: torch.Tensor


KINDS: dict[str, Any] = {"dict": dict, "model_output": ModelOutput, "dataclass": PlainOutput}


class Decoder(nn.Module):
    """Tokens by keyword -> its own loss (of the token after each) and logits.

    Args:
        kind: of the output: dict, model_output or dataclass.
    """

    def __init__(self, kind: str = "model_output", vocabulary: int = 16, width: int = 8) -> None:
        super().__init__()
        self.kind = kind
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(6, width)
        layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True)
        self.blocks = nn.ModuleList([layer])
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight  # tied, as in GPT-2

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        length = input_ids.shape[1]
        hidden = self.tokens(input_ids) + self.places(torch.arange(length))
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        for block in self.blocks:
            hidden = block(hidden, src_mask=later)
        logits = self.head(hidden)
        if labels is None:
            return {"logits": logits}
        loss = functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:])
        return KINDS[self.kind](loss=loss, logits=logits)


class TokenDicts(Dataset[Any]):
    """Rows {"input_ids", "labels"} of 6 tokens."""

    def __init__(self, rows: int = 10) -> None:
        self.tokens = torch.randint(16, (rows, 6), generator=drawn())

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Recurrent(nn.Module):
    """An LSTM over [rows, time, 3] -> logits [rows, 4] of its last hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(sequences)
        return self.head(hidden[:, -1])


def sequences(rows: int = 10) -> Rows:
    """Sequences of 5 steps with a class each."""
    source = drawn()
    inputs = torch.randn(rows, 5, 3, generator=source)
    return Rows(inputs, torch.randint(4, (rows,), generator=source))


class TwoInputs(nn.Module):
    """x1 [rows, 3] and x2 [rows, 2] -> [rows, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(2, 4)
        self.out = nn.Linear(4, 1)

    def forward(self, x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.left(x1) * self.right(x2)))


def pairs(rows: int = 10) -> Rows:
    """Rows (x1, x2, y)."""
    source = drawn()
    return Rows(*(torch.randn(rows, width, generator=source) for width in (3, 2, 1)))


class DictOutput(nn.Module):
    """[rows, 5] -> {"logits": [rows, 4], "features": [rows, 6]}."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        features = self.body(rows).relu()
        return {"features": features, "logits": self.head(features)}


def classes(rows: int = 10) -> Rows:
    """Rows of 5 features with one of 4 classes each."""
    source = drawn()
    return Rows(torch.randn(rows, 5, generator=source), torch.randint(4, (rows,), generator=source))


class Finetuned(nn.Module):
    """A frozen backbone with BatchNorm kept in eval mode, and a head that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.backbone.requires_grad_(False)
        self.head = nn.Linear(8, 4)

    def train(self, mode: bool = True) -> Finetuned:
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(rows))


class BoolBuffer(nn.Module):
    """A linear layer that sees the features where its bool buffer is true."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([True, False, True, True, False]))
        self.layer = nn.Linear(5, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows.masked_fill(~self.mask, 0.0))


class Unused(nn.Module):
    """Has a layer that forward never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(5, 4), nn.Linear(5, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.used(rows)


class Records(Dataset[Any]):
    """Nested dicts with texts, numbers and None, as a file of JSON lines gives them."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "id": f"row-{index}",
            "image": {"pixels": torch.full((5,), index / 10), "size": (5, 1), "caption": None},
            "meta": {"weight": 0.5 + index, "tags": ["a", "b"], "url": None},
            "label": index % 4,
        }


class Weighted(nn.Module):
    """[rows, 5] and [rows] -> logits [rows, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, pixels: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.cat([pixels, weight[:, None].float()], dim=1))


class WholeRecord(Weighted):
    """Takes the nested dicts of a record by keyword, with all that it does not need."""

    def forward(self, id: list[str], image: dict[str, Any], meta: dict[str, Any]) -> torch.Tensor:
        assert all(text.startswith("row-") for text in id)
        assert image["caption"] is None and meta["url"] is None
        return super().forward(image["pixels"], meta["weight"])


class WeightDiary(nn.Module):
    """LIN1 that writes its weight and the rows it gets to `<path>.<rank>` at each call."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.layer.weight, 1.0)
        self.path = path

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output = self.layer(rows)
        entry = {
            "rank": own_rank(),
            "weight": self.layer.weight.item(),
            "rows": rows.flatten().tolist(),
            "dtype": str(output.dtype),
        }
        with Path(f"{self.path}.{own_rank()}").open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        return output


def masked_tokens(rows: int = 11) -> Rows:
    """Tokens [rows, 6] and those to predict, of which the first `row % 7` are left out (-100)."""
    tokens = torch.randint(0, 13, (rows, 7), generator=drawn(5))
    wanted = tokens[:, 1:].clone()
    left_out = torch.arange(6) < (torch.arange(rows) % 7).reshape(-1, 1)
    wanted[left_out] = -100
    return Rows(tokens[:, :-1].contiguous(), wanted)


class Changing(nn.Module):
    """A step changes its buffers and draws random numbers, of 5 features for 2 targets."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(8, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(len(rows), 8)
        return self.last(self.drop(self.norm(self.first(rows))) * noise)  # type: ignore[no-any-return]


class SparseWords(nn.Module):
    """The gradient of its embedding has only the rows that were used."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 4, sparse=True)
        self.last = nn.Linear(4, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.last(self.words(words).mean(dim=1))  # type: ignore[no-any-return]


def words(rows: int = 20) -> Rows:
    """Three words a row of a vocabulary of 50, and a number."""
    generator = drawn()
    inputs = torch.randint(0, 50, (rows, 3), generator=generator)
    return Rows(inputs, torch.randn(rows, 1, generator=generator))
