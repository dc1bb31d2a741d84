"""The energy that the measured steps took: of NVIDIA devices, and of CPU packages (RAPL).

Both are counters of the hardware, read before and after. What cannot be read is None, with a
reason, and never 0.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from dpexp.nvml import Nvml
from dpexp.timing import now_s

POWERCAP = Path("/sys/class/powercap")
# The counters move in jumps: RAPL's about every millisecond, NVML's up to every tenth of a second.
# From here on a jump is at most a hundredth (RAPL) or a tenth (NVML) of the figure's time.
RAPL_SHORTEST_S = 0.1
NVML_SHORTEST_S = 1.0
# More than any package draws; used where the kernel does not tell the package's own limit.
MOST_W = 1000.0
SCOPE = (
    "from the first measured step to the end of the last, with what lies between steps; gpu: the "
    "whole boards of the run's devices; cpu_package: the whole packages, other programs included, "
    "without what is outside of them (memory in part, disks, fans, losses of the power supply)"
)


def between(start_uj: int, end_uj: int, range_uj: int, elapsed_s: float, most_w: float) -> float:
    """Joules between two readings of a counter that begins again at 0 after `range_uj`.

    Raises:
        LookupError: it may have begun again more often than can be seen: the next possible figure
            would not take more than `most_w` either.
    """
    moved_uj = end_uj - start_uj
    if moved_uj < 0:
        moved_uj += range_uj
    if (moved_uj + range_uj) * 1e-6 <= most_w * elapsed_s:
        raise LookupError(
            f"the counter holds {range_uj * 1e-6:.0f} J and may have begun again more than once in "
            f"{elapsed_s:.0f} s"
        )
    return moved_uj * 1e-6


def per_sample_j(gpu: Source | None, cpu: Source, samples: int) -> tuple[float | None, str]:
    """Joules per sample, or None and why not.

    The devices of the run must be known: the GPUs where there are any, else the CPU. The CPU's
    packages are added where they are known.

    Args:
        gpu: None for a run on a CPU.
    """
    needed = cpu if gpu is None else gpu
    if needed.joules is None:
        return None, needed.reason
    if not samples:
        return None, "no sample was measured"
    both = [s.joules for s in (gpu, cpu) if s is not None and s.joules is not None]
    return sum(both) / samples, ""


def package_domains(powercap: Path) -> list[Path]:
    """RAPL's domains of whole packages: not their parts, and not the whole board (psys)."""
    return [
        domain
        for domain in sorted(powercap.glob("intel-rapl:*"))
        if domain.name.count(":") == 1
        and (domain / "name").is_file()
        and (domain / "name").read_text().strip().startswith("package")
    ]


@dataclass(frozen=True)
class Source:
    """One kind of counter; joules None: see `reason`."""

    joules: float | None = None
    by_device: dict[str, float] | None = None
    reason: str = ""


@dataclass(frozen=True)
class _Reading:
    at_s: float
    packages_uj: dict[Path, int] | None
    packages_reason: str
    gpu_j: dict[str, float] | None
    gpu_reason: str


@final
class Meter:
    """Reads the counters before and after the measured steps. For one process of the run.

    Args:
        nvml: of the run's devices; None where they cannot be read.
        why: there is no `nvml`.
        on_gpu: the run's devices are accelerators.
    """

    def __init__(
        self, nvml: Nvml | None, why: str, *, on_gpu: bool, powercap: Path = POWERCAP
    ) -> None:
        self._nvml, self._why, self._on_gpu, self._powercap = nvml, why, on_gpu, powercap
        self._start: _Reading | None = None

    def begin(self) -> None:
        """The measured steps begin after this."""
        self._start = self._read()

    def end(self, samples: int) -> dict[str, Any]:
        """``energy`` of ``run.json``: the measured steps ended before this."""
        gpu, cpu = self._sources()
        figure, reason = per_sample_j(gpu if self._on_gpu else None, cpu, samples)
        return {
            "per_sample_j": figure,
            "reason": reason,
            "samples": samples,
            "sources": {"gpu": asdict(gpu), "cpu_package": asdict(cpu)},
            "scope": SCOPE,
        }

    def _sources(self) -> tuple[Source, Source]:
        if self._start is None:
            return Source(reason="no step was measured"), Source(reason="no step was measured")
        start, end = self._start, self._read()
        return _gpu(start, end), self._packages(start, end)

    def _packages(self, start: _Reading, end: _Reading) -> Source:
        elapsed_s = end.at_s - start.at_s
        if start.packages_uj is None or end.packages_uj is None:
            return Source(reason=start.packages_reason or end.packages_reason)
        if elapsed_s < RAPL_SHORTEST_S:
            return Source(reason=f"the measured steps took less than {RAPL_SHORTEST_S:g} s")
        found = {}
        try:
            for domain, before in start.packages_uj.items():
                range_uj = int((domain / "max_energy_range_uj").read_text())
                name = (domain / "name").read_text().strip()
                after, most_w = end.packages_uj[domain], _most_w(domain)
                found[name] = between(before, after, range_uj, elapsed_s, most_w)
        except (OSError, ValueError, LookupError) as error:
            return Source(reason=str(error))
        return Source(sum(found.values()), found)

    def _read(self) -> _Reading:
        gpu, why = (None, self._why) if self._nvml is None else self._nvml.energies_j()
        packages, reason = self._read_packages()
        return _Reading(now_s(), packages, reason, gpu, why)

    def _read_packages(self) -> tuple[dict[Path, int] | None, str]:
        try:
            domains = package_domains(self._powercap)
            if not domains:
                return None, f"no RAPL counter of a CPU package below {self._powercap}"
            return {domain: int((domain / "energy_uj").read_text()) for domain in domains}, ""
        except PermissionError:
            return None, "only root may read RAPL's counters on this system"
        except (OSError, ValueError) as error:
            return None, str(error)


def _gpu(start: _Reading, end: _Reading) -> Source:
    if start.gpu_j is None or end.gpu_j is None:
        return Source(reason=start.gpu_reason or end.gpu_reason)
    if end.at_s - start.at_s < NVML_SHORTEST_S:
        return Source(reason=f"the measured steps took less than {NVML_SHORTEST_S:g} s")
    found = {name: end.gpu_j[name] - before for name, before in start.gpu_j.items()}
    if min(found.values()) < 0:
        return Source(reason="NVML's counter began anew meanwhile: the driver was loaded again")
    return Source(sum(found.values()), found)


def _most_w(domain: Path) -> float:
    """A package's largest power limit as the kernel tells it, and a fifth for bursts."""
    limits = []
    for path in domain.glob("constraint_*_power_limit_uw"):
        try:
            limits.append(int(path.read_text()) * 1e-6)
        except (OSError, ValueError):
            continue  # a limit that is not set
    known = [limit for limit in limits if 0 < limit < MOST_W]
    return 1.2 * max(known) if known else MOST_W
