"""Around a launcher that runs cells in other processes: what it loses, and how it is stopped.

With Hydra's basic launcher a cell runs here, and its end is written here. With the others a cell's
process may be killed, by the system or by a signal to the sweep; those launchers then give up and
keep nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, final

import psutil
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from dpexp import console, env, slurm
from dpexp.cell import announce
from dpexp.config import load
from dpexp.errors import ConfigError
from dpexp.launched_cell import WIND_DOWN_S
from dpexp.launcher_fixes import patient_submitit, private_ray
from dpexp.launchers import BASIC, LOCAL, RAY, SLURM, name_of, target_of
from dpexp.lost_cells import record_ended, record_lost
from dpexp.records import read_run
from dpexp.slurm_jobs import EndedBySlurmError, SlurmJobs, as_slurm_jobs
from dpexp.slurm_requests import Request, request_of
from dpexp.stopping import ECHO_S, GRACE_S, Stop, answer_with

POLL_S = 0.05
TIDY_S = 1.0


class _Stop(BaseException):
    """Leaves the launcher, which must not catch it."""


def careful_launcher(
    hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
) -> Launcher:
    """The launcher that `config` names; with others than the basic one, this module around it."""
    launcher = Plugins.instance().instantiate_launcher(
        hydra_context=hydra_context, task_function=task_function, config=config
    )
    if target_of(config.hydra) == BASIC:
        return launcher
    return CarefulLauncher(launcher, hydra_context, config)


@final
class CarefulLauncher(Launcher):
    """Gives every cell an end on disk, and ends every process, whatever the launcher does."""

    def __init__(self, inner: Launcher, context: HydraContext, config: DictConfig) -> None:
        self._inner = inner
        self._context = context
        self._config = config
        self._folder = Path(config.hydra.sweep.dir)
        self._others: set[int] = set()  # processes that are not the launcher's
        self._stopped_by: int | None = None
        self._told_at = 0.0
        self._jobs: SlurmJobs | None = None  # elsewhere, not below this process
        # When a launcher's own process ends, those below it are no children of this one any more.
        self._seen: list[psutil.Process] = []

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self._inner.setup(hydra_context=hydra_context, task_function=task_function, config=config)

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Launch all jobs and wait for them.

        Raises:
            ConfigError: what the cells need cannot be asked for; no job was started.
            HydraException: the launcher could not start a single one.
            Stop: a signal came.
        """
        this = psutil.Process()
        env.announce_sweep(socket.gethostname(), this.pid, this.create_time())
        self._others = {child.pid for child in this.children(recursive=True)}
        with _signals(self._stop):
            try:
                with self._surroundings():
                    returns = self._inner.launch(job_overrides, initial_job_idx)
            except BaseException as error:
                self._end_all()
                if self._stopped_by is not None:  # some launchers turn _Stop into another error
                    raise self._stopped(self._stopped_by) from None
                if not isinstance(error, Exception) or isinstance(error, ConfigError):
                    raise
                return self._after_failure(job_overrides, initial_job_idx, error)
        return self._ended(returns, job_overrides, initial_job_idx)

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        target = target_of(self._config.hydra)
        with ExitStack() as stack:
            if target == LOCAL:
                stack.enter_context(patient_submitit())
            if target == SLURM:
                self._jobs = stack.enter_context(as_slurm_jobs(self._requests()))
            if target == RAY:
                stack.enter_context(private_ray(self._inner))
            yield

    def _requests(self) -> Callable[[Sequence[str]], Request]:
        """What a cell's job asks for, by its overrides."""
        launcher = self._config.hydra.launcher

        @lru_cache(maxsize=1)
        def has_gpus() -> bool:
            found = slurm.has_gpus(launcher.get("partition"))
            announce([f"device=auto: the cluster has {'' if found else 'no '}GPUs"])
            return found

        def request(overrides: Sequence[str]) -> Request:
            try:
                config = load(OmegaConf.create(self._cell(0, overrides)[1]))
            except ConfigError:  # the job refuses it, and that is its result
                return Request()
            return request_of(config, launcher, has_gpus)

        return request

    def _stopped(self, signum: int) -> Stop:
        """A signal came, and no process is left: cells that are without an end get one."""
        for folder in self._unfinished():
            record_lost(folder, "interrupted", "the sweep was stopped")
        stop = Stop(signum)
        console.say(f"dpexp: {stop}")
        return stop

    def _after_failure(
        self, jobs: Sequence[Sequence[str]], first: int, error: Exception
    ) -> Sequence[JobReturn]:
        """The launcher gave up: cells that have no result get one that says so."""
        name = name_of(self._config.hydra)
        text = " ".join(str(error).split()) or type(error).__name__
        if not any(self._folder.glob("*/run.json")) and not self._unfinished():
            raise HydraException(f"hydra/launcher={name}: {text}") from error
        console.say(f"dpexp: the launcher {name} gave up: {type(error).__name__}: {text}")
        lost = JobReturn(status=JobStatus.FAILED)
        lost.return_value = error
        return self._ended([lost] * len(jobs), jobs, first)

    def _ended(
        self, returns: Sequence[JobReturn], jobs: Sequence[Sequence[str]], first: int
    ) -> Sequence[JobReturn]:
        """What the jobs returned; for those that came to no end, what is on disk."""
        if all(job.status is JobStatus.COMPLETED for job in returns):
            return returns
        numbered = enumerate(zip(returns, jobs, strict=True), start=first)
        return [
            job if job.status is JobStatus.COMPLETED else self._found(number, overrides, job)
            for number, (job, overrides) in numbered
        ]

    def _found(self, number: int, overrides: Sequence[str], lost: JobReturn) -> JobReturn:
        """What a lost job's folder has, after a record was written if there was none."""
        folder, config = self._cell(number, overrides)
        error = lost._return_value
        if isinstance(error, EndedBySlurmError):
            record_ended(folder, error.record, config)
        elif not (folder / "run.json").exists():
            said = "its process ended without a word"
            if not (folder / ".hydra").exists():
                said = "it did not begin"
            text = f"{said} ({type(error).__name__}: {error})"
            record_lost(folder, "failed", text, config)
        found = JobReturn(status=JobStatus.COMPLETED)
        throughput = read_run(folder / "run.json").get("throughput") or {}
        found.return_value = throughput.get("samples_per_s")
        return found

    def _cell(self, number: int, overrides: Sequence[str]) -> tuple[Path, dict[str, Any]]:
        """The folder of a job and its config, as its process would find them."""
        loader = self._context.config_loader
        composed = loader.load_sweep_config(self._config, list(overrides))
        with open_dict(composed):
            composed.hydra.job.num = number
        folder = self._folder / str(OmegaConf.select(composed, "hydra.sweep.subdir"))
        plain: Any = OmegaConf.to_container(composed, resolve=False)
        del plain["hydra"]
        return folder, plain

    def _unfinished(self) -> list[Path]:
        """Folders of cells that have begun and have no result."""
        began = [path.parent for path in self._folder.glob("*/.hydra")]
        return [folder for folder in began if not (folder / "run.json").exists()]

    def _stop(self, signum: int, _frame: Any) -> None:
        """Handler of a signal to the sweep: let the cells write what they have, then stop."""
        if self._stopped_by is not None and time.time() - self._told_at < ECHO_S:
            return
        if self._stopped_by is not None:  # told twice: at once
            self._end_all(at_once=True)
            os._exit(128 + signum)
        self._stopped_by, self._told_at = signum, time.time()
        if self._jobs is not None:  # they are not below this process; _end_all waits for them
            raise _Stop
        self._seen = self._processes()
        cells = [child for child in self._seen if _leads_a_group(child)]
        for cell in cells:
            with contextlib.suppress(psutil.NoSuchProcess):
                cell.terminate()
        for _ in range(int(WIND_DOWN_S / POLL_S)):
            if not self._unfinished() or not any(cell.is_running() for cell in cells):
                break
            time.sleep(POLL_S)
        # A cell that is done removes what its fork server has on disk, then ends it.
        psutil.wait_procs([each for each in self._seen if _serves(each, cells)], timeout=TIDY_S)
        raise _Stop

    def _processes(self) -> list[psutil.Process]:
        children = psutil.Process().children(recursive=True)
        return [child for child in children if child.pid not in self._others]

    def _end_all(self, *, at_once: bool = False) -> None:
        """End what the launcher has started and what that has started."""
        if self._jobs is not None:
            try:
                self._jobs.cancel(at_once=at_once)
            except slurm.NoAnswerError as error:
                console.say(f"dpexp: jobs of this sweep may go on: {error}")
        known = {*self._seen, *self._processes()}
        found = [child for child in known if not _ends_by_itself(child)]
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=GRACE_S)


def _serves(process: psutil.Process, cells: Sequence[psutil.Process]) -> bool:
    """Whether it is a cell's own child, but for those that end by themselves."""
    try:
        return process.parent() in cells and not _ends_by_itself(process)
    except psutil.NoSuchProcess:
        return False


def _leads_a_group(process: psutil.Process) -> bool:
    """Whether a cell has settled in it (launched_cell.py)."""
    try:
        return os.getpgid(process.pid) == process.pid
    except ProcessLookupError:
        return False


def _ends_by_itself(process: psutil.Process) -> bool:
    """multiprocessing's and loky's trackers remove what the others leave, and end after them."""
    try:
        return "resource_tracker" in " ".join(process.cmdline())
    except psutil.Error:
        return True


@contextmanager
def _signals(handler: Any) -> Iterator[None]:
    saved = answer_with(handler)
    try:
        yield
    finally:
        for signum, before in saved.items():
            signal.signal(signum, before)
