"""What torch sees of the hardware, and the few operations that differ between devices."""

from __future__ import annotations

import platform
import resource
import sys
from pathlib import Path
from typing import Any

import numpy
import psutil
import torch

from dpexp import __version__, env
from dpexp.plan import HardwareFacts, RunPlan
from dpexp.sensors import own_cpus

CLEAR_REFS = Path("/proc/self/clear_refs")
NEAR_BYTES = 32 * 2**20  # resident memory is counted per core, and exact only to some MiB


def gather_facts() -> HardwareFacts:
    """The facts a plan depends on. Asks torch for accelerators without creating a context."""
    outer = env.outer_launcher()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return HardwareFacts(
        cores=env.usable_cores(),
        accelerator=accelerator.type if accelerator is not None else None,
        num_accelerators=torch.accelerator.device_count() if accelerator is not None else 0,
        requested_threads=env.requested_threads(),
        nccl=torch.distributed.is_available() and torch.distributed.is_nccl_available(),
        outer_world_size=outer.world_size if outer is not None else None,
        cpus=tuple(own_cpus()),
        outer_name="torchrun" if outer is None else outer.name,
        outer_local_size=outer.local_world_size if outer is not None else None,
        outer_first_rank=outer.rank - outer.local_rank if outer is not None else 0,
    )


def visible_devices() -> tuple[str, ...]:
    """What names each CUDA device that this process sees, in torch's order.

    CUDA itself is asked: its numbers need not be those of NVML, and CUDA_VISIBLE_DEVICES may hold
    what names no device. Names of MIG devices are those of CUDA_VISIBLE_DEVICES, since the driver
    gives some of them their whole device's UUID.

    Returns:
        UUIDs; () where the devices are not NVIDIA's. Not run on a GPU yet.
    """
    if torch.version.cuda is None:
        return ()
    listed = [name.strip() for name in (env.visible_devices() or "").split(",")]
    if any(name.startswith("MIG-") for name in listed):
        return tuple(listed[: torch.cuda.device_count()])
    uuids = [
        str(torch.cuda.get_device_properties(index).uuid)
        for index in range(torch.cuda.device_count())
    ]
    return tuple(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}" for uuid in uuids)


def describe_environment(facts: HardwareFacts) -> dict[str, Any]:
    """What a reader needs to judge or repeat a run: versions, machine, threads, variables."""
    description: dict[str, Any] = {
        "dpexp": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": facts.cores,
        "memory_bytes": psutil.virtual_memory().total,
        "accelerator": facts.accelerator,
        "num_accelerators": facts.num_accelerators,
        "variables": env.recorded(),
    }
    if facts.accelerator == "cuda":
        description["cuda"] = torch.version.cuda
        description["devices"] = [
            torch.cuda.get_device_name(index) for index in range(facts.num_accelerators)
        ]
    return description


def prepare(plan: RunPlan, rank: int) -> torch.device:
    """Make this process ready for its rank: threads, current device. Returns the device."""
    torch.set_num_threads(plan.threads_per_process)
    device = torch.device(plan.device_of(rank))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def widest_float(device: torch.device) -> torch.dtype:
    """What sums are made in there: Apple's GPUs have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory ran out, on a device or on the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # The CPU allocator raises a plain RuntimeError.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def peak_resident_bytes() -> int:
    """Peak resident memory of this process since it started, all of it, not only tensors.

    Since :func:`forget_peaks`, where that was called.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def forget_peaks(plan: RunPlan, rank: int) -> bool:
    """Let the peaks of memory begin anew at what is used now.

    Returns:
        Whether that of the process did: on Linux only. Those of CUDA devices always do.
    """
    if plan.device_type == "cuda":
        for name in peak_device_bytes(plan, rank):
            torch.cuda.reset_peak_memory_stats(torch.device(name))
    try:
        # 5 resets the "high water mark" of resident memory (man proc_pid_clear_refs). getrusage
        # shows it too, but no less than what the process used before it became this program.
        CLEAR_REFS.write_text("5", encoding="ascii")
    except OSError:
        return False
    return peak_resident_bytes() - psutil.Process().memory_info().rss < NEAR_BYTES


def peak_device_bytes(plan: RunPlan, rank: int) -> dict[str, int]:
    """Peak memory that torch's allocator held on each device of this rank; {} on a CPU."""
    if plan.device_type != "cuda":
        return {}
    count = plan.num_devices if plan.num_processes == 1 else 1
    first = plan.index_of(rank)
    return {
        f"cuda:{index}": torch.cuda.max_memory_allocated(index)
        for index in range(first, first + count)
    }
