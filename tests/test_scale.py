"""Growth with the number of ranks is bounded: told by calls, bytes and files, never by time."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from builders import make_shape

from benchmarks.scale_page import PAGE, Growth
from benchmarks.scale_ranks import (
    RANKS_PER_HOST,
    STEPS,
    CountingComm,
    Rank,
    fake_group,
    plan_of,
    results_of,
)
from benchmarks.scale_report import writers
from dpexp.comm import CLOCK_ROUNDS, TorchComm
from dpexp.results import assemble
from dpexp.sinks import step_table
from dpexp.sinks.tensorboard import shapes_table
from dpexp.stragglers import LEGS
from dpexp.wire import pack

SIZES = (64, 256, 1024)


@contextmanager
def flushed(rank: int, ranks: int) -> Iterator[tuple[Rank, CountingComm]]:
    """A rank after 100 steps; what it exchanged before, after the first one, is not counted."""
    with fake_group(rank, ranks):
        comm = CountingComm(rank, ranks)
        own = Rank(plan_of(ranks), comm)
        own.make_steps(1)
        own.recorder.flush()
        comm.calls.clear()
        comm.sent_bytes = comm.received_bytes = 0
        own.make_steps()
        own.recorder.flush()
        yield own, comm


def test_a_flush_costs_a_rank_as_many_calls_and_bytes_whatever_the_number_of_ranks() -> None:
    costs = []
    for ranks in SIZES:
        with flushed(1, ranks) as (_, comm):
            costs.append((dict(comm.calls), comm.sent_bytes, comm.received_bytes))
    assert costs[0] == costs[1] == costs[2]
    assert costs[0][1] < 20_000  # of 100 steps with 10 collectives each


def test_rank_0_gets_a_number_per_step_of_each_other_rank_and_what_it_spent_on_each_leg() -> None:
    got = []
    for ranks in SIZES:
        with flushed(0, ranks) as (own, comm):
            got.append(comm.received_bytes)
            summary = own.recorder.comm_summary()
            assert summary is not None
            assert summary["stragglers"]["rank"] == ranks - 1
    more = 8 * (STEPS + len(LEGS))
    assert got[1] - got[0] == (SIZES[1] - SIZES[0]) * more
    assert got[2] - got[1] == (SIZES[2] - SIZES[1]) * more


def test_what_a_rank_sends_to_rank_0_at_the_end_does_not_grow() -> None:
    sizes = []
    for ranks in SIZES[1:]:
        with flushed(1, ranks) as (own, _):
            sizes.append(len(pack(own.result())))
    assert abs(sizes[1] - sizes[0]) < 100


def test_rank_0s_own_result_is_not_what_the_others_are_padded_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peer, handed = pack("brief"), []

    def gather(sent: torch.Tensor, received: list[torch.Tensor], **_: Any) -> None:
        handed.append(sent.numel())
        row = len(peer).to_bytes(8, "little") + peer
        for each in received:
            each.copy_(torch.frombuffer(bytearray(row), dtype=torch.uint8))

    with fake_group(0, 64), monkeypatch.context() as patch:
        comm = TorchComm(0, 64)
        patch.setattr(dist, "gather", gather)
        # The longest of the others; rank 0 itself says 0.
        patch.setattr(comm, "highest", lambda own: torch.clamp(own, min=len(peer)))
        gathered = comm.gather("long" * 1000)
    assert gathered == ["long" * 1000, *["brief"] * 63]
    assert handed == [8 + len(peer)]


@pytest.mark.parametrize(("ranks", "hosts"), [(64, 8), (1024, 128)])
def test_one_rank_of_each_other_host_is_asked_for_its_clock(
    monkeypatch: pytest.MonkeyPatch, ranks: int, hosts: int
) -> None:
    asked: list[int] = []

    def all_gather(received: list[torch.Tensor], _own: torch.Tensor, **_: Any) -> None:
        for rank, key in enumerate(received):
            key.fill_(1000 - rank // RANKS_PER_HOST)

    def question(peer: int) -> tuple[float, float, float]:
        asked.append(peer)
        return 0.0, 0.0, 0.0

    with fake_group(0, ranks), monkeypatch.context() as patch:
        patch.setattr(dist, "all_gather", all_gather)
        patch.setattr("dpexp.comm.clock_key", lambda: 1000)
        comm = TorchComm(0, ranks)
        patch.setattr(comm, "_question", question)
        comm.clock()
    assert sorted(set(asked)) == [RANKS_PER_HOST * host for host in range(1, hosts)]
    assert len(asked) == CLOCK_ROUNDS * (hosts - 1)


def test_the_result_grows_as_the_ranks_do_and_the_timeline_not_at_all(tmp_path: Path) -> None:
    sizes: dict[str, list[int]] = {"run.json": [], "timeline.json": [], "shapes.csv": []}
    for ranks in SIZES[1:]:
        with flushed(0, ranks) as (own, _):
            first = own.result()
        assert first.comm is not None
        short = replace(first, comm={**first.comm, "timeline": []})  # as brought.py leaves it
        gathered = [first, *results_of(first, 64), *list(results_of(short, ranks))[63:]]
        result = assemble(plan_of(ranks), {"cores": 4}, gathered)
        for name, write in writers(gathered, result, tmp_path).items():
            write()
            sizes[name].append((tmp_path / name).stat().st_size)
    growth = {name: large / small for name, (small, large) in sizes.items()}
    assert 3.5 < growth["run.json"] < 4.2
    assert 3.5 < growth["shapes.csv"] < 4.4  # a rank's number has more digits
    assert growth["timeline.json"] == pytest.approx(1, abs=0.01)


def test_1024_ranks_on_128_hosts_make_128_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(1024)
    told = {"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    with monkeypatch.context() as patch:
        for name, value in {**told, "LOCAL_RANK": "0", "WORLD_SIZE": "1024"}.items():
            patch.setenv(name, value)
        for rank in range(1024):
            patch.setenv("RANK", str(rank))
            patch.setenv("GROUP_RANK", str(rank // RANKS_PER_HOST))
            step_table(tmp_path, plan, rank).close()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"steps.host{host}.csv" for host in range(128)}


def test_of_very_many_shapes_tensorboards_table_has_the_first_ones() -> None:
    few, many = ([make_shape(replica=rank) for rank in range(n)] for n in (1000, 1003))
    assert len(shapes_table(few).splitlines()) == 2 + 1000
    lines = shapes_table(many).splitlines()
    assert lines[:-2] == shapes_table(few).splitlines()
    assert lines[-2:] == ["", "3 more are in shapes.csv"]


def test_a_plan_says_no_more_for_more_ranks() -> None:
    sizes = [len(pickle.dumps(plan_of(ranks))) for ranks in SIZES]
    assert max(sizes) - min(sizes) < 50


@pytest.mark.parametrize(
    ("values", "exponent", "bounded"),
    [((3, 3, 3), 0, True), ((64, 256, 1024), 1, True), ((1, 16, 256), 2, False)],
)
def test_the_exponent_is_the_slope_of_the_logarithms(
    values: tuple[float, float, float], exponent: float, bounded: bool
) -> None:
    growth = Growth("x", "rank 0", "KB", SIZES, values)
    assert growth.exponent == pytest.approx(exponent)
    assert growth.is_bounded is bounded


def test_the_page_has_nothing_that_grows_faster_than_it_may() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.count("| met |") > 30
    assert "MISSED" not in text
