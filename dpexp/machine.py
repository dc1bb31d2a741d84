"""The state of the machine at the start and at the end of the measured steps.

Read between steps, by rank 0; each rank brings the CPU time that it used itself. What cannot be
read is None, with the reason beside it.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any, final

from dpexp.comm import Comm
from dpexp.nvml import SLOWING, Nvml
from dpexp.plan import RunPlan
from dpexp.sensors import Snapshot, look, own_core_s, own_cpus
from dpexp.timing import now_s

# What matters: less than this moves on any machine.
CLOCK_SHARE = 0.05  # of the clock at the start
RISE_C = 10.0
LOAD_SHARE = 0.1  # other programs' cores, of the cores that the run may use
# The kernel counts busy time in ticks of 10 ms on each core; below this they say too little.
SHORTEST_S = 0.5
SHORT = f"the measured steps took less than {SHORTEST_S:g} s: the kernel's counts are too coarse"


def load_between(start: Snapshot, end: Snapshot, own_core_s: float, elapsed_s: float) -> Load:
    """Who used the cores between two snapshots.

    other = (busy at the end - busy at the start - the run's own CPU seconds) / elapsed, and 0 where
    the kernel's ticks make it negative.
    """
    if elapsed_s < SHORTEST_S:
        return Load(elapsed_s, reason=SHORT)
    own = own_core_s / elapsed_s
    if start.busy_core_s is None or end.busy_core_s is None:
        return Load(elapsed_s, own_cores=own, reason=end.reasons.get("busy_core_s", ""))
    busy = (end.busy_core_s - start.busy_core_s) / elapsed_s
    steal = None
    if start.steal_core_s is not None and end.steal_core_s is not None:
        steal = (end.steal_core_s - start.steal_core_s) / elapsed_s
    return Load(elapsed_s, busy, own, max(0.0, busy - own), steal)


def moved(start: Snapshot, end: Snapshot, load: Load, cores: int) -> tuple[str, ...]:
    """What changed enough to make the run's times doubtful, in plain words.

    Args:
        cores: that the run's threads can use at most.
    """
    told = []
    # A core that has just woken up has another clock: a short run says nothing about it.
    if load.elapsed_s >= SHORTEST_S:
        told += _clock("the CPU's clock", start.cpu_mhz, end.cpu_mhz)
    for chip, before in (start.temperatures_c or {}).items():
        told += _heat(f"the temperature of {chip}", before, (end.temperatures_c or {}).get(chip))
    for kind, before in (start.throttled or {}).items():
        more = (end.throttled or {}).get(kind, before) - before
        if more > 0:
            told.append(f"the kernel throttled the CPU for its heat ({kind}: {more} more)")
    if start.cgroup_throttled is not None and end.cgroup_throttled is not None:
        more = end.cgroup_throttled - start.cgroup_throttled
        if more > 0:
            told.append(f"the CPU quota of this container ran out {more} times")
    if load.other_load_cores is not None and load.other_load_cores > LOAD_SHARE * cores:
        told.append(f"other programs kept {load.other_load_cores:.2f} cores busy meanwhile")
    if load.steal_cores is not None and load.steal_cores > LOAD_SHARE * cores:
        told.append(f"the hypervisor gave {load.steal_cores:.2f} cores to others meanwhile")
    for device, later in zip(start.devices, end.devices, strict=False):
        told += _device(device, later, load)
    return tuple(told)


def _device(start: dict[str, Any], end: dict[str, Any], load: Load) -> list[str]:
    name, told = end["device"], []
    if load.elapsed_s >= SHORTEST_S:
        told += _clock(f"the clock of {name}", start["sm_mhz"], end["sm_mhz"])
        told += _clock(f"the memory clock of {name}", start["memory_mhz"], end["memory_mhz"])
    told += _heat(f"the temperature of {name}", start["temperature_c"], end["temperature_c"])
    slowing = [word for word in end["clock_reasons"] or () if word in SLOWING]
    if slowing:
        told.append(f"{name} was slowed down at the end: {', '.join(slowing)}")
    if end["other_processes"]:
        told.append(f"{end['other_processes']} other processes use {name}")
    return told


def _clock(what: str, start: float | None, end: float | None) -> list[str]:
    if not start or end is None or abs(end - start) <= CLOCK_SHARE * start:
        return []
    return [f"{what} moved from {start:.0f} to {end:.0f} MHz"]


def _heat(what: str, start: float | None, end: float | None) -> list[str]:
    if start is None or end is None or end - start <= RISE_C:
        return []
    return [f"{what} rose from {start:.0f} to {end:.0f} °C"]


def record(start: Snapshot, end: Snapshot, load: Load, cores: int) -> dict[str, Any]:
    """``machine`` of ``run.json``."""
    return {
        "start": asdict(start),
        "end": asdict(end),
        **asdict(load),
        "warnings": list(moved(start, end, load, cores)),
    }


@dataclass(frozen=True)
class Load:
    """Cores over the measured steps, on average. None: see `reason`."""

    elapsed_s: float
    busy_cores: float | None = None  # on the whole machine, as far as the run may use it
    own_cores: float | None = None  # by the run's processes and their loader processes
    other_load_cores: float | None = None
    steal_cores: float | None = None
    reason: str = ""


@final
class Watch:
    """Looks at the machine at the start and at the end of the measured steps.

    Args:
        nvml: on rank 0, of the run's devices; None without them.
        why: there is no `nvml`.
    """

    def __init__(self, plan: RunPlan, comm: Comm, nvml: Nvml | None, why: str) -> None:
        self._plan, self._comm, self._nvml, self._why = plan, comm, nvml, why
        self._start: tuple[Snapshot, float, float] | None = None

    def begin(self) -> None:
        """The measured steps begin after this."""
        self._start = self._now([])

    def end(self) -> dict[str, Any] | None:
        """The measured steps ended before this. All ranks meet. The record, on rank 0."""
        own_s = own_core_s()
        began = None if self._start is None else own_s - self._start[2]
        gathered = self._comm.gather((os.getpid(), began))
        if gathered is None:
            return None
        if self._start is None:
            return {"start": None, "end": None, "reason": "no step was measured", "warnings": []}
        start, began_s, _ = self._start
        here = gathered[: self._plan.processes_here]  # rank 0 reads its own host, where these are
        end, ended_s, _ = self._now([pid for pid, _ in here])
        own = sum(seconds for _, seconds in here if seconds is not None)
        return record(start, end, load_between(start, end, own, ended_s - began_s), self._cores())

    def _now(self, pids: list[int]) -> tuple[Snapshot, float, float]:
        """Rank 0's snapshot; the other ranks only count their own CPU time."""
        own_s = own_core_s()
        if self._comm.rank:
            return Snapshot(), 0.0, own_s
        snapshot = look(self._nvml, pids, cpus=self._plan.cpus())
        if self._nvml is None and self._plan.device_type != "cpu":
            snapshot.reasons["devices"] = self._why
        return snapshot, now_s(), own_s

    def _cores(self) -> int:
        most = self._plan.threads_per_process * self._plan.processes_here
        return min(most, len(self._plan.cpus() or own_cpus()) or most)
