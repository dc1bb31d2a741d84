"""FLOPs of a step, the share of the machine's peak that they reach (MFU), and memory by part.

All of it is found after the last step: nothing here is in a step's time.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, final

import torch

from dpexp.comm import Comm
from dpexp.device import is_out_of_memory
from dpexp.plan import RunPlan
from dpexp.records import RankResult
from dpexp.schema import Precision, StrategyName
from dpexp.timing import Clock, make_clock

if TYPE_CHECKING:
    from dpexp.anatomy import Anatomy

# A product that takes less is mostly overhead; sizes double until one takes as long.
LONG_ENOUGH_S = 0.005
FIRST_SIZE, CPU_MOST, ACCELERATOR_MOST = 256, 2048, 8192
MEASURED_S = 0.1  # on every device, all at the same time
FEWEST = 3
_DTYPES = {Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}


def product_flops(size: int) -> int:
    """FLOPs of a product of two square matrices: a multiplication and an addition per term."""
    return 2 * size**3


def achieved_flops_per_s(
    flops_per_step: float, rows_per_step: int, rows: int, wall_s: float, devices: int
) -> float:
    """FLOP/s of the model that each device did over the measured steps.

    ``flops_per_step * (rows / rows_per_step) / (wall_s * devices)``: a step with fewer rows counts
    as the share of a full one.

    Args:
        rows_per_step: of the step that `flops_per_step` was counted for.
        rows: of all measured steps, over all devices.
        wall_s: of all measured steps, of the slowest rank.
    """
    return flops_per_step * rows / rows_per_step / (wall_s * devices)


def mfu(achieved: float, peak: float) -> float:
    """The share of a device's peak FLOP/s that the model's own FLOPs reach.

    Source: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B.
    What is computed a second time for activation checkpointing counts here too, unlike there.
    """
    return achieved / peak


def compute_of(plan: RunPlan, comm: Comm, done: RankResult, before_bytes: int) -> Any:
    """``compute`` of ``run.json``, on rank 0; None elsewhere. All ranks meet.

    Args:
        done: this rank's result.
        before_bytes: peak resident memory before dataset and model were built.
    """
    wall_s = comm.max(done.wall_s)
    given = plan.config.measure.peak_flops_per_device
    peak, why = (given, "") if given is not None else measured_peak(plan, comm)
    if comm.rank:
        return None
    source = "given" if given is not None else "measured"
    if plan.emulated and given is None:
        source = "measured with all threads of the process, divided by the emulated devices"
    anatomy, problem = anatomy_of(plan)
    work = flops_facts(anatomy, problem)
    rates = rate_facts(
        work,
        rows_per_step=None if anatomy is None else anatomy.first.rows,
        rows=done.measured_global_rows,
        wall_s=wall_s,
        devices=plan.num_devices,
        peak=(peak, why),
    )
    memory = memory_facts(anatomy, problem, done, before_bytes)
    return {**work, **rates, "peak_source": source, "memory_parts": memory}


def anatomy_of(plan: RunPlan) -> tuple[Anatomy | None, str]:
    """What follows from the plan without running it, or None and why not.

    Seeds torch, numpy and random, builds the dataset once more and reads the rows of two batches.
    """
    # Here, since only a run that counts needs torch's counter and its fake tensors.
    from dpexp.anatomy import dissect

    try:
        return dissect(plan), ""
    except Exception as error:  # noqa: BLE001  # the user's code may raise anything
        return None, f"{type(error).__name__}: {error}"


def flops_facts(anatomy: Anatomy | None, problem: str) -> dict[str, Any]:
    """The FLOPs of a full step over all devices; None with a reason where they are not known."""
    if anatomy is None:
        return {"flops_per_step": None, "flops_reason": problem, "flops_at_least": False}
    figure = anatomy.step_flops
    value, reason = figure.value, figure.note
    if not value:  # torch counts matrix products only: what has none is not known to be free
        value, reason = None, reason or "nothing in it that torch's counter counts"
    return {"flops_per_step": value, "flops_reason": reason, "flops_at_least": figure.at_least}


def rate_facts(
    work: dict[str, Any],
    *,
    rows_per_step: int | None,
    rows: int,
    wall_s: float,
    devices: int,
    peak: tuple[float | None, str],
) -> dict[str, Any]:
    """FLOP/s per device and the MFU, with the reasons why one is not known.

    Args:
        work: as of :func:`flops_facts`.
        peak: FLOP/s of a device, or None and why not.
    """
    flops, achieved, reason = work["flops_per_step"], None, ""
    if flops is None or not rows_per_step:
        reason = f"the FLOPs of a step are not known: {work['flops_reason']}"
    elif wall_s <= 0 or not rows:
        reason = "no step was measured"
    else:
        achieved = achieved_flops_per_s(flops, rows_per_step, rows, wall_s, devices)
    share = None
    if achieved is not None and peak[0] is not None:
        share = mfu(achieved, peak[0])
        reason = "at least: some FLOPs are not counted" if work["flops_at_least"] else ""
    elif achieved is not None:
        reason = f"the peak is not known: {peak[1]}"
    return {
        "achieved_flops_per_s_per_device": achieved,
        "peak_flops_per_s_per_device": peak[0],
        "mfu": share,
        "mfu_reason": reason,
    }


def memory_facts(
    anatomy: Anatomy | None, problem: str, done: RankResult, before_bytes: int
) -> dict[str, Any]:
    """Bytes by part as computed, beside what was measured in rank 0's process."""
    computed = None
    if anatomy is not None:
        computed = [
            {
                "where": memory.where,
                "parts": {name: asdict(figure) for name, figure in memory.parts.items()},
                "total": asdict(memory.total),
            }
            for memory in anatomy.memory
        ]
    return {
        "computed": computed,
        "computed_reason": problem,
        "measured": {
            "peak_bytes": done.peak_bytes,
            "peak_bytes_before_building": before_bytes,
            "peak_bytes_scope": "resident memory of rank 0's process; before building: with "
            "Python and torch loaded, without dataset and model",
            "peak_device_bytes": done.peak_device_bytes or None,
        },
    }


