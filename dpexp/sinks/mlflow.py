"""MLflow: one run per run, nested under one for the sweep."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final
from urllib.parse import unquote, urlsplit

from dpexp.events.hparams import summary_scalars
from dpexp.extras import load
from dpexp.records import StepRecord
from dpexp.sinks.base import FinishedRun, Sink
from dpexp.sinks.facts import Thinned, artifacts, parameters, tags
from dpexp.sinks.tensorboard import step_scalars

# MLflow's own limits: of a batch, and of what a store keeps of a value.
METRICS_PER_BATCH, PARAMS_PER_BATCH = 1000, 100
PARAM_CHARACTERS, TAG_CHARACTERS = 6000, 5000
STATUS = {"ok": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


@final
class MlflowSink(Sink):
    """Writes through MLflow's client, call by call: no threads, no system metrics.

    Args:
        tracking_uri: where MLflow keeps runs; None = what its environment variables say.
        experiment: made if it is not there.
    """

    def __init__(self, run: FinishedRun, tracking_uri: str | None, experiment: str) -> None:
        self._mlflow = load("dpexp.sinks.MlflowSink", "sinks.mlflow")
        self._run = run
        database = _database_file(tracking_uri)
        if database is not None:  # else MLflow would try for half a minute to open it
            database.parent.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(database and database.parent):
            self._client = self._mlflow.MlflowClient(tracking_uri)
            self._experiment_id = self._experiment(experiment, database)
            self._parent_id = None if run.sweep is None else self._parent(run.sweep)
        nested = {} if self._parent_id is None else {"mlflow.parentRunId": self._parent_id}
        made = self._client.create_run(
            self._experiment_id,
            start_time=_ms(run.begin_s),
            tags={**_prefixed(tags(run)), **nested, "mlflow.note.content": _note(run)},
            run_name=run.result.label if run.sweep is None else run.folder.name,
        )
        self._id = made.info.run_id
        self._thinned = Thinned(run)
        self._params()

    def write(self, records: Sequence[StepRecord]) -> None:
        self._steps(self._thinned.take(records))

    def close(self) -> None:
        self._steps(self._thinned.rest())
        end_s, last = self._thinned.end_s, self._thinned.last_step
        self._metrics((summary_scalars(self._run.result), end_s, last) for _ in range(1))
        for path in artifacts(self._run):
            self._client.log_artifact(self._id, str(path))
        status = STATUS[self._run.result.status]
        self._client.set_terminated(self._id, status, _ms(end_s))
        if self._parent_id is not None and status != "FINISHED":
            self._client.set_terminated(self._parent_id, status)

    def _experiment(self, name: str, database: Path | None) -> str:
        # Beside a database in a file; else MLflow would make a folder where the command was typed.
        files = database and (database.parent / "mlflow-artifacts").absolute().as_uri()
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                made: str = self._client.create_experiment(name, files)
                return made
            except self._mlflow.MlflowException:
                found = self._client.get_experiment_by_name(name)
                if found is None:  # not made by another cell in the meantime
                    raise
        found_id: str = found.experiment_id
        return found_id

    def _parent(self, sweep: Path) -> str:
        """The run that stands for the sweep: the first one, if two cells made one at a time."""
        found = self._parents(sweep)
        if found:
            return found[0]
        made = self._client.create_run(
            self._experiment_id,
            tags={"dpexp.sweep_folder": str(sweep)},
            run_name=f"sweep {sweep.name}",
        ).info.run_id
        first = self._parents(sweep)[0]
        if first == made:
            self._client.set_terminated(made, "FINISHED")
        else:
            self._client.delete_run(made)
        return first

    def _parents(self, sweep: Path) -> list[str]:
        folder = str(sweep).replace("\\", "\\\\").replace("'", "\\'")
        runs = self._client.search_runs(
            [self._experiment_id],
            f"tags.`dpexp.sweep_folder` = '{folder}'",
            order_by=["attributes.start_time ASC", "attributes.run_id ASC"],
        )
        return [run.info.run_id for run in runs]

    def _params(self) -> None:
        flat = parameters(self._run)
        params = [
            self._mlflow.entities.Param(_name(key), str(value)[:PARAM_CHARACTERS])
            for key, value in flat.items()
        ]
        for begin in range(0, len(params), PARAMS_PER_BATCH):
            self._client.log_batch(self._id, params=params[begin : begin + PARAMS_PER_BATCH])

    def _steps(self, steps: Iterable[tuple[StepRecord, float]]) -> None:
        self._metrics((step_scalars(record), at_s, record.step) for record, at_s in steps)

    def _metrics(self, rows: Iterable[tuple[dict[str, float], float, int]]) -> None:
        batch: list[Any] = []
        for values, at_s, step in rows:
            if len(batch) + len(values) > METRICS_PER_BATCH:
                self._client.log_batch(self._id, metrics=batch)
                batch = []
            batch += [
                self._mlflow.entities.Metric(_name(tag), value, _ms(at_s), step)
                for tag, value in values.items()
            ]
        if batch:
            self._client.log_batch(self._id, metrics=batch)


@contextmanager
def one_at_a_time(folder: Path | None) -> Iterator[None]:
    """Let cells that end at the same time open a database in this folder one after the other.

    MLflow makes the tables of a new one, and two that do so break it for one of them.
    """
    if folder is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)  # the lock is on the folder: no file of its own is left
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _database_file(tracking_uri: str | None) -> Path | None:
    """The file of an SQLite database; None for other stores."""
    parts = urlsplit(tracking_uri or "")
    if parts.scheme != "sqlite" or not parts.path.strip("/"):
        return None
    return Path(unquote(parts.path[1:]))  # sqlite:///relative, sqlite:////absolute


def _ms(seconds: float) -> int:
    return round(seconds * 1e3)


def _prefixed(known: dict[str, str]) -> dict[str, str]:
    return {f"dpexp.{key}": value[:TAG_CHARACTERS] for key, value in known.items()}


def _note(run: FinishedRun) -> str:
    """The description that MLflow's page shows."""
    known = tags(run)
    lines = [f"status: {run.result.status}"]
    if run.result.emulated:
        lines.append("emulated: virtual devices on a CPU, not measured on accelerators")
    lines += [f"{key}: {known[key]}" for key in ("error", "injected") if key in known]
    return "\n\n".join(lines)[:TAG_CHARACTERS]


def _name(key: str) -> str:
    """A key with the characters that MLflow allows: a user's may have others."""
    return "".join(c if c.isalnum() or c in "_-. /:" else "_" for c in key)[:250]
