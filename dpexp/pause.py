"""What happens between the warm-up and the measured steps."""

from __future__ import annotations

from typing import Any, final

from dpexp.assembly import Assembly
from dpexp.batches import Inputs
from dpexp.beside import Beside
from dpexp.calibration import calibrate, why_not
from dpexp.comm import Comm
from dpexp.loop import Work
from dpexp.plan import RunPlan


@final
class Pause:
    """Calibrates the exchange of gradients, then starts what surrounds the measured steps."""

    def __init__(
        self, work: Work, built: Assembly, plan: RunPlan, comm: Comm, beside: Beside
    ) -> None:
        self._work, self._built, self._plan, self._comm = work, built, plan, comm
        self._beside = beside
        self.calibration: dict[str, Any] | None = None
        if self._calibrates:
            self.calibration = _none("the run ended before its warm-up was over")

    def __call__(self, inputs: Inputs | None, global_rows: int) -> None:
        """All ranks call it; inputs are those of the last step of the warm-up, if there is one."""
        training = self._built.training
        if training is not None and self._calibrates:
            reason = why_not(self._plan)
            if reason is None and inputs is not None:
                self._work.progress.during = "the calibration"
                self.calibration = calibrate(
                    inputs, global_rows, self._work, training, self._built.model, self._plan,
                    self._comm,
                )  # fmt: skip
                self._work.progress.during = ""
            else:
                self.calibration = _none(reason or "there is no warm-up before it")
        self._beside.begin()
        self._work.recorder.resume()
        self._comm.max(0.0)  # rank 0 has read the machine: nobody begins the next step before it

    @property
    def _calibrates(self) -> bool:
        timed = self._work.strategy.log is not None  # else a note of the strategy's says why not
        return timed and self._built.training is not None and self._plan.calibration_pairs > 0


def _none(reason: str) -> dict[str, Any]:
    return {"pairs": 0, "reason": reason}
