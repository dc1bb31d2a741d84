"""What Slurm knows: why it ended a job, where a step's first node is. By its commands; no torch."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dpexp import env, env_slurm
from dpexp.errors import NO_VALUE, ConfigError
from dpexp.records import ErrorRecord, RunResult

# A controller that is restarted, or has much to do, may be slow; a job that is ended has no time.
ANSWER_S = 5.0
# ErrorRecord.type of a run that Slurm has ended.
TIME_LIMIT, CANCELLED, OTHER_END = "SlurmTimeLimit", "SlurmCancelled", "SlurmEnd"
_ACTIVE = (
    "CONFIGURING",
    "COMPLETING",
    "PENDING",
    "REQUEUED",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "RESIZING",
    "RESV_DEL_HOLD",
    "RUNNING",
    "SIGNALING",
    "STAGE_OUT",
    "STOPPED",
    "SUSPENDED",
)
_FORMAT = "%i|%T|%r|%l|%N"
_PORTS = (20000, 12000)  # the first, and how many: below those that systems give to connections


@dataclass(frozen=True)
class SlurmJob:
    """A job as the controller has it: minutes after its end it is forgotten."""

    name: str  # "7", or "7_0" in an array
    state: str  # Slurm's own word
    reason: str
    limit: str  # days-hours:minutes:seconds, as Slurm writes it
    nodes: str

    @property
    def active(self) -> bool:
        """Whether it waits, runs or is being ended."""
        return self.state in _ACTIVE


class NoAnswerError(Exception):
    """The controller could not be asked: that says nothing of a job."""


def jobs(ids: Sequence[str]) -> dict[str, SlurmJob]:
    """Those of these jobs that the controller remembers; of an array all its jobs.

    Raises:
        NoAnswerError: it does not answer.
    """
    asked = _told(
        "squeue", "--noheader", "--array", "--states=all", f"--format={_FORMAT}",
        f"--jobs={','.join(ids)}",
    )  # fmt: skip
    if asked.returncode != 0 and "Invalid job id" not in asked.stderr:
        raise NoAnswerError(asked.stderr.strip())
    lines = (line.split("|") for line in asked.stdout.splitlines())
    return {fields[0]: SlurmJob(*fields) for fields in lines if len(fields) == 5}


def cancel(ids: Sequence[str], *, at_once: bool = False) -> None:
    """End jobs: with time to write what they have (Slurm's KillWait), or without.

    Raises:
        NoAnswerError: the controller does not answer.
    """
    hard = ("--signal=KILL", "--full") if at_once else ()
    asked = _told("scancel", "--quiet", *hard, *ids)
    if asked.returncode != 0:
        raise NoAnswerError(asked.stderr.strip())


def refuse_jobs_below(folder: Path) -> None:
    """Refuse to go on with a sweep while jobs of its earlier start wait or run.

    Raises:
        ConfigError: there are some. None where Slurm is not here, or does not answer.
    """
    try:
        asked = _told("squeue", "--noheader", "--array", "--me", "--format=%i|%o")
    except NoAnswerError:
        return
    lines = (line.split("|", 1) for line in asked.stdout.splitlines() if "|" in line)
    place = f"{folder.resolve()}/"
    queued = " ".join(name for name, script in lines if script.startswith(place))
    if queued:
        raise ConfigError(
            "resume",
            str(folder),
            f"Slurm jobs of the earlier start still wait or run: {queued}",
            fix=f"wait for their end, or scancel {queued}",
        )


def has_gpus(partition: str | None) -> bool:
    """Whether a node of the partition (None = the default one) has GPUs to ask for.

    Raises:
        NoAnswerError: the controller does not answer.
    """
    chosen = () if partition is None else (f"--partition={partition}",)
    asked = _told("sinfo", "--noheader", "--format=%P|%G", *chosen)
    if asked.returncode != 0:
        raise NoAnswerError(asked.stderr.strip())
    lines = [line.split("|", 1) for line in asked.stdout.splitlines() if "|" in line]
    default = [line for line in lines if line[0].endswith("*")] if partition is None else []
    resources = [entry for line in default or lines for entry in line[1].split(",")]
    return any(entry.split(":")[0] == "gpu" for entry in resources)


def explained(result: RunResult) -> RunResult:
    """The result with Slurm's reason, where Slurm has ended the run.

    A signal says only that somebody wants the end. A rank may hear it before the process that
    watches it, so a crash may be meant too.
    """
    name, error = env_slurm.job(), result.error
    if name is None or error is None or error.kind not in ("interrupted", "crash"):
        return result
    try:
        job = jobs([name]).get(name)
    except NoAnswerError as silent:
        return replace(result, notes=[*result.notes, f"Slurm did not say why: {silent}"])
    ended = None if job is None else why(job, told_to_end=True)
    if ended is not None:
        return with_reason(result, ended)
    if error.kind == "interrupted" and env.ranks_are_slurms():
        hint = "srun ends all tasks so when one is lost: its messages name the first"
        return replace(result, error=replace(error, message=f"{error.message} ({hint})"))
    return result


def with_reason(result: RunResult, ended: ErrorRecord) -> RunResult:
    """The result of a run that came to no end, with what :func:`why` says of its job."""
    error = result.error or ended
    told = replace(error, kind=ended.kind, type=ended.type, message=ended.message)
    return replace(result, status=status_of(ended), error=told)


def status_of(ended: ErrorRecord) -> str:
    """The status of a run that ended so."""
    return "interrupted" if ended.kind == "interrupted" else "failed"


def why(job: SlurmJob, *, told_to_end: bool = False) -> ErrorRecord | None:
    """Why Slurm has ended a job, or is ending it; None where it has not.

    Args:
        told_to_end: the job has been given a signal. While it ends Slurm does not say more.
    """
    if job.reason == "TimeLimit" or job.state == "TIMEOUT":
        text = (
            f"Slurm job {job.name} was over its time limit of {job.limit}. "
            "Try: a larger hydra.launcher.timeout_min (without a launcher: --time of sbatch or "
            "srun), or fewer steps; what has checkpoints goes on from the last one when resumed"
        )
        return ErrorRecord("time_limit", TIME_LIMIT, text, phase="launch")
    if job.state == "CANCELLED" or (job.state == "COMPLETING" and told_to_end):
        how = "was cancelled (scancel, by its user or an administrator)"
        if job.state == "COMPLETING":
            how = "was ended before its time limit (scancel, or its script came to its end)"
        text = f"Slurm job {job.name} {how}"
        return ErrorRecord("interrupted", CANCELLED, text, phase="launch")
    if job.state == "OUT_OF_MEMORY":
        text = (
            f"Slurm job {job.name} was over its memory limit. Try: a larger hydra.launcher.mem_gb"
        )
        return ErrorRecord("oom", "SlurmOutOfMemory", text, phase="launch")
    if job.state in ("NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "FAILED"):
        reason = "" if job.reason in ("", "None") else f", reason {job.reason}"
        where = f" on {job.nodes}" if job.nodes else ""
        text = (
            f"Slurm job {job.name}{where} ended as {job.state}{reason}; its output is in "
            f".submitit/{job.name}"
        )
        return ErrorRecord("crash", OTHER_END, text, phase="launch")
    return None


def take_rank(*, in_sweep: bool = False) -> env.OuterLauncher:
    """Be the rank that this task of a Slurm step is. Safe to call again.

    Raises:
        ConfigError: Slurm has not started this process as a task of one run.
    """
    step = env_slurm.step()
    problem = fix = ""
    if in_sweep and not env_slurm.in_submitit_job():
        problem = "this sweep runs its cells itself, and is no job of submitit's"
        fix = "hydra/launcher=submitit_slurm, or parallel.ranks_from=auto"
    elif env.outer_launcher() is not None and not env.ranks_are_slurms():
        problem = "torchrun has started this process (TORCHELASTIC_RUN_ID and others are set)"
        fix = "parallel.ranks_from=auto, or unset TORCHELASTIC_RUN_ID"
    elif step is None:
        problem = "srun has not started this process (SLURM_STEP_ID and others are not set)"
        fix = "srun --ntasks=2 python -m dpexp …, or parallel.ranks_from=auto"
    if step is None or problem:
        raise ConfigError("parallel.ranks_from", "slurm", problem, fix=fix)
    return env_slurm.take_rank(step, lambda: first_address(step.nodes), port_of(step))


def unused() -> list[str]:
    """A note where Slurm's variables tell of tasks that a run does not wait for."""
    tasks = env_slurm.tasks()
    if tasks == 1 or env.ranks_are_slurms():
        return []
    return [
        f"Slurm's variables tell of {tasks} tasks: not used, the ranks are dpexp's own (with srun "
        "and parallel.ranks_from=slurm each task is a rank)"
    ]


def port_of(step: env_slurm.Step) -> int:
    """The port where rank 0 of a step waits for the others, unless MASTER_PORT is set."""
    return _PORTS[0] + (16 * step.job_id + step.step_id) % _PORTS[1]


def first_address(nodes: str) -> str:
    """The address of the first node of a list in Slurm's form, ``n[0-3,7]``.

    Raises:
        ConfigError: Slurm does not tell.
    """
    try:
        name = _told("scontrol", "show", "hostnames", nodes).stdout.split()[0]
        if _resolves(name):
            return name
        shown = _told("scontrol", "--oneliner", "show", "node", name).stdout.split()
        return next(entry.split("=", 1)[1] for entry in shown if entry.startswith("NodeAddr="))
    except (NoAnswerError, IndexError, StopIteration) as error:
        raise ConfigError(
            "MASTER_ADDR",
            NO_VALUE,
            f"Slurm does not tell the address of the first node of {nodes!r}: {error}",
            fix="set MASTER_ADDR",
        ) from error


def _resolves(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True


def _told(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=ANSWER_S, check=False
        )
    except FileNotFoundError as error:
        raise NoAnswerError(f"{command[0]} is not installed here") from error
    except subprocess.TimeoutExpired as error:
        raise NoAnswerError(f"{command[0]} did not answer within {ANSWER_S:g} s") from error
