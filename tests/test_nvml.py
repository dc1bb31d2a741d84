"""NVIDIA devices, with a stand-in for NVIDIA's library."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from builders import make_facts, make_plan_for
from fakenvml import FakeNvml

from dpexp.nvml import Nvml, open_nvml, words_of
from dpexp.plan import RunPlan


def gpu_plan(count: int = 2, device: str = "cuda") -> RunPlan:
    facts = make_facts(accelerator="cuda", num_accelerators=4, nccl=True)
    return make_plan_for("ddp", count, facts=facts, device=device)


def test_bits_become_words_and_none_becomes_no_word() -> None:
    assert words_of(0) == []
    assert words_of(0x4 | 0x40) == ["power limit (software)", "temperature (hardware)"]
    assert words_of(0x1 | 0x800) == ["idle", "unknown reason 0x800"]


def test_a_device_tells_its_state_in_mhz_degrees_and_watts() -> None:
    library = FakeNvml()
    library.boards["GPU-b"]["reasons"] = 0x20
    first, second = Nvml(library, ["GPU-a", "GPU-b"], first=2).states([100, 101])
    assert first == {
        "device": "cuda:2",
        "sm_mhz": 1980,
        "memory_mhz": 2619,
        "temperature_c": 40,
        "clock_reasons": [],
        "power_w": 350.5,
        "utilization_percent": 97,
        "other_processes": 0,
        "reasons": {},
    }
    assert (second["device"], second["clock_reasons"]) == ("cuda:3", ["temperature (software)"])


def test_what_a_board_does_not_support_is_none_with_a_reason_and_the_rest_is_there() -> None:
    library = FakeNvml(missing=("nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEnergyConsumption"))
    nvml = Nvml(library, ["GPU-a"])
    (state,) = nvml.states([100])
    assert (state["power_w"], state["reasons"]) == (None, {"power_w": "Not Supported"})
    assert state["sm_mhz"] == 1980
    assert nvml.energies_j() == (None, "NVML: Not Supported")


@pytest.mark.parametrize(
    ("own", "others", "reason"),
    [
        ([100, 101, 7], 0, None),
        ([100], 1, None),
        ([], None, "known at its end only"),
        ([55, 56], None, "not those of this container"),
    ],
)
def test_other_processes_are_told_apart_only_where_the_own_ones_are_seen(
    own: list[int], others: int | None, reason: str | None
) -> None:
    (state,) = Nvml(FakeNvml(), ["GPU-a"]).states(own)
    assert state["other_processes"] == others
    assert (reason or "") in state["reasons"].get("other_processes", "")


def test_older_libraries_have_other_names_for_temperature_and_reasons() -> None:
    class Old(FakeNvml):
        nvmlDeviceGetTemperatureV = None  # noqa: N815
        nvmlDeviceGetCurrentClocksEventReasons = None  # noqa: N815

        def nvmlDeviceGetTemperature(self, board, sensor):  # noqa: N802
            return 41

        def nvmlDeviceGetCurrentClocksThrottleReasons(self, board):  # noqa: N802
            return 0x8

    (state,) = Nvml(Old(), ["GPU-a"]).states([100])
    assert state["temperature_c"] == 41
    assert state["clock_reasons"] == ["slowed down by the hardware"]


def test_a_cpu_run_and_a_missing_package_are_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_nvml(make_plan_for()) == (None, "no NVIDIA device in this run")
    monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it raises ImportError
    found, why = open_nvml(gpu_plan())
    assert found is None
    assert 'pip install "dpexp[nvidia]"' in why


def test_devices_are_found_by_what_torch_calls_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def properties(index: int) -> SimpleNamespace:
        asked.append(index)
        return SimpleNamespace(uuid={1: "b", 2: "GPU-a", 3: "c"}[index])

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    found, why = open_nvml(gpu_plan(2, "cuda:1"))
    assert found is not None
    assert [state["device"] for state in found.states([100])] == ["cuda:1", "cuda:2"]
    assert (asked, why) == ([1, 2], "")
    assert open_nvml(gpu_plan(1, "cuda:3")) == (None, "NVML: Not Found")
