"""The machine's state: what moved, who used the cores, and what cannot be read."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from builders import FakeComm, make_facts, make_plan_for
from fakenvml import FakeNvml

import dpexp
from dpexp import machine, sensors
from dpexp.machine import SHORT, Load, Watch, load_between, moved
from dpexp.nvml import Nvml
from dpexp.sensors import Snapshot, look, own_core_s

LONG = Load(10.0)
DEVICE = {
    "device": "cuda:0",
    "sm_mhz": 2000,
    "memory_mhz": 1000,
    "temperature_c": 50,
    "clock_reasons": [],
    "other_processes": 0,
}


def spin(seconds: float) -> None:
    """Use a core for so many CPU seconds."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_other_load_is_what_is_busy_beyond_the_run() -> None:
    start = Snapshot(busy_core_s=100.0, steal_core_s=1.0)
    end = Snapshot(busy_core_s=130.0, steal_core_s=6.0)
    load = load_between(start, end, own_core_s=20.0, elapsed_s=10.0)
    assert load == Load(10.0, 3.0, 2.0, 1.0, 0.5)


def test_more_own_time_than_busy_time_is_no_negative_load() -> None:
    load = load_between(Snapshot(busy_core_s=0.0), Snapshot(busy_core_s=9.9), 10.0, 10.0)
    assert load.other_load_cores == 0.0
    assert load.steal_cores is None


def test_a_short_run_has_no_load_but_a_reason() -> None:
    load = load_between(Snapshot(busy_core_s=0.0), Snapshot(busy_core_s=1.0), 0.1, 0.49)
    assert (load.other_load_cores, load.busy_cores, load.reason) == (None, None, SHORT)


def test_busy_time_that_cannot_be_read_is_no_load_but_a_reason() -> None:
    blind = Snapshot(reasons={"busy_core_s": "no /proc"})
    load = load_between(blind, blind, 5.0, 10.0)
    assert (load.own_cores, load.other_load_cores, load.reason) == (0.5, None, "no /proc")


@pytest.mark.parametrize(
    ("start", "end", "load", "expected"),
    [
        (Snapshot(), Snapshot(), LONG, ()),
        (Snapshot(cpu_mhz=2000), Snapshot(cpu_mhz=1900), LONG, ()),
        (
            Snapshot(cpu_mhz=2000),
            Snapshot(cpu_mhz=1899),
            LONG,
            ("the CPU's clock moved from 2000 to 1899 MHz",),
        ),
        (Snapshot(cpu_mhz=2000), Snapshot(cpu_mhz=1000), Load(0.4), ()),
        (Snapshot(cpu_mhz=2000), Snapshot(cpu_mhz=None), LONG, ()),
        (
            Snapshot(temperatures_c={"coretemp": 50, "nvme": 40}),
            Snapshot(temperatures_c={"coretemp": 61, "nvme": 50}),
            Load(0.4),
            ("the temperature of coretemp rose from 50 to 61 °C",),
        ),
        (
            Snapshot(throttled={"core": 3, "package": 9}),
            Snapshot(throttled={"core": 3, "package": 11}),
            Load(0.4),
            ("the kernel throttled the CPU for its heat (package: 2 more)",),
        ),
        (
            Snapshot(cgroup_throttled=4),
            Snapshot(cgroup_throttled=7),
            Load(0.4),
            ("the CPU quota of this container ran out 3 times",),
        ),
        (Snapshot(), Snapshot(), Load(10.0, other_load_cores=0.4, steal_cores=0.4), ()),
        (
            Snapshot(),
            Snapshot(),
            Load(10.0, other_load_cores=0.41, steal_cores=0.5),
            (
                "other programs kept 0.41 cores busy meanwhile",
                "the hypervisor gave 0.50 cores to others meanwhile",
            ),
        ),
    ],
)
def test_what_moved_enough_is_told(
    start: Snapshot, end: Snapshot, load: Load, expected: tuple[str, ...]
) -> None:
    assert moved(start, end, load, cores=4) == expected


