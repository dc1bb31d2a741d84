"""One queue for the results of all ranks of a host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic import multiprocessing as elastic

from dpexp.one_queue import one_queue

Context = elastic.MultiprocessContext


def context(ranks: int) -> Any:
    """Processes that are not started yet."""
    each: dict[int, Any] = {rank: {} for rank in range(ranks)}
    return elastic.MultiprocessContext("x", print, each, each, "spawn", elastic.DefaultLogsSpecs())


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def files_of(ranks: int) -> int:
    """How many files are open for the results of so many ranks."""
    before = open_files()
    made = context(ranks)
    count = open_files() - before
    made.close()
    return count


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_the_files_for_results_do_not_grow_with_the_number_of_ranks() -> None:
    """A fork server passes on 252 files at most to a process."""
    with one_queue():
        files_of(1)  # the first semaphore starts a process, which is a file too
        assert files_of(1) == files_of(200) <= 4
    assert elastic.MultiprocessContext is Context


def test_each_ranks_value_is_its_own_in_whatever_order_they_come() -> None:
    with one_queue():
        slots = context(3)._ret_vals
    assert [slots[rank].empty() for rank in range(3)] == [True] * 3
    slots[2].put("two")
    slots[0].put(None)
    assert [slots[rank].empty() for rank in range(3)] == [False, True, False]
    assert (slots[2].get(), slots[0].get()) == ("two", None)
    assert [slots[rank].empty() for rank in range(3)] == [True] * 3
    assert len({slot.reader for slot in slots.values()}) == 1
