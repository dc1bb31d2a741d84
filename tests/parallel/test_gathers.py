"""Where FSDP's collectives are marked: with stand-ins for its groups, and in real steps on gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import TickClock
from fakeevents import Event
from torch import nn
from torch.distributed.fsdp import FSDPModule

from dpexp.comm_times import Steps, times_of
from dpexp.parallel import gathers
from dpexp.parallel.collectives import Collective, CollectiveLog
from dpexp.parallel.gathers import lacking, time_collectives
from dpexp.timing import EventClock

TESTS = Path(__file__).parents[1]
# Three units of 20 numbers: two layers, and the model with the first one. Each step has two
# micro-batches, of which the first exchanges no gradients. The streams of a CPU do nothing; here
# they note which marks lie on them, and after which one FSDP lets the computing one wait.
PROGRAM = """
import json, os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from builders import TickClock
from dpexp.parallel.collectives import CollectiveLog
from dpexp.parallel.gathers import lacking, time_collectives

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
clock, waits, beside, told = TickClock(), [], [], []
computing = torch.cpu.current_stream()

def mark():
    tick = TickClock.mark(clock)
    if torch.cpu.current_stream() is not computing:
        beside.append(tick)
    return tick

def wait_event(stream, event):
    if stream is computing and type(event) is int:
        waits.append((event, clock.ticks))

clock.mark = mark
torch.cpu.Stream.record_event = lambda stream: clock.ticks  # the last mark before it
torch.cpu.Stream.wait_event = wait_event
for free in (True, False):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    units = [model[2], model[1], model]
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=free)
    log = CollectiveLog(clock, 2, blocking=False)
    lacks = lacking(units)
    time_collectives(units, log, streams=True)
    for step in range(2):
        log.noted.clear()
        waits.clear()
        beside.clear()
        begin = clock.ticks
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            model(torch.ones(2, 4)).sum().backward()
        told.append({
            "free": free, "lacks": lacks, "begin": begin, "end": clock.mark(),
            "waits": waits[:], "beside": beside[:],
            "noted": [[e.kind, e.in_backward, e.ready, e.end, e.needed] for e in log.noted],
        })
print(json.dumps(told), flush=True)
os._exit(0)  # taking gloo down at Python's end aborts now and then, and is not the matter here
"""


@pytest.mark.slow
def test_in_real_steps_a_collective_is_needed_right_where_fsdp_waits_for_it(
    tmp_path: Path,
) -> None:
    """Marks are numbered in their order. On gloo all is done when it is needed: no stall."""
    command = [sys.executable, "-c", PROGRAM]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True,
            cwd=TESTS,
        )
        for rank in range(2)
    ]  # fmt: skip
    texts = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    first, second = (json.loads(text.splitlines()[-1]) for text in texts)
    assert first == second
    assert len(first) == 4
    for step in first:
        assert step["lacks"] == []
        noted = [
            Collective(k, 80, 40.0, b, ready, end, False, n)
            for k, b, ready, end, n in step["noted"]
        ]
        gathered = [each for each in noted if each.kind == "all_gather"]
        scattered = [each for each in noted if each.kind == "reduce_scatter"]
        # In each micro-batch 3 gathers in forward, and 3 in backward if they are freed in between.
        assert [each.in_backward for each in gathered].count(False) == 6
        assert len(gathered) == (12 if step["free"] else 6)
        assert (len(scattered), all(each.in_backward for each in scattered)) == (3, True)
        # A mark for each beginning, end and need, and no other.
        assert step["end"] - step["begin"] - 1 == 3 * len(noted)
        for each in noted:
            assert step["begin"] < each.ready < each.end < each.needed < step["end"]
        # Right before its own scattering each group lets go of that of the group before.
        assert all(each.needed + 1 == following.ready for each, following in pairwise(scattered))
        # Ready and done are marked on FSDP's streams, needed on the one that computes.
        assert step["beside"] == [tick for each in noted for tick in (each.ready, each.end)]
        # The computing stream's first wait for what came after the end of each.
        first_wait = dict(reversed(step["waits"]))
        assert first_wait == {each.end: each.needed for each in noted}
        marks = [list(range(7))]
        own = Steps(
            [0], marks, TickClock().spans(marks), torch.ones(1, dtype=bool).numpy(), [noted]
        )
        times = times_of(own, len(noted), TickClock())
        assert times.awaited.all() and not times.stalls().any()


# Stand-ins for torch's groups


class Group:
    """Calls its methods as torch's FSDPParamGroup does, and writes down what it waits for."""

    def __init__(self, diary: list[str]) -> None:
        self.diary = diary
        self._all_gather_comm: Any = None
        self._reduce_scatter_comm: Any = None

    def wait_for_unshard(self) -> None:
        self.diary.append("wait for the gather")

    def reshard(self) -> None:
        self.diary.append("free")

    def finalize_backward(self) -> None:
        self.diary.append("wait for all")

    def post_backward(self) -> None:
        self.reshard()
        self.diary.append("wait for scatterings")
        self._reduce_scatter_comm(torch.empty(1), torch.empty(2))


