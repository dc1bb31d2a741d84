"""What a run would do, without running it: sizes, arithmetic, memory, traffic."""

from __future__ import annotations

from dpexp.anatomy.data import Anatomy
from dpexp.anatomy.dissection import dissect

__all__ = ["Anatomy", "dissect"]
