"""The event file of a run that did not come to its end, from the process that watched over it."""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf

from dpexp.events.file import EventFile, code_block
from dpexp.events.hparams import hparams_row, hyperparameters, overrides_of
from dpexp.records import RunResult


def record_ended(folder: Path, result: RunResult) -> None:
    """Add why the run ended and its row of the HParams tab. No rank may be at work any more.

    A run that was refused before it had an event file gets one, with its config.
    """
    file = EventFile(folder)
    try:
        if file.begun:
            file.text("config", code_block(OmegaConf.to_yaml(OmegaConf.create(result.config))))
        if result.error is not None:
            error = result.error
            parts = (f"{result.status}: {error.message}", error.traceback)
            file.text("error", code_block("\n\n".join(filter(None, parts))))
        row = hyperparameters(result, overrides_of(folder))
        for part in hparams_row(row, result.status, metrics=[]):
            file.add(part)
    finally:
        file.close()
