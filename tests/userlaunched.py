"""A model for cells that other launchers start: it does as it is told."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import signal
import time
from pathlib import Path

import torch


class Told(torch.nn.Module):
    """A linear layer. `how`: work, raise, kill (the process that started the rank), wait or stuck.

    To wait is until there is a file "go" where the command was typed. One that is stuck hears no
    signal; before, it leaves a file "stuck.<process>" there.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(5, 2)
        self.how = how
        logging.getLogger("userlaunched").info("I %s", how)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "raise":
            raise ValueError("told to raise")
        if self.how == "kill":
            parent = multiprocessing.parent_process()
            assert parent is not None
            assert parent.pid is not None
            os.kill(parent.pid, signal.SIGKILL)
        if self.how == "stuck":
            Path(f"stuck.{os.getpid()}").touch()
            sum(itertools.repeat(0, 10**12))  # minutes in C code
        while self.how == "wait" and not Path("go").exists():
            time.sleep(0.05)
        out: torch.Tensor = self.layer(x)
        return out


class Sees(torch.nn.Linear):
    """The exercise's layer, which tells what its process may use when it is called."""

    def __init__(self) -> None:
        super().__init__(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        log = logging.getLogger("userlaunched")
        log.info("I see %s", os.environ.get("CUDA_VISIBLE_DEVICES"))
        if hasattr(os, "sched_getaffinity"):
            log.info("I run on %s", sorted(os.sched_getaffinity(0)))
        return super().forward(x)
