"""Reading batches of an in-memory dataset: at most 1.15 times a bare `index_select` loop."""

from __future__ import annotations

import time

import torch

from benchmarks.common import Pair, alternate, rounds, show
from dpexp.datasets import Rows
from dpexp.loading import fetch_here
from dpexp.schedule import Schedule

CASES = ((4096, 512, 128, 2000), (4096, 512, 30, 4000), (50_000, 3072, 256, 400))


def dpexps(columns: tuple[torch.Tensor, torch.Tensor], batch: int, steps: int) -> float:
    """Microseconds per batch as a run reads them."""
    schedule = Schedule(len(columns[0]), batch, None, steps, True, True, 0)
    batches = fetch_here(Rows(*columns), schedule, lambda rows: rows)
    next(batches)
    began_s = time.perf_counter()
    while next(batches, None) is not None:  # as in a run, a batch is gone before the next comes
        pass
    return (time.perf_counter() - began_s) / (steps - 1) * 1e6


def bare(columns: tuple[torch.Tensor, torch.Tensor], batch: int, steps: int) -> float:
    """Microseconds per batch of the loop one writes by hand."""
    inputs, targets = columns
    rows, done = len(inputs), 0
    began_s = time.perf_counter()
    while done < steps:
        order = torch.randperm(rows)
        for start in range(0, rows - batch + 1, batch):
            chosen = order[start : start + batch]
            x, y = inputs.index_select(0, chosen), targets.index_select(0, chosen)
            del x, y
            done += 1
            if done == steps:
                break
    return (time.perf_counter() - began_s) / steps * 1e6


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    count = rounds(9)
    pairs = []
    for rows, features, batch, steps in CASES:
        columns = torch.randn(rows, features), torch.randn(rows, 10)
        ours, reference = alternate(
            count,
            lambda c=columns, b=batch, s=steps: dpexps(c, b, s),  # type: ignore[misc]
            lambda c=columns, b=batch, s=steps: bare(c, b, s),  # type: ignore[misc]
        )
        name = f"read {batch} of {rows:,} rows x {features}"
        pairs.append(Pair(name, "us/batch", ours, reference, 1.15))
    show(pairs)


if __name__ == "__main__":
    main()
