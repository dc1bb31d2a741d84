"""Reading batches of an in-memory dataset: at most 1.15 times a bare `index_select` loop over the
same indices. Below it, for the record: with the epochs' orders drawn on both sides as well."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, cast

import torch

from benchmarks.common import Pair, alternate, rounds, show
from dpexp.datasets import Rows
from dpexp.loading import fetch_here
from dpexp.schedule import GlobalBatch, Schedule

CASES = ((4096, 512, 128, 2000), (4096, 512, 30, 4000), (50_000, 3072, 256, 400))
Columns = tuple[torch.Tensor, torch.Tensor]


def dpexps(columns: Columns, schedule: Iterable[GlobalBatch], steps: int) -> float:
    """Microseconds per batch as a run reads them."""
    batches = fetch_here(Rows(*columns), cast(Schedule, schedule), lambda rows: rows)
    next(batches)
    began_s = time.perf_counter()
    while next(batches, None) is not None:  # as in a run, a batch is gone before the next comes
        pass
    return (time.perf_counter() - began_s) / (steps - 1) * 1e6


def bare(columns: Columns, orders: Iterable[torch.Tensor], steps: int) -> float:
    """Microseconds per batch of the loop one writes by hand."""
    inputs, targets = columns
    began_s = time.perf_counter()
    for chosen in orders:
        x, y = inputs.index_select(0, chosen), targets.index_select(0, chosen)
        del x, y
    return (time.perf_counter() - began_s) / steps * 1e6


def drawn(rows: int, batch: int, steps: int) -> Iterable[torch.Tensor]:
    """Whole batches of random rows, epoch by epoch."""
    while steps > 0:
        order = torch.randperm(rows)
        for start in range(0, rows - batch + 1, batch):
            yield order[start : start + batch]
            steps -= 1
            if steps == 0:
                return


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    count = rounds(15)
    given, both = [], []
    for rows, features, batch, steps in CASES:
        columns = torch.randn(rows, features), torch.randn(rows, 10)
        schedule = Schedule(rows, batch, None, steps, True, True, 0)
        batches = list(schedule)
        indices: Any = [torch.from_numpy(each.indices) for each in batches]
        name = f"{batch} of {rows:,} rows x {features}"
        sides = alternate(
            count,
            lambda c=columns, b=batches, s=steps: dpexps(c, b, s),  # type: ignore[misc]
            lambda c=columns, i=indices, s=steps: bare(c, i, s),  # type: ignore[misc]
        )
        given.append(Pair(f"read {name}", "us/batch", *sides, 1.15))
        sides = alternate(
            count,
            lambda c=columns, p=schedule, s=steps: dpexps(c, p, s),  # type: ignore[misc]
            lambda c=columns, r=rows, b=batch, s=steps: bare(c, drawn(r, b, s), s),  # type: ignore[misc]
        )
        both.append(Pair(f"draw and read {name}", "us/batch", *sides, float("inf")))
    show([*given, *both])


if __name__ == "__main__":
    main()
