"""A stand-in for the module pynvml: two boards whose readings a test sets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """As in pynvml."""


class FakeNvml:
    """Only what dpexp calls. `missing` names functions that this board does not support."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, missing: tuple[str, ...] = ()) -> None:
        self.boards: dict[str, dict[str, Any]] = {
            f"GPU-{name}": {
                "clocks": {1: 1980, 2: 2619},
                "temperature": 40,
                "reasons": 0,
                "milliwatts": 350_500,
                "gpu": 97,
                "pids": [100, 101],
                "millijoules": 5_000_000,
            }
            for name in ("a", "b")
        }
        self.missing = missing
        self.closed = False

    def nvmlInit(self) -> None:  # noqa: N802
        return None

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.closed = True

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> dict[str, Any]:  # noqa: N802
        if uuid not in self.boards:
            raise NVMLError("Not Found")
        return self.boards[uuid]

    def nvmlDeviceGetClockInfo(self, board: dict[str, Any], kind: int) -> int:  # noqa: N802
        return int(self._read("nvmlDeviceGetClockInfo", board["clocks"][kind]))

    def nvmlDeviceGetTemperatureV(self, board: dict[str, Any], sensor: int) -> int:  # noqa: N802
        return int(self._read("nvmlDeviceGetTemperatureV", board["temperature"]))

    def nvmlDeviceGetCurrentClocksEventReasons(self, board: dict[str, Any]) -> int:  # noqa: N802
        return int(self._read("nvmlDeviceGetCurrentClocksEventReasons", board["reasons"]))

    def nvmlDeviceGetPowerUsage(self, board: dict[str, Any]) -> int:  # noqa: N802
        return int(self._read("nvmlDeviceGetPowerUsage", board["milliwatts"]))

    def nvmlDeviceGetUtilizationRates(self, board: dict[str, Any]) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=self._read("nvmlDeviceGetUtilizationRates", board["gpu"]))

    def nvmlDeviceGetComputeRunningProcesses(self, board: dict[str, Any]) -> Any:  # noqa: N802
        found = self._read("nvmlDeviceGetComputeRunningProcesses", board["pids"])
        return [SimpleNamespace(pid=pid) for pid in found]

    def nvmlDeviceGetTotalEnergyConsumption(self, board: dict[str, Any]) -> int:  # noqa: N802
        return int(self._read("nvmlDeviceGetTotalEnergyConsumption", board["millijoules"]))

    def _read(self, function: str, value: Any) -> Any:
        if function in self.missing:
            raise NVMLError("Not Supported")
        return value
