"""Sweeps over every combination, with the cells repeated and interleaved. No torch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from dpexp.careful import careful_launcher
from dpexp.composing import SweepLoader
from dpexp.config import OF_THE_SWEEP, plain_or_none, without_hydra
from dpexp.errors import ConfigError
from dpexp.job_config import quick_files
from dpexp.repeats import with_repeats
from dpexp.resuming import Planned, contiguous, rerun_of, without_own
from dpexp.sweep_folder import as_first_typed, draw_of, first_overrides, left_to_run, write_record

# Hydra takes only plugins whose dotted name begins with hydra_plugins. A package of that name would
# be shared with every other installed plugin, so the class is entered under such a name by hand.
# Its true name stays: a launcher with processes of its own pickles it.
TARGET = "hydra_plugins.dpexp.RepeatingSweeper"


@dataclass
class SweeperNode:
    """``hydra.sweeper``: the keys of Hydra's basic sweeper."""

    _target_: str = TARGET
    max_batch_size: int | None = None
    params: dict[str, str] | None = None


@final
class RepeatingSweeper(Sweeper):
    """Runs every combination `repeats` times; see :func:`dpexp.repeats.interleaved`.

    It does what Hydra's basic sweeper does, and is not made from it: Hydra's search for plugins
    loads that module a second time, and a subclass of the first class would then be broken.

    Args:
        max_batch_size: jobs that the launcher is given at a time; None = all.
        params: overrides from the config, before those that are typed.
    """

    def __init__(self, max_batch_size: int | None, params: dict[str, str] | None = None) -> None:
        self._most = max_batch_size
        self._params = dict(params or {})
        self.hydra_context: HydraContext | None = None
        self.config: DictConfig | None = None
        self.launcher: Launcher | None = None

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        loader = SweepLoader(hydra_context.config_loader.get_search_path())
        context = HydraContext(config_loader=loader, callbacks=hydra_context.callbacks)
        self.hydra_context, self.config = context, config
        self.launcher = careful_launcher(context, task_function, config)

    def sweep(self, arguments: list[str]) -> list[Sequence[JobReturn]]:
        """Launch all jobs.

        Raises:
            ConfigError: see :func:`dpexp.repeats.with_repeats` and, with `resume`,
                :func:`dpexp.sweep_folder.left_to_run`.
            HydraException: a combination cannot be composed.
        """
        assert self.hydra_context is not None and self.config is not None and self.launcher
        loader = cast(SweepLoader, self.hydra_context.config_loader)
        folder = Path(self.config.hydra.sweep.dir)
        resumed = self.config.get("resume") is not None
        typed = [*(f"{key}={value}" for key, value in self._params.items()), *arguments]
        parser = OverridesParser.create(config_loader=loader)
        refuse_own_choices(parser.parse_overrides(typed))
        typed = without_own(typed)
        if resumed:
            hydra = list(self.config.hydra.overrides.hydra)
            typed = as_first_typed(folder, typed, hydra)
        draw = draw_of(folder)
        cells = combinations(parser.parse_overrides(typed), draw)
        jobs = with_repeats(cells, [loader.compose_ahead(self.config, cell) for cell in cells])
        if resumed:
            planned = [self._planned(number, job) for number, job in enumerate(jobs)]
            numbers = left_to_run(folder, planned, rerun_of(self.config.get("rerun")))
        else:
            numbers = list(range(len(jobs)))
        if first_overrides(folder) is None:
            folder.mkdir(parents=True, exist_ok=True)
            write_record(folder, self.config, len(jobs), draw)
        returns = []
        # A launcher numbers the jobs it is given from the first one on: no gaps within a call.
        for group in contiguous(numbers, self._most):
            with quick_files():
                done = self.launcher.launch(
                    [jobs[each] for each in group], initial_job_idx=group[0]
                )
            for job in done:
                _ = job.return_value  # raises what the job raised
            returns.append(done)
        return returns

    def _planned(self, number: int, overrides: list[str]) -> Planned:
        """A job as the launcher will run it."""
        assert self.hydra_context is not None and self.config is not None
        config = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = number
        folder = str(OmegaConf.select(config, "hydra.sweep.subdir"))
        return Planned(number, folder, plain_or_none(without_hydra(config)))


def combinations(overrides: Sequence[Override], draw: int) -> list[list[str]]:
    """The overrides of each cell: every combination of choices, the last key varying fastest.

    Args:
        draw: the order of `shuffle()` is drawn from it.

    Raises:
        ConfigError: a choice has no value, so that there is no cell.
        HydraException: a choice is not a list of values but an interval.
    """
    choices: dict[str, list[str]] = {}
    for override in overrides:
        key = override.get_key_element()
        if override.is_sweep_override():
            if not override.is_discrete_sweep():
                raise HydraException(f"{override.input_line}: is not a list of values")
            with _drawing_from(f"{draw} {key}"):
                choices[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
            if not choices[key]:
                typed = str(override.input_line).partition("=")[2]
                raise ConfigError(key, typed, "gives no value, so there is no cell", fix="a list")
        else:
            choices[key] = [str(override.input_line)]
    return [list(combination) for combination in itertools.product(*choices.values())]


@contextmanager
def _drawing_from(seed: str) -> Iterator[None]:
    """Around Hydra's `shuffle()`, which draws from Python's own generator."""
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)


def refuse_own_choices(overrides: Sequence[Override]) -> None:
    """Refuse several values of a key that is for the whole sweep.

    Raises:
        ConfigError: there are.
    """
    for override in overrides:
        key = override.key_or_group
        if key in OF_THE_SWEEP and override.is_sweep_override():
            value = str(override.input_line).partition("=")[2]
            raise ConfigError(key, value, "is for the whole sweep", allowed="one value")


def register() -> None:
    """Make the sweeper known to Hydra. Safe to call again."""
    ConfigStore.instance().store(group="hydra/sweeper", name="dpexp", node=SweeperNode)
    Plugins.instance().class_name_to_class[TARGET] = RepeatingSweeper


def refuse_other_sweepers(config: Any) -> None:
    """Refuse `repeats` and `resume` with a sweeper that knows nothing of them.

    Args:
        config: of the whole sweep, with the ``hydra`` node.

    Raises:
        ConfigError: it would run each cell once, and all of them.
    """
    target = str(config.hydra.sweeper.get("_target_"))
    if target != TARGET and config.get("resume") is not None:
        raise ConfigError(
            "resume",
            config.resume,
            f"the sweeper {target} does not go on with a sweep",
            fix="resume=null (Optuna's own way is hydra.sweeper.storage), or hydra/sweeper=dpexp",
        )
    if target != TARGET and config.get("repeats", 1) != 1:
        raise ConfigError(
            "repeats",
            config.repeats,
            f"the sweeper {target} does not repeat",
            fix="repeats=1, or hydra/sweeper=dpexp",
        )
