"""One interface for "all ranks", whether there is one process or many.

Nothing outside this file asks whether torch.distributed is initialised.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from dpexp import env
from dpexp.clocks import ClockOffset, clock_key, closest
from dpexp.errors import ConfigError
from dpexp.plan import RunPlan
from dpexp.timing import host_s
from dpexp.wire import pack, unpack_all

CLOCK_ROUNDS = 16
_BYTE = torch.uint8
_LENGTH_BYTES = 8


def connect(plan: RunPlan, rank: int, store: Store | None = None) -> Comm:
    """The communicator of this rank.

    Args:
        store: where the ranks find each other; None = the one that the environment names.

    Raises:
        ConfigError: the network interface that the environment names is not there.
    """
    if plan.backend is None:
        return LocalComm()
    interface = env.socket_interface()
    try:
        dist.init_process_group(
            plan.backend,
            init_method="env://" if store is None else None,
            store=store,
            rank=rank,
            world_size=plan.num_processes,
            timeout=timedelta(seconds=plan.config.parallel.timeout_s),
        )
    except RuntimeError as error:
        if interface is not None and interface in str(error):
            raise ConfigError(
                "GLOO_SOCKET_IFNAME",
                interface,
                "the environment variable names a network interface that is not there",
                fix="unset GLOO_SOCKET_IFNAME",
            ) from error
        raise
    return TorchComm(rank, plan.num_processes)


class Comm(ABC):
    """All ranks of a run, seen from one of them."""

    rank: int
    world_size: int

    @abstractmethod
    def gather(self, value: Any) -> list[Any] | None:
        """Every rank's `value`, in rank order, on rank 0; None elsewhere. Waits for all."""

    @abstractmethod
    def collect(self, values: torch.Tensor) -> torch.Tensor | None:
        """Every rank's CPU tensor of one shape, on rank 0: [ranks, ...]. Waits for all."""

    @abstractmethod
    def highest(self, values: torch.Tensor) -> torch.Tensor:
        """The element-wise largest over ranks of a CPU tensor, on every rank. Waits for all."""

    @abstractmethod
    def clock(self) -> ClockOffset:
        """How this rank's clock (timing.host_s) differs from rank 0's. Waits for all."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The element-wise sum over ranks of a CPU tensor, on every rank. Waits for all."""
        return self.sum_later(values)()

    @abstractmethod
    def sum_later(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin :meth:`sum`; what is returned waits for all and gives it.

        Other exchanges may come in between: then the ranks wait for each other once and not twice.
        """

    @abstractmethod
    def max(self, value: float) -> float:
        """The largest of all ranks' values, on every rank. Waits for all."""

    @abstractmethod
    def extent(self, values: Sequence[float]) -> tuple[list[float], list[float]]:
        """The smallest and the largest of each value over ranks, on every rank. Waits for all."""

    @abstractmethod
    def spread(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite the tensors with rank 0's. Waits for all."""

    @abstractmethod
    def aside(self, timeout_s: float) -> dist.ProcessGroup | None:
        """Another group of all ranks for a thread of its own; None of one process. All call it.

        Args:
            timeout_s: how long a rank waits there for the others.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave. No collective may follow, and no DDP object may be alive (see worker.py)."""


@final
class LocalComm(Comm):
    """One process: nothing to exchange."""

    def __init__(self) -> None:
        self.rank = 0
        self.world_size = 1

    def gather(self, value: Any) -> list[Any] | None:
        return [value]

    def collect(self, values: torch.Tensor) -> torch.Tensor | None:
        return values.unsqueeze(0)

    def highest(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def clock(self) -> ClockOffset:
        return ClockOffset(0.0, 0.0)

    def sum_later(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: values

    def max(self, value: float) -> float:
        return value

    def extent(self, values: Sequence[float]) -> tuple[list[float], list[float]]:
        return list(values), list(values)

    def spread(self, tensors: Iterable[torch.Tensor]) -> None:
        return None

    def aside(self, timeout_s: float) -> dist.ProcessGroup | None:
        return None

    def close(self) -> None:
        return None


@final
class TorchComm(Comm):
    """torch.distributed's default process group."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        # Records travel between hosts: NCCL, which only moves device tensors, cannot carry them.
        self._group: Any = (
            dist.new_group(backend="gloo") if dist.get_backend() == "nccl" else dist.group.WORLD
        )

    def gather(self, value: Any) -> list[Any] | None:
        # Not torch's gather_object, which unpickles whatever comes. All that a rank sends is as
        # long as the longest; rank 0's own, which knows of all ranks, is that, and it is here.
        packed = pack(value)
        sent = b"" if self.rank == 0 else packed
        longest = int(self.highest(torch.tensor([len(sent)])).item())
        row = len(sent).to_bytes(_LENGTH_BYTES, "little") + sent
        padded = torch.frombuffer(bytearray(row.ljust(_LENGTH_BYTES + longest, b"\0")), dtype=_BYTE)
        received = self.collect(padded)
        if received is None:
            return None
        rows = (each.numpy().tobytes() for each in received[1:])
        parts = ((row[:_LENGTH_BYTES], row[_LENGTH_BYTES:]) for row in rows)
        said = (rest[: int.from_bytes(length, "little")] for length, rest in parts)
        return [value, *unpack_all(said, packed)]

    def collect(self, values: torch.Tensor) -> torch.Tensor | None:
        received = None
        if self.rank == 0:
            received = values.new_empty((self.world_size, *values.shape))
        each = None if received is None else list(received.unbind())
        dist.gather(values, each, dst=0, group=self._group)
        return received

    def highest(self, values: torch.Tensor) -> torch.Tensor:
        self._begin(values, dist.ReduceOp.MAX).wait()
        return values

    def clock(self) -> ClockOffset:
        host = self._host_number()
        if host is None:
            return ClockOffset(0.0, 0.0)  # one kernel, one clock
        own, first_ranks = host
        offsets = torch.zeros((len(first_ranks), 2), dtype=torch.float64)
        for index, peer in enumerate(first_ranks[1:], start=1):
            if self.rank == 0:
                found = closest([self._question(peer) for _ in range(CLOCK_ROUNDS)])
                offsets[index] = torch.tensor(found, dtype=torch.float64)
            elif self.rank == peer:
                for _ in range(CLOCK_ROUNDS):
                    self._answer()
        dist.broadcast(offsets, 0, group=self._group)
        return ClockOffset(*offsets[own].tolist())

    def _host_number(self) -> tuple[int, list[int]] | None:
        """Which of the hosts this rank is on, and the first rank of each; None for one host.

        A host is what has one clock. Of each one rank is asked: the others have the same clock.
        """
        own = torch.tensor(clock_key(), dtype=torch.int64)
        keys = own.new_empty(self.world_size)
        dist.all_gather(list(keys.unbind()), own, group=self._group)
        first_ranks: dict[int, int] = {}
        for rank, key in enumerate(keys.tolist()):
            first_ranks.setdefault(key, rank)
        if len(first_ranks) == 1:
            return None
        return list(first_ranks).index(int(own.item())), list(first_ranks.values())

    def _question(self, peer: int) -> tuple[float, float, float]:
        """Ask a peer for its clock: when asked, what it says, when the answer came."""
        answer = torch.zeros(1, dtype=torch.float64)
        asked_s = host_s()
        dist.send(answer, peer, group=self._group)
        dist.recv(answer, peer, group=self._group)
        return asked_s, answer.item(), host_s()

    def _answer(self) -> None:
        answer = torch.zeros(1, dtype=torch.float64)
        dist.recv(answer, 0, group=self._group)
        answer[0] = host_s()
        dist.send(answer, 0, group=self._group)

    def sum_later(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        work = self._begin(values, dist.ReduceOp.SUM)

        def total() -> torch.Tensor:
            work.wait()
            return values

        return total

    def _begin(self, values: torch.Tensor, how: Any) -> dist.Work:
        """``dist.all_reduce`` without its wrappers: a flush comes between steps, with cold caches,
        and they then take most of a millisecond."""
        options = dist.distributed_c10d.AllreduceOptions()
        options.reduceOp = how
        options.asyncOp = True
        work: dist.Work = self._group.allreduce([values], options)
        return work

    def max(self, value: float) -> float:
        return self.highest(torch.tensor([value], dtype=torch.float64)).item()

    def extent(self, values: Sequence[float]) -> tuple[list[float], list[float]]:
        both = torch.tensor([*values, *(-value for value in values)], dtype=torch.float64)
        self.highest(both)
        high, low = both[: len(values)].tolist(), (-both[len(values) :]).tolist()
        return low, high

    def spread(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor, src=0)

    def aside(self, timeout_s: float) -> dist.ProcessGroup | None:
        limit = timedelta(seconds=timeout_s)
        group: dist.ProcessGroup = dist.new_group(timeout=limit, backend="gloo")
        return group

    def close(self) -> None:
        dist.destroy_process_group()
