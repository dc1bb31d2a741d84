"""Hydra's config loader for many command lines that differ little. No torch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, final

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.defaults_list import Overrides
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from dpexp.job_config import make_quick


@final
class SweepLoader(ConfigLoaderImpl):
    """Composes what Hydra composes, without reading the same files for each cell of a sweep.

    What depends on files (the choices of groups) and Hydra's own node are composed by Hydra, once
    for each combination. Values are then set on a copy, by Hydra's own function. Whatever that does
    not do without an error is left to Hydra as a whole, so that its errors stay its own. Files that
    change meanwhile are not read again.
    """

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self._bases: dict[tuple[str | None, tuple[str, ...]], DictConfig] = {}
        self._parsed: dict[str, tuple[Override, bool]] = {}
        self._ahead: dict[tuple[str, ...], DictConfig] = {}

    def __getstate__(self) -> dict[str, Any]:
        # For launchers that pickle it for each job.
        return {**self.__dict__, "_bases": {}, "_parsed": {}, "_ahead": {}}

    def compose_ahead(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """A cell's config, which is to be read only: a launcher gets this one, and changes it.

        It is given away once.

        Raises:
            HydraException: it cannot be composed.
        """
        config = self.load_sweep_config(master_config, sweep_overrides)
        self._ahead[tuple(sweep_overrides)] = config
        return config

    def load_sweep_config(
        self, master_config: DictConfig, sweep_overrides: list[str]
    ) -> DictConfig:
        """As Hydra's."""
        ahead = self._ahead.pop(tuple(sweep_overrides), None)
        if ahead is not None:
            return ahead
        return super().load_sweep_config(master_config, sweep_overrides)

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        if run_mode is RunMode.RUN and validate_sweep_overrides:
            try:
                return self._from_base(config_name, overrides, from_shell)
            except Exception:  # noqa: BLE001  # Hydra meets it again, and says so
                pass
        return super().load_configuration(
            config_name, overrides, run_mode, from_shell, validate_sweep_overrides
        )

    def _from_base(
        self, config_name: str | None, overrides: Sequence[str], from_shell: bool
    ) -> DictConfig:
        parsed = [self._parse(line) for line in overrides]
        self.validate_sweep_overrides_legal(
            [override for override, _ in parsed], RunMode.RUN, from_shell
        )
        values = [override for override, is_value in parsed if is_value]
        lines = [
            line for line, (_, is_value) in zip(overrides, parsed, strict=True) if not is_value
        ]
        key = (config_name, tuple(lines))
        if key not in self._bases:
            base = super().load_configuration(config_name, lines, RunMode.RUN, from_shell)
            make_quick(base)
            self._bases[key] = base
        config: DictConfig = copy.deepcopy(self._bases[key])
        self._apply_overrides_to_config(values, config)
        own = [override for override, _ in parsed if not override.is_hydra_override()]
        job = config.hydra.job
        config.hydra.overrides.task = [override.input_line for override in own]
        named: Any = OmegaConf.to_container(job.config.override_dirname)
        job.override_dirname = get_overrides_dirname(overrides=own, **named)
        return config

    def _parse(self, line: str) -> tuple[Override, bool]:
        """An override, and whether it is a value that is set after all choices of groups.

        As Hydra tells them apart. A value of Hydra's own node is left to Hydra.
        """
        if line not in self._parsed:
            (override,) = OverridesParser.create().parse_overrides([line])
            is_value = bool(Overrides(self.repository, [override]).config_overrides)
            is_hydras = override.key_or_group.partition(".")[0] == "hydra"
            self._parsed[line] = override, is_value and not is_hydras
        return self._parsed[line]