class Unit(FSDPModule, nn.Module):
    """A module after fully_shard, with one group."""

    _orig_cls_mro_index = 0

    def __new__(cls, *_args: Any) -> Any:  # FSDPModule's own gives the class before sharding
        return object.__new__(cls)

    def __init__(self, diary: list[str], state: Any = None) -> None:
        super().__init__()
        self.group = Group(diary)
        self.state = state or SimpleNamespace(_fsdp_param_groups=[self.group])

    def _get_fsdp_state(self) -> Any:
        return self.state


@pytest.fixture
def no_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (gathers.DefaultAllGather, gathers.DefaultReduceScatter):
        monkeypatch.setattr(kind, "__call__", lambda *_args, **_kwargs: None)


@pytest.mark.usefixtures("no_transport")
def test_a_gather_is_needed_by_its_own_group_and_scatterings_by_the_next() -> None:
    clock = TickClock()
    log, diary = CollectiveLog(clock, 2, blocking=False), []
    one, two = Unit(diary), Unit(diary)
    time_collectives([one, two, nn.Linear(1, 1)], log, streams=True)
    for unit in (one, two):  # both are fetched before the first is needed
        unit.group._all_gather_comm(torch.empty(4))
    one.group.wait_for_unshard()  # 5
    one.group.wait_for_unshard()  # nothing begun: no mark
    two.group.wait_for_unshard()  # 6
    two.group.reshard()  # after forward no scattering is open: no mark
    two.group.post_backward()  # 7, 8
    one.group.post_backward()  # 9: needs the one before; 10, 11
    two.group.finalize_backward()  # 12: waits for all groups'
    one.group.finalize_backward()
    assert [(each.ready, each.end, each.needed) for each in log.noted] == [
        (1, 2, 5), (3, 4, 6), (7, 8, 9), (10, 11, 12),
    ]  # fmt: skip
    assert clock.ticks == 12
    scattering = ["free", "wait for scatterings"]
    assert diary == ["wait for the gather"] * 3 + ["free", *scattering * 2] + ["wait for all"] * 2


@pytest.mark.usefixtures("no_transport")
def test_a_gather_that_nobody_asked_for_is_waited_for_at_the_end_of_backward() -> None:
    log, unit = CollectiveLog(TickClock(), 2, blocking=False), Unit([])
    time_collectives([unit], log, streams=True)
    unit.group._all_gather_comm(torch.empty(4))
    unit.group.finalize_backward()
    assert [each.needed for each in log.noted] == [3]


@pytest.mark.usefixtures("no_transport")
def test_without_streams_the_groups_are_left_alone_and_nothing_is_kept() -> None:
    log, unit = CollectiveLog(TickClock(), 2, blocking=True), Unit([])
    before = set(vars(unit.group))
    time_collectives([unit], log, streams=False)
    assert set(vars(unit.group)) == before
    for _ in range(3):
        unit.group._all_gather_comm(torch.empty(4))
        unit.group.post_backward()
        unit.group.wait_for_unshard()
    assert {each.needed for each in log.noted} == {None}
    assert unit.group._all_gather_comm.awaited == unit.group._reduce_scatter_comm.awaited == []


@pytest.mark.usefixtures("no_transport")
def test_on_a_device_marks_are_events_and_nothing_is_waited_for(events: list[Event]) -> None:
    """Events come every 5 ms: a gather from 5 to 10, needed at 15; a scattering 20, 25, 30."""
    clock = EventClock(torch.device("meta"))
    log, unit = CollectiveLog(clock, 2, blocking=False), Unit([])
    time_collectives([unit], log, streams=True)
    unit.group._all_gather_comm(torch.empty(4))
    unit.group.wait_for_unshard()
    unit.group.post_backward()
    unit.group.finalize_backward()
    assert sum(event.synchronized for event in events) == 0
    marks = [[each.ready, each.end, each.needed] for each in log.noted]
    assert [[event.at_ms for event in row] for row in marks] == [[5, 10, 15], [20, 25, 30]]


def test_a_torch_whose_groups_are_others_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    units = [Unit([]), nn.Linear(1, 1)]
    assert lacking(units) == []
    assert lacking([*units, Unit([], SimpleNamespace())]) == ["_fsdp_param_groups"]
    monkeypatch.delattr(Group, "reshard")
    assert lacking(units) == ["reshard"]
