"""The Optuna sweeper: it searches for the settings with the most samples/s. No torch.

``hydra/sweeper=optuna`` is the plugin's name and config; this class takes the place of the
plugin's, which ends the sweep at the first cell that has no number to return.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from dpexp import console
from dpexp.careful import careful_launcher
from dpexp.errors import ConfigError
from dpexp.files import write_whole
from dpexp.sweep_folder import write_record

OPTUNA = "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper"


@final
class SearchingSweeper(Sweeper):
    """Asks Optuna for trials, runs each as a cell, and tells it the samples/s.

    A cell that failed, was skipped or refused is a pruned trial, and the search goes on.

    Args:
        settings: the keys of ``hydra.sweeper`` as the plugin has them; `max_failure_rate` is
            without effect, since no trial fails.
    """

    def __init__(self, **settings: Any) -> None:
        from hydra_plugins.hydra_optuna_sweeper._impl import OptunaSweeperImpl

        # Only what reads the search space is taken from it.
        self._plugin: Any = OptunaSweeperImpl(**settings)

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.hydra_context, self.config = hydra_context, config
        self.launcher = careful_launcher(hydra_context, task_function, config)
        self._plugin.config = config

    def sweep(self, arguments: list[str]) -> None:
        """Run all trials and write ``optimization_results.yaml``, if one has ended well.

        Raises:
            ConfigError: the search has several goals.
            HydraException: a trial cannot be composed, before any has run.
        """
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        assert self.config is not None and self.launcher is not None
        direction = self._direction()
        space, fixed = self._space(arguments)
        trials = self._prepare_grid(space)
        study = optuna.create_study(
            study_name=self._plugin.study_name,
            storage=self._plugin.storage,
            sampler=self._plugin.sampler,
            directions=[direction],
            load_if_exists=True,
        )
        folder = Path(self.config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        write_record(folder, self.config)
        for first in range(0, trials, self._plugin.n_jobs):
            asked = [study.ask() for _ in range(min(self._plugin.n_jobs, trials - first))]
            jobs = [list(job) for job in self._plugin._configure_trials(asked, space, fixed)]
            if first == 0:
                self._refuse_uncomposable(jobs)
            for trial, job in zip(asked, self.launcher.launch(jobs, first), strict=True):
                _tell(study, trial, _rate(job))
        _report_best(study, folder, direction)

    def _direction(self) -> str:
        directions: list[str] = self._plugin._get_directions()
        if len(directions) != 1:
            raise ConfigError(
                "hydra.sweeper.direction",
                directions,
                "a cell returns one number, its samples/s",
                allowed="maximize or minimize",
                fix="hydra.sweeper.direction=maximize",
            )
        if directions[0] == "minimize":
            print(
                "note: hydra.sweeper.direction=minimize looks for the fewest samples/s; "
                "hydra.sweeper.direction=maximize looks for the most",
                file=sys.stderr,
            )
        return directions[0]

    def _space(self, arguments: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Distributions of what is searched, and the overrides that are the same in all trials."""
        from hydra_plugins.hydra_optuna_sweeper._impl import create_params_from_overrides

        self._plugin._process_searchspace_config()
        typed = [*self._plugin._parse_sweeper_params_config(), *arguments]
        space, fixed = create_params_from_overrides(typed)
        space = {**(self._plugin.search_space_distributions or {}), **space}
        return {key: each for key, each in space.items() if key not in fixed}, fixed

    def _prepare_grid(self, space: dict[str, Any]) -> int:
        """The number of trials. A grid has no more of them than combinations."""
        import optuna

        sampler = self._plugin.sampler
        trials: int = self._plugin.n_trials
        if getattr(sampler, "func", None) is not optuna.samplers.GridSampler:
            return trials
        choices = {key: self._plugin._to_grid_sampler_choices(each) for key, each in space.items()}
        combinations = 1
        for values in choices.values():
            combinations *= len(values)
        self._plugin.sampler = sampler(choices)
        return min(trials, combinations)

    def _refuse_uncomposable(self, jobs: Sequence[list[str]]) -> None:
        assert self.hydra_context is not None and self.config is not None
        for job in jobs:
            self.hydra_context.config_loader.load_sweep_config(self.config, job)


def _rate(job: JobReturn) -> float | None:
    """The samples/s of a cell; None for one that did not end well."""
    try:
        return None if job.return_value is None else float(job.return_value)
    except Exception as error:  # noqa: BLE001  # whatever the job raised
        console.say(f"dpexp: {type(error).__name__}: {error}")
        return None


def _tell(study: Any, trial: Any, rate: float | None) -> None:
    from optuna.trial import TrialState

    try:
        if rate is None:
            study.tell(trial, state=TrialState.PRUNED)
        else:
            study.tell(trial, rate)
    except RuntimeError as error:
        # A grid sampler that has no more to try ends `optimize`, which is not used here. The
        # trial is told by then.
        if "Study.stop" not in str(error):
            raise


def _report_best(study: Any, folder: Path, direction: str) -> None:
    from optuna.trial import TrialState

    states = [trial.state for trial in study.trials]
    pruned = states.count(TrialState.PRUNED)
    if TrialState.COMPLETE not in states:
        print(f"optuna: none of {len(states)} trials has ended well", file=sys.stderr)
        return
    best = study.best_trial
    found = {"name": "optuna", "best_params": dict(best.params), "best_value": best.value}
    write_whole(folder / "optimization_results.yaml", OmegaConf.to_yaml(OmegaConf.create(found)))
    named = " ".join(f"{key}={value}" for key, value in best.params.items())
    most = "most" if direction == "maximize" else "fewest"
    print(
        f"optuna: the {most} samples/s of {len(states)} trials ({pruned} pruned): "
        f"{best.value:,.0f} in trial {best.number}: {named}"
    )


def register() -> None:
    """Let Hydra take this class for the plugin's, where that is installed. Safe to call again."""
    known = Plugins.instance().class_name_to_class
    if OPTUNA in known:
        known[OPTUNA] = SearchingSweeper
