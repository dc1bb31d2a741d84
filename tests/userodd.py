"""Models whose errors have texts that are hard to write down."""

from __future__ import annotations

import sys

import torch
from torch import nn

TEXTS = {
    "half": "half a pair \ud83d",
    "markup": "<script>alert(1)</script> | $x$ \x1b[31m [/bold]\n# head",
    "long": "L" * 100_000,
    "empty": "",
}


class SpeechlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Failing(nn.Module):
    """Raises an error with one of the texts, or one that has none at all."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        raise ValueError(TEXTS[self.text]) if self.text in TEXTS else SpeechlessError


class Chatty(nn.Linear):
    """Prints at each call."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        print("called", flush=True)
        print("called", file=sys.stderr)
        return super().forward(rows)
