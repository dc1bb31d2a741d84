"""What NVIDIA's management library (NVML) tells about a run's devices.

It needs the package nvidia-ml-py, the extra ``nvidia``. What it cannot tell is None with a reason
beside it. Tested with a stand-in; not run on a GPU yet.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from dpexp.plan import RunPlan

# The bits of nvmlClocksEventReasons (nvml.h), in words.
REASONS = {
    0x1: "idle",
    0x2: "clocks set by an application",
    0x4: "power limit (software)",
    0x8: "slowed down by the hardware",
    0x10: "sync boost",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake (hardware)",
    0x100: "display clock",
}
# Those that slow a busy device down; the others are how it is set, or that it has nothing to do.
SLOWING = frozenset(REASONS[bit] for bit in (0x4, 0x8, 0x20, 0x40, 0x80))


def words_of(bits: int) -> list[str]:
    """The reasons why a device's clock is below its highest, from NVML's bits."""
    known = [word for bit, word in REASONS.items() if bits & bit]
    rest = bits & ~sum(REASONS)
    return [*known, f"unknown reason {rest:#x}"] if rest else known


def open_nvml(plan: RunPlan) -> tuple[Nvml | None, str]:
    """NVML with the run's devices, or None and why not."""
    if plan.device_type != "cuda":
        return None, "no NVIDIA device in this run"
    try:
        library = importlib.import_module("pynvml")
    except ImportError:
        return None, 'nvidia-ml-py is not installed (pip install "dpexp[nvidia]")'
    first = plan.first_index
    try:
        library.nvmlInit()
        uuids = [_uuid(index) for index in range(first, first + plan.devices_here)]
        return Nvml(library, uuids, first), ""
    except Exception as error:  # noqa: BLE001  # NVML's errors share no base with torch's
        return None, f"NVML: {_text(error)}"


def _uuid(index: int) -> str:
    # torch's numbers follow CUDA_VISIBLE_DEVICES and NVML's do not: only this names a device.
    text = str(torch.cuda.get_device_properties(index).uuid)
    return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"


@final
class Nvml:
    """The run's devices.

    Args:
        library: the module pynvml, after `nvmlInit`.
        uuids: of the run's devices, in order.
        first: torch's number of the first one.

    Raises:
        Exception: NVML's own, when a device is not found.
    """

    def __init__(self, library: Any, uuids: Sequence[str], first: int = 0) -> None:
        self._library = library
        self._devices = [
            (f"cuda:{first + place}", library.nvmlDeviceGetHandleByUUID(uuid))
            for place, uuid in enumerate(uuids)
        ]

    def states(self, pids: Sequence[int]) -> list[dict[str, Any]]:
        """Each device now: clocks in MHz, °C, W, and what others do on it.

        Args:
            pids: of the run's own processes; [] = not known yet, so others cannot be told apart.
        """
        return [self._state(name, handle, pids) for name, handle in self._devices]

    def energies_j(self) -> tuple[dict[str, float] | None, str]:
        """Energy of each device since its driver was loaded, or None and why not."""
        try:
            read = self._library.nvmlDeviceGetTotalEnergyConsumption
            return {name: read(handle) * 1e-3 for name, handle in self._devices}, ""  # from mJ
        except Exception as error:  # noqa: BLE001
            return None, f"NVML: {_text(error)}"

    def close(self) -> None:
        """Let go of the library."""
        self._library.nvmlShutdown()

    def _state(self, name: str, handle: Any, pids: Sequence[int]) -> dict[str, Any]:
        library, reasons = self._library, {}
        readings: dict[str, Callable[[], Any]] = {
            "sm_mhz": lambda: library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM),
            "memory_mhz": lambda: library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_MEM),
            "temperature_c": lambda: self._temperature(handle),
            "clock_reasons": lambda: words_of(self._reasons(handle)),
            "power_w": lambda: library.nvmlDeviceGetPowerUsage(handle) * 1e-3,
            "utilization_percent": lambda: library.nvmlDeviceGetUtilizationRates(handle).gpu,
            "other_processes": lambda: self._others(handle, pids),
        }
        state: dict[str, Any] = {"device": name}
        for key, read in readings.items():
            try:
                state[key] = read()
            except Exception as error:  # noqa: BLE001
                state[key], reasons[key] = None, _text(error)
        return {**state, "reasons": reasons}

    def _temperature(self, handle: Any) -> int:
        library = self._library
        newer = getattr(library, "nvmlDeviceGetTemperatureV", None)
        read = library.nvmlDeviceGetTemperature if newer is None else newer
        return int(read(handle, library.NVML_TEMPERATURE_GPU))

    def _reasons(self, handle: Any) -> int:
        newer = getattr(self._library, "nvmlDeviceGetCurrentClocksEventReasons", None)
        read = self._library.nvmlDeviceGetCurrentClocksThrottleReasons if newer is None else newer
        return int(read(handle))

    def _others(self, handle: Any, pids: Sequence[int]) -> int:
        """How many processes that are not the run's have a context on the device.

        Raises:
            LookupError: they cannot be told apart.
        """
        if not pids:
            raise LookupError("the run's own processes are known at its end only")
        seen = {each.pid for each in self._library.nvmlDeviceGetComputeRunningProcesses(handle)}
        if not seen & set(pids):
            # The run does use the device, so the numbers are those of another namespace.
            raise LookupError("NVML's process numbers are not those of this container")
        return len(seen - set(pids))


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