def test_a_device_that_moved_is_told() -> None:
    hot = {
        **DEVICE,
        "sm_mhz": 1500,
        "temperature_c": 70,
        "clock_reasons": ["idle", "power limit (software)"],
        "other_processes": 2,
    }
    told = moved(Snapshot(devices=[DEVICE]), Snapshot(devices=[hot]), LONG, 4)
    assert told == (
        "the clock of cuda:0 moved from 2000 to 1500 MHz",
        "the temperature of cuda:0 rose from 50 to 70 °C",
        "cuda:0 was slowed down at the end: power limit (software)",
        "2 other processes use cuda:0",
    )
    assert moved(Snapshot(devices=[DEVICE]), Snapshot(devices=[DEVICE]), LONG, 4) == ()


def test_a_device_that_tells_nothing_moved_nothing() -> None:
    blind = dict.fromkeys(DEVICE) | {"device": "cuda:0"}
    assert moved(Snapshot(devices=[blind]), Snapshot(devices=[blind]), LONG, 4) == ()


def test_throttle_counts_and_quotas_are_read_from_the_kernels_files(tmp_path: Path) -> None:
    for cpu, core in ((0, 2), (1, 5)):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/thermal_throttle"
        folder.mkdir(parents=True)
        (folder / "core_throttle_count").write_text(f"{core}\n")
        (folder / "package_throttle_count").write_text("7\n")
    (tmp_path / "sys/devices/system/cpu/cpufreq").mkdir()
    own = tmp_path / "sys/fs/cgroup/job"
    own.mkdir(parents=True)
    (own / "cpu.stat").write_text("usage_usec 5\nnr_periods 9\nnr_throttled 6\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    seen = look(None, [], tmp_path)
    assert seen.throttled == {"core": 7, "package": 14}
    assert seen.cgroup_throttled == 6
    assert not {"throttled", "cgroup_throttled"} & set(seen.reasons)


def test_version_1_of_control_groups_is_found_too(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:cpu,cpuacct:/job\n0::/\n")
    folder = tmp_path / "sys/fs/cgroup/cpu/job"
    folder.mkdir(parents=True)
    (folder / "cpu.stat").write_text("nr_periods 0\nnr_throttled 2\nthrottled_time 0\n")
    assert look(None, [], tmp_path).cgroup_throttled == 2


def test_what_cannot_be_read_is_none_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "cpu_freq", lambda percpu: [])
    monkeypatch.setattr(psutil, "sensors_temperatures", dict, raising=False)

    def refused(percpu: bool) -> None:
        raise OSError("no /proc/stat")

    monkeypatch.setattr(psutil, "cpu_times", refused)
    seen = look(None, [], tmp_path)
    unread = ("cpu_mhz", "temperatures_c", "throttled", "cgroup_throttled", "busy_core_s")
    assert {name: getattr(seen, name) for name in unread} == dict.fromkeys(unread)
    assert set(seen.reasons) == {*unread, "steal_core_s"}
    assert all(seen.reasons.values())


def test_the_hottest_sensor_of_each_chip_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def sensor(current: float | None) -> object:
        return type("Sensor", (), {"current": current})()

    chips = {"coretemp": [sensor(51.0), sensor(57.5)], "acpi": [sensor(None)]}
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: chips, raising=False)
    assert look(None, []).temperatures_c == {"coretemp": 57.5}


def test_own_time_counts_this_process_its_loaders_and_its_ended_children() -> None:
    before = own_core_s()
    spin(0.2)
    assert own_core_s() - before >= 0.2
    busy = multiprocessing.get_context("fork").Process(target=spin, args=(60,))
    busy.start()
    try:
        before = own_core_s()
        for _ in range(2000):  # it gets its 0.1 s sooner or later, however busy the machine is
            time.sleep(0.01)
            if own_core_s() - before >= 0.1:
                break
        assert own_core_s() - before >= 0.1
    finally:
        busy.kill()
        busy.join()
    before = own_core_s()
    code = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert own_core_s() - before >= 0.3


def test_a_busy_program_beside_the_run_is_seen() -> None:
    spinner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        other, watch = psutil.Process(spinner.pid), Watch(make_plan_for(), FakeComm(), None, "")
        watch.begin()
        before, own = sum(other.cpu_times()[:2]), time.process_time()
        spin(0.5)  # it takes a second where the two share a core
        took = sum(other.cpu_times()[:2]) - before
        own = time.process_time() - own
        told = watch.end()
    finally:
        spinner.kill()
        spinner.wait()
    assert told is not None
    assert told["own_cores"] * told["elapsed_s"] == pytest.approx(own, abs=0.05)
    # Others may be busy too; the kernel counts by ticks.
    assert told["other_load_cores"] * told["elapsed_s"] >= took - 0.1 * told["elapsed_s"] - 0.05


