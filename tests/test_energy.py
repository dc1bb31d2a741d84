"""Energy counters, on a made-up powercap tree and a stand-in for NVIDIA's library."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fakenvml import FakeNvml

from dpexp import energy
from dpexp.energy import Meter, Source, between, package_domains, per_sample_j
from dpexp.nvml import Nvml

NO_GPU = "no NVIDIA device in this run"


class Clock:
    """Seconds that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(energy, "now_s", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def domain(powercap: Path, place: str, name: str, energy_uj: int, range_uj: int = 10**12) -> Path:
    folder = powercap / place
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "energy_uj").write_text(f"{energy_uj}\n")
    (folder / "max_energy_range_uj").write_text(f"{range_uj}\n")
    return folder


def meter(powercap: Path) -> Meter:
    return Meter(None, NO_GPU, on_gpu=False, powercap=powercap)


def test_a_counter_that_began_again_is_added_up_over_its_range() -> None:
    assert between(1_000_000, 4_000_000, 10**10, 1.0, 100.0) == pytest.approx(3.0)
    # 9 999 J of 10 000 J at the start, 2 J at the end: 3 J
    assert between(9_999_000_000, 2_000_000, 10**10, 1.0, 100.0) == pytest.approx(3.0)


def test_a_counter_that_may_have_begun_again_twice_says_nothing() -> None:
    # It holds 100 J. In 1 s 3 J are sure at up to 100 W, in 2 s it could be 103 J as well.
    assert between(0, 3_000_000, 10**8, 1.0, 100.0) == pytest.approx(3.0)
    with pytest.raises(LookupError, match="holds 100 J and may have begun again more than once in"):
        between(0, 3_000_000, 10**8, 2.0, 100.0)


def test_only_whole_packages_count(tmp_path: Path) -> None:
    first = domain(tmp_path, "intel-rapl:0", "package-0", 0)
    domain(tmp_path, "intel-rapl:0:0", "core", 0)
    domain(tmp_path, "intel-rapl:0:1", "dram", 0)
    second = domain(tmp_path, "intel-rapl:1", "package-1", 0)
    domain(tmp_path, "intel-rapl:2", "psys", 0)
    domain(tmp_path, "intel-rapl-mmio:0", "package-0", 0)
    assert package_domains(tmp_path) == [first, second]


def test_energy_per_sample_of_a_cpu_run(tmp_path: Path, clock: Clock) -> None:
    for place, name in (("intel-rapl:0", "package-0"), ("intel-rapl:1", "package-1")):
        domain(tmp_path, place, name, 1_000_000)
    measured = meter(tmp_path)
    measured.begin()
    clock.now_s = 2.0
    (tmp_path / "intel-rapl:0/energy_uj").write_text("61000000")  # 60 J
    (tmp_path / "intel-rapl:1/energy_uj").write_text("41000000")  # 40 J
    told = measured.end(samples=200)
    assert told["per_sample_j"] == pytest.approx(0.5)
    assert told["sources"]["cpu_package"]["by_device"] == {"package-0": 60, "package-1": 40}
    assert told["sources"]["gpu"] == {"joules": None, "by_device": None, "reason": NO_GPU}
    assert "other programs included" in told["scope"]


def test_the_kernels_power_limit_tells_how_long_a_figure_is_sure(
    tmp_path: Path, clock: Clock
) -> None:
    # A counter of 1 000 J. A package of any kind could use it up in 1 s, this one in 8.3 s.
    folder = domain(tmp_path, "intel-rapl:0", "package-0", 0, range_uj=10**9)
    measured = meter(tmp_path)
    measured.begin()
    clock.now_s = 5.0
    assert measured.end(1)["per_sample_j"] is None
    (folder / "constraint_0_power_limit_uw").write_text("80000000")
    (folder / "constraint_1_power_limit_uw").write_text("100000000")  # 100 W, 120 W in bursts
    (folder / "constraint_2_power_limit_uw").write_text("")
    assert measured.end(1)["per_sample_j"] == 0.0
    clock.now_s = 9.0
    assert "more than once" in measured.end(1)["reason"]