def measured_peak(plan: RunPlan, comm: Comm) -> tuple[float | None, str]:
    """FLOP/s of a matrix product on a device, mean over devices, or None and why not.

    All devices multiply at the same time, each for :data:`MEASURED_S`; of each the fastest product
    counts. All ranks meet, several times.

    Returns:
        The figure is the same on every rank; the reason is that of this one.
    """
    dtype = _DTYPES.get(plan.config.precision, torch.float32)
    problem, products = "", None
    try:
        products = [_Product(device, dtype) for device in devices_of(plan, comm.rank)]
        size = size_for(products[0], CPU_MOST if plan.device_type == "cpu" else ACCELERATOR_MOST)
        for product in products:
            product.prepare(size)
    except (RuntimeError, MemoryError) as error:
        memory = is_out_of_memory(error)
        problem = "there was no memory for it" if memory else str(error).partition("\n")[0]
    comm.max(0.0)  # all begin together
    own = 0.0
    if products is not None and not problem:
        own = _fastest_together(products)
        if plan.emulated:  # the virtual devices share what was measured
            own /= plan.num_devices
    failed = comm.max(float(bool(problem)))
    total = comm.sum(torch.tensor([own], dtype=torch.float64)).item()
    if failed:
        return None, problem or "it failed on another rank"
    return total / comm.world_size, ""


def devices_of(plan: RunPlan, rank: int) -> list[torch.device]:
    """The real devices of a rank: under dp all of them, of virtual ones the CPU once."""
    if plan.strategy is StrategyName.dp and not plan.emulated:
        first = plan.first_index
        count = plan.num_devices
        return [torch.device(f"{plan.device_type}:{first + i}") for i in range(count)]
    return [torch.device(plan.device_of(rank))]


def size_for(product: _Product, most: int) -> int:
    """The matrix size from which on a product takes long enough to be timed, at most `most`."""
    size = FIRST_SIZE
    while size < most:
        product.prepare(size)
        product.run(1)  # the first one loads kernels
        if product.run(1)[0] >= LONG_ENOUGH_S:
            break
        size *= 2
    return size


def _fastest_together(products: list[_Product]) -> float:
    """FLOP/s of each device's fastest product, mean over this process's devices."""
    once_s = max(product.run(1)[0] for product in products)
    count = max(FEWEST, math.ceil(MEASURED_S / max(once_s, 1e-6)))
    for product in products:
        product.start(count)
    rates = [product_flops(product.size) / min(product.finish()) for product in products]
    return sum(rates) / len(rates)


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
