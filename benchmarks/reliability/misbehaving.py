"""A model and a dataset that do what they should not, in one cell of a sweep and once only."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import deque
from itertools import repeat
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.utils.data import Dataset, get_worker_info

# The sweep's middle cell is struck, at this step. A step takes so long there.
STRUCK_CELL = 1
AT_STEP = 12
PAUSE_S = 0.05
ROWS, FEATURES, TARGETS = 64, 5, 2
LONG_S = 600.0


def mark(place: str) -> None:
    """Leave the file whose time is that of the fault. Also disarms the model from then on."""
    with contextlib.suppress(FileExistsError):
        (Path(place) / "fault").touch(exist_ok=False)


def own_rank() -> int:
    """Of this process; 0 outside of a process group."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def fill(place: str) -> None:
    """Leave no room on the file system of `<place>/disk`."""
    with (Path(place) / "disk" / "filler").open("ab", buffering=0) as file:
        for size in (4096, 64, 1):
            with contextlib.suppress(OSError):
                while file.write(b"x" * size):
                    pass


class Model(nn.Module):
    """A linear layer; in the struck cell with a pause in each step, and with the fault `how`.

    Args:
        cell: of the sweep.
        place: a folder for `fault` (see :func:`mark`) and a file `ticks.<rank>` with one character
            for each call of the struck cell.
        how: a method's name, or ``calm``.
        rank: where it happens; -1 = on all.
    """

    def __init__(self, cell: int, place: str, how: str = "calm", rank: int = 0) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, TARGETS)
        self.armed = cell == STRUCK_CELL and not (Path(place) / "fault").exists()
        self.place, self.how, self.rank, self.calls = place, how, rank, 0
        if self.armed and how == "fill_at_the_end":
            # Ranks run this when all is written, just before they are gone.
            Finalize(None, self._fill, exitpriority=0)
        if self.armed and how == "hang_at_start" and rank in (-1, own_rank()):
            self.hang(torch.empty(0))
        self.group: Any = None
        if self.armed and how == "collective":
            self.group = torch.distributed.new_group()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(rows)
        if not self.armed:
            return output
        # Before the call: the steps before it are over.
        with (Path(self.place) / f"ticks.{own_rank()}").open("a") as file:
            file.write(".")
        time.sleep(PAUSE_S)
        if self.calls == AT_STEP and self.rank in (-1, own_rank()):
            output = getattr(self, self.how)(output)
        self.calls += 1
        return output

    def _fill(self) -> None:
        mark(self.place)
        fill(self.place)

    def calm(self, output: torch.Tensor) -> torch.Tensor:
        """Nothing; also what the end of a cell has to do with it is elsewhere."""
        return output

    fill_at_the_end = hang_at_start = calm

    def kill(self, output: torch.Tensor) -> torch.Tensor:
        """SIGKILL."""
        mark(self.place)
        os.kill(os.getpid(), signal.SIGKILL)
        return output

    def terminate(self, output: torch.Tensor) -> torch.Tensor:
        """SIGTERM to this rank alone."""
        mark(self.place)
        os.kill(os.getpid(), signal.SIGTERM)
        return output

    def exit(self, output: torch.Tensor) -> torch.Tensor:
        """As a script ends."""
        mark(self.place)
        sys.exit(0)

    def exit_at_once(self, output: torch.Tensor) -> torch.Tensor:
        """Without unwinding."""
        mark(self.place)
        os._exit(0)

    def interrupt(self, output: torch.Tensor) -> torch.Tensor:
        """What Ctrl-C raises, without a signal."""
        mark(self.place)
        raise KeyboardInterrupt

    def boom(self, output: torch.Tensor) -> torch.Tensor:
        """An exception in forward."""
        mark(self.place)
        raise ValueError("boom")

    def hook(self, output: torch.Tensor) -> torch.Tensor:
        """An exception in a hook of backward."""
        output.register_hook(self.boom)  # type: ignore[no-untyped-call]
        return output

    def hang(self, output: torch.Tensor) -> torch.Tensor:
        """Python code that does not come to an end."""
        mark(self.place)
        time.sleep(LONG_S)
        return output

    def stuck(self, output: torch.Tensor) -> torch.Tensor:
        """C code that does not let go of the interpreter, so that no signal handler runs."""
        mark(self.place)
        deque(repeat(0), maxlen=0)
        return output

    def collective(self, output: torch.Tensor) -> torch.Tensor:
        """A collective that the other ranks never join."""
        mark(self.place)
        torch.distributed.all_reduce(torch.zeros(1), group=self.group)
        return output

    def memory(self, output: torch.Tensor) -> torch.Tensor:
        """More and more memory, all of it in use."""
        mark(self.place)
        held = []
        while True:
            held.append(torch.ones(2**24))

    def fill(self, output: torch.Tensor) -> torch.Tensor:
        """The disk becomes full."""
        self._fill()
        return output


class Rows(Dataset[Any]):
    """Random rows; fetching one of them has the fault `how` in the struck cell.

    Args:
        where: `worker` or `rank`: which process of the two.
    """

    def __init__(self, cell: int, place: str, how: str, where: str) -> None:
        self.rows = torch.rand(ROWS, FEATURES)
        self.armed = cell == STRUCK_CELL and not (Path(place) / "fault").exists()
        self.place, self.how, self.where, self.fetched = place, how, where, 0

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        # The last row of a batch of 4 each: 4 rows a step, on however many processes.
        if self.armed and self.where == ("worker" if get_worker_info() else "rank"):
            self.fetched += 1
            if self.fetched == 4 * AT_STEP // world_size():
                mark(self.place)
                if self.how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if self.how == "hang":
                    time.sleep(LONG_S)
                raise OSError(f"row {index} cannot be read")
        return self.rows[index], torch.zeros(TARGETS)


def world_size() -> int:
    """Number of ranks, as their environment has it; loader processes have it, too."""
    return int(os.environ.get("WORLD_SIZE", "1"))
