"""A torch.profiler trace of a few more steps, after the timed ones.

The profiler slows what it watches, so nothing that a run reports is taken from these steps. They
come after the final weights are saved, and what they do to the model is thrown away.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from dpexp import env
from dpexp.assembly import Assembly
from dpexp.batches import seed_all, seed_of_rank
from dpexp.build import build
from dpexp.comm import Comm
from dpexp.disturb import disturbed
from dpexp.feed import make_feed, pins
from dpexp.loop import Progress, Work, forward_backward
from dpexp.peak import devices_of
from dpexp.plan import RunPlan
from dpexp.transfer import make_transfer

STEPS = 3


def take_trace(folder: Path, plan: RunPlan, comm: Comm, work: Work, built: Assembly) -> None:
    """Run :data:`STEPS` steps under the profiler and write ``trace.rank<r>.json``.

    All ranks call it. The steps begin with the run's first batch. They change the model. Of very
    many ranks the first one of each host writes.

    Args:
        work: of the run; its recorder gets nothing of these steps.
        built: of the run; its strategy is not closed yet.
    """
    config = plan.config
    until = replace(config.until, ci=None)
    short = replace(plan, config=replace(config, epochs=None, steps=STEPS, until=until))
    device = built.strategy.device
    seed_all(config.seed)
    feed = make_feed(
        build("dataset", config.dataset), short, built.strategy.choose_rows, comm, device
    )
    transfer = make_transfer(device, channels_last=config.prepare.channels_last, pin=pins(plan))
    seed_all(seed_of_rank(config.seed, comm.rank))
    work.shapes.on_call = work.shapes.on_batch = None  # these steps are not printed
    inject = replace(config.inject, die_rank=None, hang_rank=None)
    batches = transfer.ahead(disturbed(feed.batches, inject, comm.rank))
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(activities=activities, experimental_config=_every_thread())
    with _without_markers():
        profiler.start()
    labels = _Labels()
    for _ in range(STEPS):
        labels.phase = "data"
        item = next(batches, None)
        if item is None:
            break
        _step(item, replace(work, transfer=transfer, progress=labels), labels)
    labels.close()
    if device.type == "cuda":
        for each in devices_of(plan, comm.rank):
            torch.cuda.synchronize(each)
    with _without_markers():
        profiler.stop()
    next(batches, None)  # loader processes end when they are asked for more than there is
    outer = env.outer_launcher()
    if not plan.by_host or outer is None or outer.local_rank == 0:
        _write(profiler, folder / f"trace.rank{comm.rank}.json")


def _step(item: Any, work: Work, labels: _Labels) -> None:
    """One step as in the loop, with labels in place of marks and records."""
    batch, fetched = item
    inputs = work.split(fetched)
    labels.phase = "transfer"
    inputs = work.transfer.place(inputs)
    with torch.set_grad_enabled(work.training is not None):
        forward_backward(inputs, len(batch.indices), work, [])
    if work.training is not None:
        labels.phase = "optimizer"
        work.training.update(work.strategy)
    labels.phase = "other"


@contextmanager
def _without_markers() -> Iterator[None]:
    """Keep the profiler's own two lines ("USDT: … profiler_start") off the user's terminal.

    They are written by compiled code, so only the descriptor can be turned away. All other lines
    are passed on.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            caught.seek(0)
            for line in caught:
                if not line.startswith(b"USDT:"):
                    os.write(2, line)


def _every_thread() -> Any:
    # Else the profiler sees nothing of the threads of virtual devices.
    return _ExperimentalConfig(profile_all_threads=True)


def _write(profiler: Any, path: Path) -> None:
    """The trace as Chrome's JSON, whole or not at all."""
    with tempfile.TemporaryDirectory(prefix=f".{path.stem}.", dir=path.parent) as name:
        whole = Path(name) / path.name
        profiler.export_chrome_trace(str(whole))
        whole.replace(path)


@final
class _Labels(Progress):
    """Labels what happens by the phase that the loop says it is in.

    A label lasts from one change of the phase to the next, so they lie side by side.
    """

    def __init__(self) -> None:
        self._open: list[Any] = []
        super().__init__()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "phase" and value != "set-up":
            self.close()
            label: Any = record_function(value)  # its methods have no types
            label.__enter__()
            self._open.append(label)

    def close(self) -> None:
        """End the label that is open."""
        while self._open:
            self._open.pop().__exit__(None, None, None)
