"""The interface of a sink."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from dpexp.records import StepRecord


class Sink(ABC):
    """Takes step records between steps. After `write` returns, they survive the process."""

    @abstractmethod
    def write(self, records: Sequence[StepRecord]) -> None:
        """Write records, in the order of their steps, and flush them to the file."""

    @abstractmethod
    def close(self) -> None:
        """Nothing more will come."""
