"""The peak of a device, measured: the fastest of many matrix products in the run's format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch

from dpexp.comm import Comm
from dpexp.device import is_out_of_memory
from dpexp.plan import RunPlan
from dpexp.schema import Precision, StrategyName
from dpexp.sensors import own_cpus
from dpexp.texts import first_line
from dpexp.timing import Clock, make_clock

# Several, since the fastest size differs: on a busy CPU a small product fits between two
# interruptions, on a GPU only a large one fills it.
CPU_SIZES, ACCELERATOR_SIZES = (256, 512, 1024), (1024, 2048, 4096, 8192)
MEASURED_S = 0.06  # with each size, on every device, all at the same time
FEWEST = 3
_DTYPES = {Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}


def product_flops(size: int) -> int:
    """FLOPs of a product of two square matrices: a multiplication and an addition per term."""
    return 2 * size**3


def measured_peak(plan: RunPlan, comm: Comm) -> tuple[float | None, str]:
    """FLOP/s of a matrix product on a device, mean over devices, or None and why not.

    All devices multiply at the same time; of each the fastest product counts. All ranks meet,
    several times.

    Returns:
        The figure is the same on every rank; the reason is that of this one.
    """
    dtype = _DTYPES.get(plan.config.precision, torch.float32)
    sizes = CPU_SIZES if plan.device_type == "cpu" else ACCELERATOR_SIZES
    products = [_Product(device, dtype) for device in devices_of(plan, comm.rank)]
    comm.max(0.0)  # all begin together
    own, problem = 0.0, ""
    try:
        own = fastest(products, sizes) * share_of(plan, len(plan.cpus() or own_cpus()))
    except (RuntimeError, MemoryError) as error:
        memory = is_out_of_memory(error)
        problem = "there was no memory for it" if memory else first_line(error)
    failed = comm.max(float(bool(problem)))
    total = comm.sum(torch.tensor([own], dtype=torch.float64)).item()
    if failed:
        return None, problem or "it failed on another rank"
    return total / comm.world_size, ""


def peak_note(plan: RunPlan) -> str:
    """How a peak was measured, where a reader may expect something else."""
    told = []
    if plan.emulated:
        told.append("all threads of the process, divided by the emulated devices")
    if plan.device_type == "cpu":
        threads = plan.threads_per_process * plan.processes_here
        if threads > (len(plan.cpus() or own_cpus()) or threads):
            told.append(f"the share of a core that each of {threads} threads can have")
    return "; ".join(told)


def share_of(plan: RunPlan, cores: int) -> float:
    """The part of what a process's fastest product shows that one device can have all the time.

    A CPU's virtual devices share the process; processes with more threads than there are cores
    take turns, and the fastest product is one that had its turn.

    Args:
        cores: that the processes may use; 0 = not known.
    """
    if plan.device_type != "cpu":
        return 1.0
    threads = plan.threads_per_process * plan.processes_here
    turns = min(1.0, cores / threads) if cores else 1.0
    return turns / plan.num_devices if plan.emulated else turns


def devices_of(plan: RunPlan, rank: int) -> list[torch.device]:
    """The real devices of a rank: under dp all of them, of virtual ones the CPU once."""
    if plan.strategy is StrategyName.dp and not plan.emulated:
        first = plan.first_index
        count = plan.num_devices
        return [torch.device(f"{plan.device_type}:{first + i}") for i in range(count)]
    return [torch.device(plan.device_of(rank))]


def fastest(products: list[_Product], sizes: Sequence[int]) -> float:
    """FLOP/s of each device's fastest product, mean over this process's devices."""
    best = [0.0] * len(products)
    for size in sizes:
        for product in products:
            product.prepare(size)
            product.run(1)  # loads kernels
        once_s = max(min(product.run(FEWEST)) for product in products)
        count = max(FEWEST, math.ceil(MEASURED_S / max(once_s, 1e-6)))
        for product in products:
            product.start(count)
        for place, product in enumerate(products):
            best[place] = max(best[place], product_flops(size) / min(product.finish()))
        if once_s > MEASURED_S:
            break  # eight times as long with the next size
    return sum(best) / len(best)


@final
@dataclass
class _Product:
    """Square matrix products on one device."""

    device: torch.device
    dtype: torch.dtype
    size: int = 0

    def prepare(self, size: int) -> None:
        """Make the matrices. Numbers between -1 and 1: of zeros a GPU multiplies faster."""
        self.size = size
        shape = (3, size, size)
        made = torch.rand(shape, dtype=torch.float32, device=self.device).mul_(2).sub_(1)
        self._a, self._b, self._out = made.to(self.dtype).unbind()
        self._clock: Clock[Any] = make_clock(self.device)

    def run(self, count: int) -> list[float]:
        """Seconds of each of `count` products."""
        self.start(count)
        return self.finish()

    def start(self, count: int) -> None:
        """Multiply `count` times; an accelerator goes on by itself."""
        with torch.no_grad(), _current(self.device):
            marks = [self._clock.mark()]
            for _ in range(count):
                torch.mm(self._a, self._b, out=self._out)
                marks.append(self._clock.mark())
        self._marks = marks

    def finish(self) -> list[float]:
        """Wait for what :meth:`start` began. Seconds of each product."""
        with _current(self.device):
            self._clock.settle()
            spans: list[float] = self._clock.spans([self._marks])[0].tolist()
        return spans


def _current(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
