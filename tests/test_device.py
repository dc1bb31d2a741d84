"""Peaks of memory, each in a process of its own: a peak cannot be taken back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from builders import make_facts, make_plan_for

from dpexp import device

linux = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="only Linux can let a peak begin anew"
)
MIB = 2**20
PEAKS = """
import json, os
from builders import make_plan_for
from dpexp.device import forget_peaks, peak_resident_bytes

plan = make_plan_for()
if os.fork():  # Linux counts what a process used before it became another program; a fork does not
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
forget_peaks(plan, 0)
before = peak_resident_bytes()
block = bytearray(200 * 2**20)
high = peak_resident_bytes()
del block
still = peak_resident_bytes()
forgotten = forget_peaks(plan, 0)
after = peak_resident_bytes()
block = bytearray(100 * 2**20)
print(json.dumps([before, high, still, forgotten, after, peak_resident_bytes()]), flush=True)
os._exit(0)
"""
ELSEWHERE = """
from builders import make_plan_for
from dpexp import device

block = bytearray(400 * 2**20)
del block
device.CLEAR_REFS = device.Path("/proc/none/clear_refs")
print(device.forget_peaks(make_plan_for(), 0))
"""


def ran(code: str) -> str:
    """What a program prints."""
    folder = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout


@linux
def test_sums_are_made_in_float64_but_on_apples_gpus_which_have_none() -> None:
    assert device.widest_float(torch.device("cpu")) is torch.float64
    assert device.widest_float(torch.device("cuda")) is torch.float64
    assert device.widest_float(torch.device("mps")) is torch.float32


def test_a_peak_of_resident_memory_stays_until_it_is_forgotten() -> None:
    before, high, still, forgotten, after, again = json.loads(ran(PEAKS))
    assert 190 * MIB < high - before < 250 * MIB
    assert still == high
    assert forgotten is True
    assert after < before + 50 * MIB
    assert 90 * MIB < again - after < 150 * MIB


def test_where_a_peak_cannot_be_forgotten_that_is_told() -> None:
    assert ran(ELSEWHERE) == "False\n"


@pytest.mark.parametrize(("strategy", "rank", "expected"), [("dp", 0, [1, 2]), ("ddp", 1, [2])])
def test_the_peaks_of_a_ranks_own_cuda_devices_are_forgotten(
    monkeypatch: pytest.MonkeyPatch, strategy: str, rank: int, expected: list[int]
) -> None:
    forgotten: list[int] = []
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda index: 7)
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device: forgotten.append(device.index)
    )
    facts = make_facts(accelerator="cuda", num_accelerators=3, nccl=True)
    plan = make_plan_for(strategy, 2, facts=facts, device="cuda:1")
    device.forget_peaks(plan, rank)
    assert forgotten == expected
