"""The sweeper: combinations, and the jobs that the launcher gets."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf import OmegaConf

from dpexp.errors import ConfigError
from dpexp.repeating import (
    TARGET,
    RepeatingSweeper,
    combinations,
    refuse_other_sweepers,
    register,
)
from dpexp.repeats import with_repeats


def cells_of(*overrides: str) -> list[list[str]]:
    return combinations(OverridesParser.create().parse_overrides(list(overrides)), draw=1)


def test_every_choice_meets_every_other_and_the_last_key_varies_fastest() -> None:
    assert cells_of("a=1,2", "b=x", "c=3,4") == [
        ["a=1", "b=x", "c=3"],
        ["a=1", "b=x", "c=4"],
        ["a=2", "b=x", "c=3"],
        ["a=2", "b=x", "c=4"],
    ]


def test_lists_and_quoted_texts_stay_as_typed() -> None:
    assert cells_of("a=[1,2],[3]", "b='x,y'", "+c=range(0,2)", "~d") == [
        ["a=[1,2]", "b='x,y'", "+c=0", "~d"],
        ["a=[1,2]", "b='x,y'", "+c=1", "~d"],
        ["a=[3]", "b='x,y'", "+c=0", "~d"],
        ["a=[3]", "b='x,y'", "+c=1", "~d"],
    ]


def test_the_order_of_a_shuffle_is_that_of_its_draw() -> None:
    def cells(draw: int) -> list[list[str]]:
        typed = ["a=shuffle(range(0,30))", "b=sort(3,1,2)", "c=shuffle(x,y)"]
        return combinations(OverridesParser.create().parse_overrides(typed), draw)

    before = random.getstate()
    first = cells(1)
    assert random.getstate() == before
    assert first == cells(1) != cells(2)
    assert sorted(first) == sorted(cells(2)) and len(first) == 180
    assert [cell[1] for cell in first[:6:2]] == ["b=1", "b=2", "b=3"]


def test_a_key_that_comes_twice_has_its_last_choices() -> None:
    """The params of a preset come first, what is typed after them."""
    assert cells_of("a=1,2,3", "b=5", "a=7,8") == [["a=7", "b=5"], ["a=8", "b=5"]]


def test_an_interval_has_no_cells() -> None:
    with pytest.raises(HydraException, match=r"a=interval\(1,2\): is not a list"):
        cells_of("a=interval(1,2)")


def test_a_choice_without_values_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        cells_of("a=1,2", "+c=range(0,0)")
    assert (caught.value.key, caught.value.value) == ("+c", "range(0,0)")


def test_hydra_accepts_the_sweeper_under_its_name() -> None:
    register()
    register()
    assert Plugins.instance().is_in_toplevel_plugins_module(TARGET)
    node = OmegaConf.create({"_target_": TARGET, "max_batch_size": None, "params": {"a": "1,2"}})
    assert isinstance(Plugins.instance()._instantiate(node), RepeatingSweeper)


class Launcher:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.launched: list[tuple[int, list[list[str]]]] = []

    def launch(self, jobs: Sequence[Sequence[str]], initial_job_idx: int) -> list[Any]:
        self.launched.append((initial_job_idx, [list(job) for job in jobs]))
        return [SimpleNamespace(return_value=None) for _ in jobs]


def launched(
    folder: Path, typed: list[str], most: int | None = None, params: dict[str, str] | None = None
) -> tuple[list[tuple[int, list[list[str]]]], int]:
    """What the launcher got, and how often a config was composed."""
    composed = []

    def compose(_master: Any, overrides: list[str]) -> Any:
        composed.append(overrides)
        return OmegaConf.create({"repeats": 2, "repeat": 0, "seed": 5})

    sweeper = RepeatingSweeper(most, params)
    loader = SimpleNamespace(compose_ahead=compose, get_sources=list)
    sweeper.hydra_context = SimpleNamespace(config_loader=loader)  # type: ignore[assignment]
    sweeper.config = OmegaConf.create(
        {"hydra": {"sweep": {"dir": str(folder / "sweep")}, "overrides": {"task": typed}}}
    )
    launcher = sweeper.launcher = Launcher()  # type: ignore[assignment]
    sweeper.sweep(typed)
    assert (folder / "sweep/multirun.yaml").exists()
    return launcher.launched, len(composed)  # type: ignore[attr-defined]


def expected(*cells: list[str]) -> list[list[str]]:
    return with_repeats(cells, [{"repeats": 2, "repeat": 0, "seed": 5}] * len(cells))


def test_the_launcher_gets_all_jobs_in_the_order_of_the_seed(tmp_path: Path) -> None:
    got, composed = launched(tmp_path, ["a=1,2"])
    assert got == [(0, expected(["a=1"], ["a=2"]))]
    assert composed == 2  # once per cell and not per repeat


def test_jobs_come_in_batches_that_go_on_counting(tmp_path: Path) -> None:
    got, _ = launched(tmp_path, ["a=1,2"], most=3)
    jobs = expected(["a=1"], ["a=2"])
    assert got == [(0, jobs[:3]), (3, jobs[3:])]


def test_what_is_typed_takes_the_place_of_a_presets_choices(tmp_path: Path) -> None:
    got, _ = launched(tmp_path, ["a=3"], params={"a": "1,2", "b": "4"})
    assert got == [(0, expected(["a=3", "b=4"]))]


def test_a_sweep_that_goes_on_has_its_shuffled_cells_in_the_same_order(tmp_path: Path) -> None:
    typed = ["a=shuffle(range(0,30))"]
    first, _ = launched(tmp_path, typed)
    assert launched(tmp_path, typed)[0] == first
    assert launched(tmp_path / "other", typed)[0] != first


def sweep_config(target: str, repeats: Any) -> Any:
    return OmegaConf.create({"hydra": {"sweeper": {"_target_": target}}, "repeats": repeats})


def test_a_sweeper_that_does_not_repeat_is_refused_only_with_repeats() -> None:
    other = "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper"
    refuse_other_sweepers(sweep_config(other, 1))
    refuse_other_sweepers(sweep_config(TARGET, 3))
    with pytest.raises(ConfigError) as caught:
        refuse_other_sweepers(sweep_config(other, 3))
    assert (caught.value.key, caught.value.value) == ("repeats", 3)
    assert "OptunaSweeper does not repeat" in caught.value.problem
