"""One rank of very many, alone in this process: what it hands over is counted, and what the others
would bring is made up. No network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from dpexp import compose
from dpexp.clocks import ClockOffset
from dpexp.comm import Comm, TorchComm
from dpexp.comm_recorder import CommRecorder
from dpexp.config import load
from dpexp.parallel.collectives import Collective
from dpexp.plan import HardwareFacts, RunPlan, make_plan
from dpexp.recorder import Recorder
from dpexp.records import RankResult, ShapeRecord, StepRecord
from dpexp.rows import Row
from dpexp.sinks import Sink
from dpexp.timing import HostClock
from dpexp.wire import pack, unpack_all

RANKS_PER_HOST = 8
ROWS_PER_DEVICE = 32
STEPS = 100  # of a flush
BUCKETS = 10  # collectives of a step
LAYERS = 12  # modules in shapes.csv
STEP_NS = 5_000_000
LATE_S = 0.001  # how much later the slowest rank comes
# Begin, then the ends of data, transfer, forward, backward, optimizer and other.
MARKS = tuple(int(share * STEP_NS) for share in (0, 0.05, 0.06, 0.35, 0.9, 0.97, 1))


@contextmanager
def fake_group(rank: int, ranks: int) -> Iterator[None]:
    """torch's fake process group of so many ranks: collectives return at once."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@final