@pytest.mark.parametrize("elapsed_s", [0.05, 0.0])
def test_steps_that_are_too_short_for_the_counter_say_so(
    elapsed_s: float, tmp_path: Path, clock: Clock
) -> None:
    domain(tmp_path, "intel-rapl:0", "package-0", 0)
    measured = meter(tmp_path)
    measured.begin()
    clock.now_s = elapsed_s
    told = measured.end(10)
    assert (told["per_sample_j"], told["reason"]) == (
        None,
        "the measured steps took less than 0.1 s",
    )


def test_a_machine_without_counters_gives_none_and_a_reason(tmp_path: Path, clock: Clock) -> None:
    measured = meter(tmp_path / "absent")
    measured.begin()
    clock.now_s = 5.0
    told = measured.end(10)
    assert told["per_sample_j"] is None
    assert "no RAPL counter of a CPU package" in told["reason"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_counters_that_only_root_may_read(tmp_path: Path, clock: Clock) -> None:
    (domain(tmp_path, "intel-rapl:0", "package-0", 0) / "energy_uj").chmod(0)
    measured = meter(tmp_path)
    measured.begin()
    assert "only root" in measured.end(10)["reason"]


def test_a_refused_read_names_the_right(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    domain(tmp_path, "intel-rapl:0", "package-0", 0)
    plain = Path.read_text

    def guarded(path: Path, *args: object, **kwargs: object) -> str:
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return plain(path)

    monkeypatch.setattr(Path, "read_text", guarded)
    measured = meter(tmp_path)
    measured.begin()
    assert measured.end(10)["reason"] == "only root may read RAPL's counters on this system"


def test_without_a_measured_step_there_is_no_energy(tmp_path: Path) -> None:
    told = meter(tmp_path).end(0)
    assert (told["per_sample_j"], told["reason"]) == (None, "no step was measured")


@pytest.mark.parametrize(
    ("gpu", "cpu", "expected"),
    [
        (None, Source(40.0), (4.0, "")),
        (Source(60.0), Source(40.0), (10.0, "")),
        (Source(60.0), Source(None, reason="root"), (6.0, "")),
        # What the GPUs took is not known: the CPU's share alone would pass for the whole.
        (Source(None, reason="no package"), Source(40.0), (None, "no package")),
        (None, Source(None, reason="root"), (None, "root")),
        (Source(0.0), Source(None), (0.0, "")),
    ],
)
def test_the_runs_own_devices_must_be_known(
    gpu: Source | None, cpu: Source, expected: tuple[float | None, str]
) -> None:
    assert per_sample_j(gpu, cpu, 10) == expected
    assert per_sample_j(gpu, cpu, 0)[0] is None


def test_gpu_energy_is_the_sum_over_the_runs_boards(tmp_path: Path, clock: Clock) -> None:
    library = FakeNvml()
    measured = Meter(Nvml(library, ["GPU-a", "GPU-b"]), "", on_gpu=True, powercap=tmp_path)
    measured.begin()
    clock.now_s = 2.0
    library.boards["GPU-a"]["millijoules"] += 700_000
    library.boards["GPU-b"]["millijoules"] += 300_000
    told = measured.end(samples=500)
    assert told["per_sample_j"] == pytest.approx(2.0)
    assert told["sources"]["gpu"]["by_device"] == {"cuda:0": 700, "cuda:1": 300}
    assert told["sources"]["cpu_package"]["joules"] is None
    library.boards["GPU-a"]["millijoules"] = 0
    assert "driver was loaded again" in measured.end(500)["reason"]


def test_gpu_energy_of_less_than_a_second_says_nothing(tmp_path: Path, clock: Clock) -> None:
    measured = Meter(Nvml(FakeNvml(), ["GPU-a"]), "", on_gpu=True, powercap=tmp_path)
    measured.begin()
    clock.now_s = 0.9
    assert measured.end(10)["reason"] == "the measured steps took less than 1 s"
