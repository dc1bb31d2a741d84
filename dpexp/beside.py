"""What surrounds the measured steps: the state of the machine, and the energy that they took."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import final

from dpexp.comm import Comm
from dpexp.energy import Meter
from dpexp.machine import Watch
from dpexp.nvml import open_nvml
from dpexp.plan import RunPlan
from dpexp.records import RankResult


@final
class Beside:
    """Reads the machine and its energy counters at the start and at the end of the measured steps.

    Rank 0 reads; the other ranks bring the CPU time that they used.
    """

    def __init__(self, plan: RunPlan, comm: Comm) -> None:
        self._comm = comm
        self._nvml, why = (None, "") if comm.rank else open_nvml(plan)
        self._watch = Watch(plan, comm, self._nvml, why)
        self._meter = Meter(self._nvml, why, on_gpu=plan.device_type != "cpu")

    def begin(self) -> None:
        """The measured steps begin after this."""
        self._watch.begin()
        if not self._comm.rank:
            self._meter.begin()

    def end(self, measured_rows: int) -> Callable[[RankResult], RankResult]:
        """The measured steps ended before this. All ranks meet.

        Args:
            measured_rows: of the measured steps, over all ranks.

        Returns:
            What adds to a rank's result, on rank 0, what was found, with a note for each warning.
        """
        energy = None if self._comm.rank else self._meter.end(measured_rows)
        machine = self._watch.end()
        if self._nvml is not None:
            self._nvml.close()

        def added(done: RankResult) -> RankResult:
            if machine is None:
                return done
            warnings = tuple(f"warning: {text}" for text in machine["warnings"])
            return replace(done, energy=energy, machine=machine, notes=(*done.notes, *warnings))

        return added
