"""Cells as jobs: in groups, at once, with an end each. submitit and Slurm are stand-ins here."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dpexp import slurm
from dpexp.errors import ConfigError
from dpexp.slurm_jobs import EndedBySlurmError, SlurmJobs
from dpexp.slurm_requests import Request
from dpexp.stopping import STOP_SIGNALS


@dataclass
class Executor:
    """What is used of submitit's."""

    folder: str = "sweep/.submitit/%j"
    max_num_timeout: int = 0
    parameters: dict[str, Any] = field(default_factory=lambda: {"time": 60, "cpus_per_task": 3})


@dataclass
class Delayed:
    """A cell's call: its overrides come first."""

    args: tuple[list[str], ...]


@dataclass
class Job:
    """What sbatch has taken."""

    job_id: str
    cell: str


class Queue:
    """Takes what it is given, but for requests of many GPUs."""

    def __init__(self, most: int = 100) -> None:
        self.most = most
        self.asked: list[dict[str, Any]] = []

    def __call__(self, executor: Executor, delayed: Sequence[Delayed]) -> list[Job]:
        assert set(STOP_SIGNALS) <= signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self.asked.append(executor.parameters)
        if executor.parameters.get("gpus_per_node", 0) > self.most:
            raise RuntimeError("sbatch failed:\nsbatch: error: not so many\n")
        number = 10 * len(self.asked)
        names = (
            [f"{number}_{i}" for i in range(len(delayed))] if len(delayed) > 1 else [f"{number}"]
        )
        return [Job(n, each.args[0][0]) for n, each in zip(names, delayed, strict=True)]


def submit(queue: Queue, gpus: dict[str, int | None], **parameters: Any) -> list[Any]:
    executor = Executor()
    executor.parameters.update(parameters)
    jobs = SlurmJobs(lambda overrides: Request(gpus_per_node=gpus[overrides[0]]))
    found = jobs.submit(queue, executor, [Delayed(([cell],)) for cell in gpus])
    assert not set(STOP_SIGNALS) & signal.pthread_sigmask(signal.SIG_BLOCK, ())
    return found


def test_cells_that_ask_for_the_same_are_an_array_and_keep_their_order(
    capsys: pytest.CaptureFixture[str],
) -> None:
    queue = Queue()
    found = submit(queue, {"a": 1, "b": 2, "c": 1, "d": None})
    told = "note: submitted as Slurm jobs 10 20 30; they write to sweep/.submitit/%j\n"
    assert capsys.readouterr().err == told
    assert [(job.cell, job.job_id) for job in found] == [
        ("a", "10_0"),
        ("b", "20"),
        ("c", "10_1"),
        ("d", "30"),
    ]
    assert [each.get("gpus_per_node") for each in queue.asked] == [1, 2, None]
    for each in queue.asked:
        assert each["srun_args"] == ["--kill-on-bad-exit=1", "--cpus-per-task=3"]
        assert each["additional_parameters"] == {"no_requeue": True}
        assert (each["nodes"], each["ntasks_per_node"], each["time"]) == (1, 1, 60)


def test_one_at_a_time_is_so_over_all_arrays() -> None:
    queue = Queue()
    own = {"qos": "low", "requeue": True}
    submit(queue, {"a": 1, "b": 2, "c": 3}, array_parallelism=1, additional_parameters=own)
    more = [each["additional_parameters"] for each in queue.asked]
    assert more == [own, {**own, "dependency": "afterany:10"}, {**own, "dependency": "afterany:20"}]


def test_a_job_that_slurm_does_not_take_is_a_result_and_the_others_run() -> None:
    first, second = submit(Queue(most=4), {"a": 8, "b": 4})
    assert second.job_id == "20"
    (lost,) = first.results()
    error = lost._return_value
    assert isinstance(error, EndedBySlurmError)
    assert error.record.type == "SlurmRefused"
    assert error.record.message == "Slurm did not take the job: sbatch: error: not so many"
    with pytest.raises(RuntimeError, match="sbatch failed"):
        submit(Queue(most=0), {"a": 8, "b": 4})


def test_what_cannot_be_asked_for_is_refused_before_a_job_is_submitted() -> None:
    def request(overrides: Sequence[str]) -> Request:
        if overrides[0] == "b":
            raise ConfigError("num_devices", 3, "not so")
        return Request()

    queue = Queue()
    with pytest.raises(ConfigError, match="not so"):
        SlurmJobs(request).submit(queue, Executor(), [Delayed((["a"],)), Delayed((["b"],))])
    assert queue.asked == []


def test_jobs_are_cancelled_once_and_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[tuple[list[str], bool]] = []
    states = iter(["RUNNING", "COMPLETING", "CANCELLED"])

    def cancel(ids: Sequence[str], *, at_once: bool = False) -> None:
        told.append((list(ids), at_once))

    def known(ids: Sequence[str]) -> dict[str, slurm.SlurmJob]:
        return {ids[0]: slurm.SlurmJob(ids[0], next(states), "None", "1:00", "n0")}

    monkeypatch.setattr(slurm, "cancel", cancel)
    monkeypatch.setattr(slurm, "jobs", known)
    jobs = SlurmJobs(lambda overrides: Request(gpus_per_node=len(overrides[0])))
    jobs.cancel()  # nothing was submitted
    jobs.submit(Queue(), Executor(), [Delayed((["a"],)), Delayed((["bb"],))])
    jobs.cancel()
    assert told == [(["10", "20"], False)]
    assert "cancelling Slurm jobs 10 20" in capsys.readouterr().err
    assert next(states, None) is None
    states = iter(["CANCELLED"])
    jobs.cancel()  # they are gone
    assert len(told) == 1