class _Peers(FakeComm):
    """Two ranks; the other one brings so many CPU seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(0, 2)
        self._seconds = seconds

    def gather(self, value: object) -> list[object]:
        return [value, (101, self._seconds)]


def test_the_cpu_time_of_all_ranks_is_the_runs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    own, now = iter([2.0, 5.0, 5.0]), iter([100.0, 110.0])
    looks = iter([Snapshot(busy_core_s=50.0), Snapshot(busy_core_s=75.0)])
    asked: list[list[int]] = []

    def fake_look(nvml: object, pids: list[int], cpus: object = ()) -> Snapshot:
        asked.append(pids)
        return next(looks)

    monkeypatch.setattr(machine, "own_core_s", lambda: next(own))
    monkeypatch.setattr(machine, "now_s", lambda: next(now))
    monkeypatch.setattr(machine, "look", fake_look)
    watch = Watch(make_plan_for("ddp", 2), _Peers(seconds=12.0), None, "")
    watch.begin()
    told = watch.end()
    assert told is not None
    # 25 core seconds in 10 s; 3 s of rank 0 and 12 s of rank 1 are the run's
    assert (told["busy_cores"], told["own_cores"], told["other_load_cores"]) == (2.5, 1.5, 1.0)
    assert told["warnings"] == ["other programs kept 1.00 cores busy meanwhile"]
    assert asked == [[], [os.getpid(), 101]]


def test_a_rank_that_is_not_the_first_only_brings_its_time() -> None:
    watch = Watch(make_plan_for("ddp", 2), FakeComm(1, 2), None, "")
    watch.begin()
    assert watch.end() is None


def test_a_run_of_warm_up_steps_only_has_no_state_but_a_reason() -> None:
    told = Watch(make_plan_for(), FakeComm(), None, "").end()
    assert told is not None
    assert (told["start"], told["reason"]) == (None, "no step was measured")


def test_devices_are_in_both_snapshots_and_a_missing_library_is_a_reason() -> None:
    facts = make_facts(accelerator="cuda", num_accelerators=1)
    plan = make_plan_for(facts=facts, device="cuda")
    library = FakeNvml()
    library.boards["GPU-a"]["pids"] = [os.getpid(), 4711]
    watch = Watch(plan, FakeComm(), Nvml(library, ["GPU-a"]), "")
    watch.begin()
    told = watch.end()
    assert told is not None
    assert told["start"]["devices"][0]["other_processes"] is None
    assert told["end"]["devices"][0]["other_processes"] == 1
    blind = Watch(plan, FakeComm(), None, "nvidia-ml-py is not installed")
    blind.begin()
    told = blind.end()
    assert told is not None
    assert told["start"]["reasons"]["devices"] == "nvidia-ml-py is not installed"


def test_a_snapshot_is_plain_data() -> None:
    seen = look(None, [])
    json.dumps(machine.record(seen, replace(seen), LONG, 2), allow_nan=False)
    assert sensors.own_cpus() or not hasattr(os, "sched_getaffinity")


@pytest.mark.parametrize("warmup", [0, 2])
def test_a_run_records_the_machine_around_its_measured_steps(warmup: int, workdir: Path) -> None:
    run = dpexp.run(
        [
            "parallel=ddp",
            "num_devices=2",
            "task=train",
            f"warmup_steps={warmup}",
            "loader.workers=1",
        ]
    )
    told, energy = run.result.machine, run.result.energy
    assert told is not None
    assert energy is not None
    assert told["elapsed_s"] >= 0.0
    assert told["start"]["busy_core_s"] <= told["end"]["busy_core_s"]
    for snapshot in (told["start"], told["end"]):
        unknown = {name for name, value in snapshot.items() if value is None}
        assert unknown <= set(snapshot["reasons"])
    warnings = [f"warning: {text}" for text in told["warnings"]]
    assert [note for note in run.result.notes if note.startswith("warning: ")] == warnings
    assert energy["samples"] == 100 - 30 * warmup
    assert (energy["per_sample_j"] is None) == bool(energy["reason"])
