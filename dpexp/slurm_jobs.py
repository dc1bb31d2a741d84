"""A sweep's cells as jobs of Slurm: what each asks for, how it is awaited, how it is ended.

submitit submits one array with one set of parameters, and learns of an end from Slurm's accounting,
which not every cluster has. Here cells that ask for the same are an array, all arrays are submitted
at once, and the controller is asked.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

from hydra.core.utils import JobReturn, JobStatus

from dpexp import slurm
from dpexp.cell import announce
from dpexp.console import say
from dpexp.records import ErrorRecord
from dpexp.slurm_requests import Request
from dpexp.stopping import STOP_SIGNALS

# The controller serves the whole cluster: it is asked for all jobs together, and not often.
ASK_S = 5
# Slurm gives a job KillWait between SIGTERM and SIGKILL, 30 s unless an administrator says else.
END_S = 60.0
POLL_S = 0.5


@final
class EndedBySlurmError(RuntimeError):
    """A job came to no end of its own; `record` says why."""

    def __init__(self, record: ErrorRecord) -> None:
        self.record = record
        super().__init__(record.message)


@final
class SlurmJobs:
    """The jobs of one launch.

    Args:
        request: of a cell, by its overrides.
    """

    def __init__(self, request: Callable[[Sequence[str]], Request]) -> None:
        self._request = request
        self._ids: list[str] = []  # of arrays and of single jobs

    def submit(self, original: Any, executor: Any, delayed: Sequence[Any]) -> list[Any]:
        """Submit all cells, those that ask for the same as one array. In their order."""
        groups: dict[Request, list[int]] = {}
        for index, each in enumerate(delayed):
            groups.setdefault(self._request(each.args[0]), []).append(index)
        found: dict[int, Any] = {}
        refusals = []
        for request, indices in groups.items():
            wanted = self._with(request, executor)
            try:
                with _undisturbed():
                    jobs = original(wanted, [delayed[index] for index in indices])
                    self._ids.append(jobs[0].job_id.split("_")[0])
            except Exception as error:  # noqa: BLE001  # what sbatch said; the others may well run
                refusals.append(error)
                jobs = [_Refused(error)] * len(indices)
            found.update(zip(indices, jobs, strict=True))
        if len(refusals) == len(groups):
            raise refusals[0]
        announce(
            [f"submitted as Slurm jobs {' '.join(self._ids)}; they write to {executor.folder}"]
        )
        return [found[index] for index in range(len(delayed))]

    def _with(self, request: Request, executor: Any) -> Any:
        """An executor like this one that asks for what the cells need."""
        wanted = type(executor)(executor.folder, executor.max_num_timeout)
        chosen = {**executor.parameters, "nodes": request.nodes}
        chosen["ntasks_per_node"] = request.tasks_per_node
        if request.gpus_per_node is not None:
            chosen["gpus_per_node"] = request.gpus_per_node
        # Since Slurm 22.05 srun does not take this over from the job: it would give one core.
        cores = chosen.get("cpus_per_task")
        own = [] if cores is None else [f"--cpus-per-task={cores}"]
        chosen["srun_args"] = ["--kill-on-bad-exit=1", *own, *chosen.get("srun_args", ())]
        more = dict(chosen.get("additional_parameters") or {})
        # A job that is run again would find the folder of its first attempt.
        if not {"requeue", "no_requeue"} & {key.replace("-", "_") for key in more}:
            more["no_requeue"] = True
        if chosen.get("array_parallelism") == 1 and self._ids and "dependency" not in more:
            more["dependency"] = f"afterany:{self._ids[-1]}"  # one at a time, over all arrays
        chosen["additional_parameters"] = more
        wanted.parameters = chosen
        return wanted

    def cancel(self, *, at_once: bool = False) -> None:
        """End all jobs, and wait until they are gone; not so `at_once`.

        Raises:
            NoAnswerError: Slurm cannot be told.
        """
        if not self._active():
            return
        if not at_once:
            told = "a second Ctrl-C does not wait for what their cells write"
            say(f"dpexp: cancelling Slurm jobs {' '.join(self._ids)}; {told}")
        slurm.cancel(self._ids, at_once=at_once)
        if at_once:
            return
        for _ in range(int(END_S / POLL_S)):
            if not self._active():
                return
            time.sleep(POLL_S)

    def _active(self) -> bool:
        try:
            return bool(self._ids) and any(job.active for job in slurm.jobs(self._ids).values())
        except slurm.NoAnswerError:
            return True


@final
class _Refused:
    """A job that Slurm did not take."""

    def __init__(self, error: Exception) -> None:
        # submitit's message ends with what sbatch said.
        said = [line.strip() for line in str(error).splitlines() if "sbatch:" in line]
        self._said = " ".join(said) or " ".join(str(error).split())

    def results(self) -> list[JobReturn]:
        text = f"Slurm did not take the job: {self._said}"
        return [_lost(EndedBySlurmError(ErrorRecord("crash", "SlurmRefused", text)))]


def _lost(error: Exception) -> JobReturn:
    lost = JobReturn(status=JobStatus.FAILED)
    lost.return_value = error
    return lost


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Between sbatch and the note of the job's id no signal may come: the job would be lost.

    What is started here inherits that: Ctrl-C in a terminal does not end sbatch either.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def as_slurm_jobs(request: Callable[[Sequence[str]], Request]) -> Iterator[SlurmJobs]:
    """While submitit's launcher is at work: its jobs are submitted and awaited as described above.

    A job has no signal before its time limit: submitit would take it for a wish to run again.
    """
    from submitit.slurm.slurm import SlurmExecutor, SlurmJob

    jobs = SlurmJobs(request)
    submit = SlurmExecutor._internal_process_submissions
    script = SlurmExecutor._make_submission_file_text
    results, watcher = SlurmJob.results, SlurmJob.watcher

    def quiet_script(executor: Any, command: str, uid: str) -> str:
        lines = script(executor, command, uid).splitlines(keepends=True)
        asked = executor.parameters.get("additional_parameters") or {}
        return "".join(
            line for line in lines if "signal" in asked or not line.startswith("#SBATCH --signal=")
        )

    SlurmExecutor._internal_process_submissions = lambda executor, delayed: jobs.submit(
        submit, executor, delayed
    )
    SlurmExecutor._make_submission_file_text = quiet_script
    SlurmJob.results = lambda job: _results(job, results)
    SlurmJob.watcher = _controllers_word()
    try:
        yield jobs
    finally:
        SlurmExecutor._internal_process_submissions = submit
        SlurmExecutor._make_submission_file_text = script
        SlurmJob.results, SlurmJob.watcher = results, watcher


def _controllers_word() -> Any:
    """What submitit asks for the states of its jobs; it then knows ``ended``, jobs by name."""
    from submitit.slurm.slurm import SlurmInfoWatcher

    class Watcher(SlurmInfoWatcher):  # type: ignore[misc]
        ended: dict[str, slurm.SlurmJob]

        def update(self) -> None:
            self._last_status_check = time.time()
            self._num_calls += 1
            names = self._registered - self._finished
            if not names:
                return
            try:
                known = slurm.jobs(sorted({name.split("_")[0] for name in names}))
            except slurm.NoAnswerError:  # it is restarted, say: that is no end of a job
                return
            for name in names:
                job = known.get(name)
                over = job is None or not job.active
                self._info_dict[name] = {"State": "GONE" if over else "RUNNING"}
                if over:
                    self._finished.add(name)
                if over and job is not None:
                    self.ended[name] = job

    watcher = Watcher(delay_s=ASK_S)
    watcher.ended = {}
    return watcher


def _results(job: Any, original: Callable[[Any], Any]) -> list[Any]:
    """What a job has returned; for one that came to no end, a failed JobReturn."""
    from submitit.core.utils import FailedJobError, UncompletedJobError

    if job.num_tasks > 1:  # the ranks of one run: the first has its result
        return _results(job.task(0), original)
    job.wait()
    ended = job.watcher.ended.get(job.job_id)
    record = None if ended is None else slurm.why(ended)
    if record is not None and not job.paths.result_pickle.exists() and ended.state != "FAILED":
        return [_lost(EndedBySlurmError(record))]  # it had no time to leave one
    try:
        return list(original(job))
    except FailedJobError as error:
        return [_lost(RuntimeError(_last_line(error)))]
    except UncompletedJobError as error:
        return [_lost(EndedBySlurmError(record) if record else RuntimeError(_first_line(error)))]


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _last_line(error: Exception) -> str:
    """Of the traceback that submitit quotes between lines of dashes."""
    quoted = str(error).split("-" * 22)
    lines = quoted[1].strip().splitlines() if len(quoted) > 1 else []
    return lines[-1] if lines else _first_line(error)
