"""Saves the state of a run while it goes on.

Between two steps the state is copied to the host; a thread writes the copy while the next steps
run, all ranks together, over a group of their own. What the copies took is in no step's time.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import distributed as dist

from dpexp import __version__, checkpoint
from dpexp.checkpoint import STATE, Checkpoint
from dpexp.comm import Comm
from dpexp.config import to_plain
from dpexp.errors import ConfigError
from dpexp.failures import is_lost
from dpexp.files import write_whole
from dpexp.identity import strict_json
from dpexp.loop import Progress
from dpexp.plan import RunPlan
from dpexp.recorder import Recorder
from dpexp.timing import now_s
from dpexp.training import Training

if TYPE_CHECKING:  # with it comes torch's distributed checkpoint, which few runs need
    from dpexp.checkpoint_state import Taken

log = logging.getLogger(__name__)


def find(run: Path, plan: RunPlan, comm: Comm) -> Checkpoint | None:
    """The checkpoint in a run's folder that its ranks go on from; None: from the start.

    Each rank that is started asks for it, whoever started it and for whatever reason. A point where
    the ranks meet.

    Raises:
        ConfigError: it is of a run with other batches.
        RuntimeError: the ranks do not see the same ones.
    """
    found = checkpoint.newest(run)
    low, high = comm.extent([-1.0 if found is None else float(found.step)])
    if low != high:
        raise RuntimeError(
            f"one rank finds a checkpoint after {high[0]:.0f} steps and another one "
            f"{'none' if low[0] < 0 else f'after {low[0]:.0f}'}: {run} must be the same for all"
        )
    if comm.rank == 0:
        checkpoint.clear(run)
        checkpoint.forget_later(run, -1 if found is None else found.step)
    if found is not None and not {"loss", "parity", "label"} <= found.state.keys():
        raise ConfigError(
            "resume", str(found.path), f"{STATE} is damaged", fix="remove this checkpoint"
        )
    if found is not None and found.state.get("batch_rows") != plan.batch_rows:
        raise ConfigError(
            "batch_size",
            plan.config.batch_size,
            f"a step has {plan.batch_rows} rows over all devices, and had "
            f"{found.state.get('batch_rows')} before {found.path}",
            fix="the batch_size of the run's first start, or a new run without resume",
        )
    return found


@final
class Checkpoints:
    """The checkpoints of a run, seen from one rank.

    Args:
        run: the run's folder.
        began_from: the one that the run goes on from.
        training: None = there is nothing to save.
    """

    def __init__(
        self,
        run: Path,
        plan: RunPlan,
        comm: Comm,
        device: torch.device,
        training: Training | None,
        recorder: Recorder,
        progress: Progress,
        began_from: Checkpoint | None,
    ) -> None:
        self._run, self._plan, self._comm, self._device = run, plan, comm, device
        self._training, self._recorder, self._progress = training, recorder, progress
        self._began_from = began_from
        config = plan.config.checkpoint
        self._every_s, self._every_steps, self._keep = (
            config.every_s,
            config.every_steps,
            config.keep,
        )
        self._saves = self._every_s is not None or self._every_steps is not None
        self._pool: ThreadPoolExecutor | None = None
        self._group: dist.ProcessGroup | None = None
        self._under_way: Future[None] | None = None
        self._saved_s = now_s()
        self._copy_s = self._write_s = 0.0
        self._count = self._bytes = 0
        self._last: int | None = None
        self.failures: list[str] = []
        self._failing = False  # the last save has failed

    def begin(self) -> tuple[str, ...]:
        """Put the checkpoint that the run goes on from into what was built.

        All ranks call it, before the first step.

        Returns:
            Notes on it.

        Raises:
            ConfigError: it cannot be loaded, or what is to be saved holds what cannot be.
        """
        found = self._began_from
        if self._training is None or (found is None and not self._saves):
            return ()
        from dpexp import checkpoint_state, checkpoint_storage

        self._group = self._comm.aside(self._plan.config.parallel.timeout_s)
        checkpoint_storage.quiet()
        if self._saves:
            # What cannot be saved is told now, and what is made once is not made between two steps.
            checkpoint_state.take(self._plan, self._comm, self._device, self._training)
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            self._saved_s = now_s()
        if found is None:
            return ()
        same = checkpoint_state.put_back(
            found, self._plan, self._comm, self._device, self._training, self._group
        )
        self._recorder.first_loss, self._recorder.last_loss = found.state["loss"]
        notes = [
            f"goes on from its checkpoint after {found.step} steps: its timing is of the steps "
            "after it alone, and it is no measure of an undisturbed run"
        ]
        if not same:
            notes.append(
                "other ranks or devices than before: random numbers (dropout, augmentation) are "
                "drawn anew, from the seed and the step"
            )
        hook = self._plan.config.parallel.comm_hook
        if hook is not None and hook.value == "powersgd":
            notes.append("parallel.comm_hook=powersgd: what it left out before is forgotten")
        return tuple(notes) if self._comm.rank == 0 else ()

    def due(self, step: int) -> bool:
        """Whether to save after this step, on every rank, whatever the time."""
        return self._pool is not None and (
            self._every_steps is not None and (step + 1) % self._every_steps == 0
        )

    def between(self, step: int, epoch: int) -> None:
        """After this step, where the ranks meet: save if it is time. All ranks call it."""
        if self._pool is None or self._training is None:
            return
        if not (self.due(step) or self._time_is_up()):
            return
        began_s = now_s()
        self._progress.during = "the checkpoint"
        self._wait()
        taken, problem = self._take()
        self._progress.during = ""
        self._saved_s = now_s()
        self._copy_s += self._saved_s - began_s
        if taken is None:
            self._failed(checkpoint.name_of(step + 1), problem)
        else:
            state = self._state(taken, step + 1, epoch)
            self._under_way = self._pool.submit(self._write, taken, state)
        self._recorder.resume()

    def _take(self) -> tuple[Taken | None, str]:
        """The state; None on all ranks, and why, if one of them now has what cannot be saved.

        Some optimizers make their state in the first step, after :meth:`begin` has looked.
        """
        from dpexp.checkpoint_state import take

        assert self._training is not None
        taken, problem = None, "another rank has what cannot be saved"
        try:
            taken = take(self._plan, self._comm, self._device, self._training)
        except ConfigError as error:
            problem = str(error)
        _, (missing,) = self._comm.extent([float(taken is None)])
        return (None if missing else taken), problem

    def summary(self) -> dict[str, Any] | None:
        """What was saved so far; None where nothing is and the run began at its beginning."""
        if self._pool is None and self._began_from is None:
            return None
        return {
            "count": self._count,
            "last_step": self._last,
            "copy_s": self._copy_s,
            "write_s": self._write_s,
            "bytes": self._bytes,
            "failed": len(self.failures),
            "folder": checkpoint.FOLDER,
            "gone_on_from": None if self._began_from is None else self._began_from.step,
        }

    def end(self) -> None:
        """Wait for the save that is under way. No thread is left."""
        self._wait()
        if self._pool is not None:
            self._pool.shutdown()

    def notes(self) -> tuple[str, ...]:
        """That a save failed, which ends no run."""
        if not self.failures or self._comm.rank:
            return ()
        return (f"{len(self.failures)} checkpoints could not be saved: {self.failures[-1]}",)

    def _time_is_up(self) -> bool:
        """By rank 0's clock; not while a rank still writes. The same on every rank."""
        if self._every_s is None:
            return False
        due = self._comm.rank == 0 and now_s() - self._saved_s >= self._every_s
        busy = self._under_way is not None and not self._under_way.done()
        _, (any_due, any_busy) = self._comm.extent([float(due), float(busy)])
        return any_due > 0 and not any_busy

    def _wait(self) -> None:
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None

    def _state(self, taken: Taken, step: int, epoch: int) -> dict[str, Any]:
        plan, recorder = self._plan, self._recorder
        return {
            "format": checkpoint.FORMAT,
            "step": step,
            "epoch": epoch,
            "taken_unix_s": time.time(),
            "dpexp": __version__,
            "torch": torch.__version__,
            "label": plan.label,
            "ranks": self._comm.world_size,
            "num_devices": plan.num_devices,
            "device_type": plan.device_type,
            "batch_rows": plan.batch_rows,
            "loss": [recorder.first_loss, recorder.last_loss],
            "parity": strict_json(self._progress.parity),
            "config": strict_json(to_plain(plan.config)),
            **taken.plain,
        }

    def _failed(self, name: str, reason: str) -> None:
        self.failures.append(f"{name}: {reason}")
        # All ranks meet it: one tells it, and once until a save succeeds.
        told, self._failing = self._failing or self._comm.rank > 0, True
        # A lost peer is told as the end of the run, which it is.
        level = logging.INFO if is_lost(reason) else logging.WARNING
        if not told:
            log.log(level, "the checkpoint %s could not be saved: %s", name, reason)

    def _write(self, taken: Taken, state: dict[str, Any]) -> None:
        """In the thread: all ranks write into a folder that rank 0 gives its name at the end."""
        from dpexp import checkpoint_storage

        began_s = now_s()
        folder = checkpoint.folder_of(self._run)
        name = checkpoint.name_of(state["step"])
        part = folder / f".{name}.part"
        try:
            checkpoint_storage.write(taken.tensors, part, self._group)
            if self._comm.rank == 0:
                sizes = {path.name: path.stat().st_size for path in part.iterdir()}
                text = json.dumps({**state, "files": sizes}, allow_nan=False)
                write_whole(part / STATE, text + "\n")
                part.rename(folder / name)
                checkpoint.prune(self._run, self._keep)
                self._bytes = sum(sizes.values()) + len(text)
        except Exception as error:  # noqa: BLE001  # no room, a lost peer: the run goes on
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            needed = sum(each.numel() * each.element_size() for each in taken.tensors.values())
            self._failed(name, checkpoint.no_room(self._run, needed) + reason)
            if self._comm.rank == 0:
                shutil.rmtree(part, ignore_errors=True)
            return
        finally:
            self._write_s += now_s() - began_s
        self._failing = False
        self._count += 1
        self._last = state["step"]