class CountingComm(Comm):
    """dpexp's communicator over a fake group. It counts calls and bytes.

    The fake group brings nothing, so on rank 0 the others' values are made up here: they are this
    rank's own, and the last rank is late.

    Args:
        peers: results of the other ranks, packed: what they would bring to :meth:`gather`.
    """

    def __init__(self, rank: int, ranks: int, peers: Sequence[bytes] = ()) -> None:
        self.rank, self.world_size = rank, ranks
        self._inner, self._peers = TorchComm(rank, ranks), peers
        self.calls: Counter[str] = Counter()
        self.sent_bytes = 0
        self.received_bytes = 0

    def gather(self, value: Any) -> list[Any] | None:
        self.calls["gather"] += 1
        packed = pack(value)
        if self.rank:
            self.sent_bytes += len(packed)
            return None
        longest = max(map(len, self._peers), default=0)  # the others are padded to it
        self._inner.collect(torch.zeros(longest, dtype=torch.uint8))  # takes the memory
        self.received_bytes += len(self._peers) * longest
        return [value, *unpack_all(self._peers, packed)]

    def collect(self, values: torch.Tensor) -> torch.Tensor | None:
        self.calls["collect"] += 1
        received = self._inner.collect(values)
        self.sent_bytes += values.nbytes if self.rank else 0
        if received is not None:
            self.received_bytes += received.nbytes - values.nbytes
            received[:] = values
            received[-1] += LATE_S
        return received

    def highest(self, values: torch.Tensor) -> torch.Tensor:
        self._reduced("highest", values.nbytes)
        return self._inner.highest(values)

    def clock(self) -> ClockOffset:
        self.calls["clock"] += 1
        return self._inner.clock()

    def sum_later(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        self._reduced("sum", values.nbytes)
        return self._inner.sum_later(values)

    def max(self, value: float) -> float:
        self._reduced("max", 8)
        return self._inner.max(value)

    def extent(self, values: Sequence[float]) -> tuple[list[float], list[float]]:
        self._reduced("extent", 16 * len(values))
        return self._inner.extent(values)

    def spread(self, tensors: Iterable[torch.Tensor]) -> None:
        self._inner.spread(tensors)

    def aside(self, timeout_s: float) -> dist.ProcessGroup | None:
        return None

    def close(self) -> None:
        return None

    def _reduced(self, kind: str, num_bytes: int) -> None:
        self.calls[kind] += 1
        self.sent_bytes += num_bytes
        self.received_bytes += num_bytes


def plan_of(ranks: int) -> RunPlan:
    """A run of ddp on so many devices, as on a cluster: the machine's own cores do not matter."""
    typed = [
        "parallel=ddp", f"num_devices={ranks}", "task=train", "scaling=weak", "device=cpu",
        f"batch_size={ROWS_PER_DEVICE}", "dataset.rows=1048576", "epochs=null", "steps=1000",
    ]  # fmt: skip
    return make_plan(load(compose.composed(typed)), facts_for(ranks))


def facts_for(ranks: int) -> HardwareFacts:
    """A core for each rank."""
    return HardwareFacts(cores=ranks, accelerator=None, num_accelerators=0)


@final
class Kept(Sink):
    """Keeps the records of the last flush."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def write(self, records: Sequence[StepRecord]) -> None:
        self.records = list(records)

    def close(self) -> None:
        return None


@final
class Rank:
    """What records a rank's steps, and steps that nobody made."""

    def __init__(self, plan: RunPlan, comm: CountingComm, sinks: Sequence[Sink] = ()) -> None:
        self.plan, self.comm = plan, comm
        clock = HostClock()
        self.collectives = CommRecorder(comm, clock)
        self.recorder = Recorder(plan, comm, clock, sinks, 1.0, self.collectives)
        self._next = plan.config.warmup_steps

    def make_steps(self, count: int = STEPS) -> None:
        """Leave the rows of so many steps with the recorder."""
        for step in range(self._next, self._next + count):
            self.recorder.add(made_up(step, self.plan))
        self._next += count

    def result(self) -> RankResult:
        """What this rank has to say when its steps are done."""
        rank, recorder = self.comm.rank, self.recorder
        return RankResult(
            rank=rank,
            steps=recorder.steps,
            measured_steps=recorder.measured_steps,
            rows_seen=recorder.rows_seen,
            measured_global_rows=recorder.measured_global_rows,
            wall_s=recorder.wall_s,
            recording_s=recorder.recording_s,
            timing=recorder.timing(),
            peak_bytes=2**30,
            peak_device_bytes={f"cuda:{rank % RANKS_PER_HOST}": 2**30},
            losses=(1.0, 0.5),
            threads=1,
            device=f"cuda:{rank % RANKS_PER_HOST}",
            pid=1000 + rank,
            shapes=tuple(
                ShapeRecord(f"layer{n}", rank, "[32, 64]", "[32, 64]", STEPS, 0, STEPS - 1)
                for n in range(LAYERS)
            ),
            notes=(),
            model={"parameters": 10**6},
            comm=recorder.comm_summary(),
        )


def made_up(step: int, plan: RunPlan) -> Row:
    """A step of 5 ms with ten buckets, of which half travel while backward goes on."""
    begin = step * STEP_NS
    buckets = tuple(
        Collective(
            "all_reduce", 2**20, 2.0**21, True,
            begin + int(STEP_NS * (0.4 + 0.05 * n)), begin + int(STEP_NS * (0.43 + 0.05 * n)),
        )
        for n in range(BUCKETS)
    )  # fmt: skip
    marks = [begin + mark for mark in MARKS]
    rows, loss = ROWS_PER_DEVICE, torch.tensor(1.0)
    return Row(step, 0, plan.batch_rows, rows, marks, (), loss, 0.1, 2**30, buckets)


def results_of(own: RankResult, ranks: int) -> Iterator[RankResult]:
    """The results of all ranks but the first, made of one's."""
    for rank in range(1, ranks):
        device = f"cuda:{rank % RANKS_PER_HOST}"
        yield replace(
            own,
            rank=rank,
            pid=1000 + rank,
            wall_s=own.wall_s * (1 + rank / 1e6),
            device=device,
            peak_device_bytes={device: 2**30},
            shapes=tuple(replace(each, replica=rank) for each in own.shapes),
        )


def tables_of(ranks: int, by_host: bool) -> int:
    """How many tables of steps a run of so many ranks makes."""
    return -(-ranks // RANKS_PER_HOST) if by_host else ranks


def event_file(folder: Path) -> Path:
    """The only one in a folder."""
    (found,) = folder.glob("events.out.tfevents.*")
    return found
