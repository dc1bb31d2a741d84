"""Weights & Biases: one run per run, grouped by sweep."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import final

from dpexp.events.hparams import summary_scalars
from dpexp.extras import load
from dpexp.records import StepRecord
from dpexp.sinks.base import FinishedRun, Sink
from dpexp.sinks.facts import Thinned, artifacts, parameters, tags
from dpexp.sinks.tensorboard import step_scalars


@final
class WandbSink(Sink):
    """Writes through wandb, whose helper process lives from here to :meth:`close`.

    What it would look at besides (system metrics, code, git, packages, console) is off.

    Args:
        project: of the tracker's page.
        entity: a user or team; None = the default of who is logged in.
        mode: ``offline`` writes below the run's folder only, ``online`` sends it too.
    """

    def __init__(self, run: FinishedRun, project: str, entity: str | None, mode: str) -> None:
        wandb = load("dpexp.sinks.WandbSink", "sinks.wandb")
        self._run = run
        self._thinned = Thinned(run)
        known = tags(run)
        labels = [known["strategy"], known["status"]]
        if run.result.emulated:
            labels.append("emulated")
        settings = wandb.Settings(
            mode=mode,
            root_dir=str(run.folder),
            console="off",
            silent=True,
            save_code=False,
            disable_code=True,
            disable_git=True,
            x_disable_stats=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        )
        self._wandb_run = wandb.init(
            project=project,
            entity=entity,
            name=run.result.label if run.sweep is None else run.folder.name,
            group=None if run.sweep is None else run.sweep.name,
            job_type=run.result.parallel,
            tags=labels,
            config={**parameters(run), **_prefixed(known)},
            settings=settings,
            reinit="create_new",
        )

    def write(self, records: Sequence[StepRecord]) -> None:
        for record, at_s in self._thinned.take(records):
            self._log(record, at_s)

    def close(self) -> None:
        for record, at_s in self._thinned.rest():
            self._log(record, at_s)
        summary = {**summary_scalars(self._run.result), **_prefixed(tags(self._run))}
        self._wandb_run.summary.update(summary)
        for path in artifacts(self._run):
            # A copy: wandb would link the file of the run, and say so on the console.
            copy = shutil.copy(path, self._wandb_run.dir)
            self._wandb_run.save(copy, base_path=self._wandb_run.dir, policy="now")
        self._wandb_run.finish(exit_code=0 if self._run.result.status == "ok" else 1)

    def _log(self, record: StepRecord, at_s: float) -> None:
        self._wandb_run.log({**step_scalars(record), "_timestamp": at_s}, step=record.step)


def _prefixed(known: dict[str, str]) -> dict[str, str]:
    return {f"dpexp/{key}": value for key, value in known.items()}
