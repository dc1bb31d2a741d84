"""Between Hydra and dpexp: the config's folder, names, help page and refusals."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import hydra
import pytest
from builders import make_facts
from hydra import initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

import dpexp.device
from dpexp import compose, extras
from dpexp.builtin import GROUPS
from dpexp.check import check
from dpexp.config import load
from dpexp.env import OuterLauncher
from dpexp.errors import ConfigError
from dpexp.schema import NESTED, Config

CONF = compose.config_folder()
ADDED = ("experiment", "cluster")  # groups without a choice of their own
OPTIONS = [(path.parent.name, path.stem) for path in sorted(CONF.glob("*/*.yaml"))]


def composed(*overrides: str) -> DictConfig:
    compose.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose("config", list(overrides))


def explained(*overrides: str) -> ConfigError:
    """What the user is told about overrides that Hydra refuses."""
    with pytest.raises(HydraException) as caught:
        composed(*overrides)
    return compose.explain(caught.value, list(overrides))


def outer(rank: int = 0) -> OuterLauncher:
    return OuterLauncher(rank, rank, 2, 2, "abc", "127.0.0.1", 29500)


# The config


def test_the_config_folder_holds_the_config() -> None:
    assert (CONF / "config.yaml").is_file()


def test_a_config_packed_into_the_package_comes_before_one_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compose, "__file__", str(tmp_path / "dpexp" / "compose.py"))
    assert compose.config_folder() == tmp_path / "conf"
    (tmp_path / "dpexp" / "conf").mkdir(parents=True)
    assert compose.config_folder() == tmp_path / "dpexp" / "conf"


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_of_conf_is_a_valid_config(
    group: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "_is_there", lambda _package, own: True)
    overrides = [f"+{group}={option}" if group in ADDED else f"{group}={option}"]
    if option == "custom":
        key = "sinks.custom" if group == "sinks" else group
        overrides.append(f"{key}._target_=mymodule.Mine")
    if option in ("tensors", "image_folder", "hf"):
        overrides.append("dataset.path=d.pt")
    check(load(composed(*overrides)), in_sweep=True)  # some presets are sweeps with repeats


@pytest.mark.parametrize("group", ["dataset", "model", "optimizer"])
def test_a_custom_option_without_a_target_is_refused_by_its_key(group: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(composed(f"{group}=custom"))
    assert caught.value.key == f"{group}._target_"


def test_the_default_is_the_exercise() -> None:
    config = load(composed())
    assert (config.dataset["rows"], config.dataset["features"], config.batch_size) == (100, 5, 30)
    assert (config.model["in_features"], config.model["out_features"]) == (5, 2)
    assert (config.task.value, config.parallel.strategy.value) == ("forward", "none")


def test_the_datas_seed_is_the_runs_seed() -> None:
    assert load(composed("seed=7")).dataset["seed"] == 7


# Names and folders


@pytest.mark.parametrize(("strategy", "count"), [("ddp", 2), ("none", 1), ("dp", 16)])
def test_a_cell_is_named_by_strategy_and_devices(strategy: str, count: int) -> None:
    assert compose.cell_name(strategy, count, "cpu") == f"{strategy}_n{count}"


@pytest.mark.parametrize(
    ("strategy", "device", "name"),
    [
        ("none", "auto", "none_n1"),
        ("ddp", "cpu", "ddp_n8"),
        ("dp", "auto", "dp_n4"),
        ("dp", "cuda:1", "dp_n3"),
    ],
)
def test_auto_is_named_by_the_number_that_the_plan_will_use(
    monkeypatch: pytest.MonkeyPatch, strategy: str, device: str, name: str
) -> None:
    facts = make_facts(cores=8, accelerator="cuda", num_accelerators=4)
    monkeypatch.setattr(dpexp.device, "gather_facts", lambda: facts)
    assert compose.cell_name(strategy, "auto", device) == name


def test_two_folders_made_in_the_same_second_differ(workdir: Path) -> None:
    first, second = compose.fresh_folder("runs"), compose.fresh_folder("runs")
    assert first != second
    for folder in (first, second):
        assert folder.is_dir()
        date, name = folder.relative_to(workdir / "runs").parts
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)
        assert re.fullmatch(r"\d\d-\d\d-\d\d-[0-9a-f]{6}", name)


def test_discarding_removes_what_hydra_wrote_and_empty_folders_of_dpexp(workdir: Path) -> None:
    folder = workdir / "outputs" / "runs" / "2026-01-01" / "12-00-00"
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text("a: 1")
    compose.discard(folder)
    assert list(workdir.iterdir()) == []


def test_discarding_keeps_the_empty_folder_that_a_users_folder_lies_in(workdir: Path) -> None:
    folder = workdir / "mine" / "run"
    (folder / ".hydra").mkdir(parents=True)
    compose.discard(folder)
    assert [path.name for path in workdir.iterdir()] == ["mine"]


def test_discarding_keeps_what_others_wrote(tmp_path: Path) -> None:
    folder = tmp_path / "2026-01-01" / "12-00-00"
    (folder / ".hydra").mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    (folder.parent / "11-00-00").mkdir()
    compose.discard(folder)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert (folder.parent / "11-00-00").is_dir()


@pytest.mark.parametrize("left", ["earlier", "checkpoints", ".rounds.json"])
def test_discarding_keeps_all_where_an_earlier_start_has_left_something(
    tmp_path: Path, left: str
) -> None:
    for name in (left, "steps.rank0.csv"):
        (tmp_path / name).write_text("")
    compose.discard(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {left, "steps.rank0.csv"}


def test_the_config_can_name_a_cell_and_the_process() -> None:
    compose.register()
    names = OmegaConf.create({"cell": "${dpexp_cell:ddp,2,cpu}", "id": "${dpexp_run_id:}"})
    assert names.cell == "ddp_n2"
    assert re.fullmatch("[0-9a-f]{6}", names.id)
    assert OmegaConf.create({"id": "${dpexp_run_id:}"}).id == names.id


# Under torchrun


def test_under_torchrun_rank_0_alone_writes_the_config() -> None:
    lines = [compose.arguments_under_torchrun(["seed=1"], outer(rank)) for rank in range(2)]
    assert lines[0] == ["seed=1", "hydra.mode=RUN"]
    assert lines[1] == ["seed=1", "hydra.mode=RUN", "hydra.output_subdir=null"]


@pytest.mark.parametrize("flag", ["-m", "--multirun"])
def test_a_sweep_under_torchrun_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match="a sweep starts its own"):
        compose.arguments_under_torchrun([flag, "seed=1,2"], outer())


# Refusals


@pytest.mark.parametrize(
    "argument",
    ["parallel=null", "parallel=", "~parallel", "~parallel=ddp", "+parallel=null", "model=null"],
)
def test_a_group_left_without_a_choice_is_refused_with_the_options(argument: str) -> None:
    group = re.sub(r"[~+]|=.*", "", argument)
    with pytest.raises(ConfigError) as caught:
        compose.refuse_bad_choices(["seed=1", argument])
    assert caught.value.key == group
    assert caught.value.allowed == ", ".join(GROUPS[group])


@pytest.mark.parametrize(
    "argument",
    ["parallel=ddp", "parallel=none", "~dataset.seed", "steps=null", "parallel=none,dp", "+x=null"],
)
def test_other_overrides_are_left_to_hydra(argument: str) -> None:
    compose.refuse_bad_choices([argument])


@pytest.mark.parametrize(
    ("override", "key", "value", "allowed", "fix"),
    [
        ("parallel=dpp", "parallel", "dpp", "ddp, dp, fsdp, none", "parallel=dp"),
        ("model=lineer", "model", "lineer", ", ".join(GROUPS["model"]), "model=linear"),
        ("optimizer=zzz", "optimizer", "zzz", "adamw, custom, sgd", "optimizer=sgd"),
        (
            "+experiment=scalin",
            "+experiment",
            "scalin",
            "digits, gpt, gpt2, noise_floor, resnet, scaling, tutorial",
            "+experiment=scaling",
        ),
    ],
)
def test_a_typo_in_a_choice_is_explained_with_the_options(
    override: str, key: str, value: str, allowed: str, fix: str
) -> None:
    error = explained(override)
    assert (error.key, error.value, error.allowed, error.fix) == (key, value, allowed, fix)


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("batchsize=3", "batch_size=…"),
        ("num_device=2", "num_devices=…"),
        ("loader.worker=2", "loader.workers=…"),
    ],
)
def test_a_typo_in_a_key_is_explained_with_the_nearest_one(override: str, fix: str) -> None:
    key, value = override.split("=")
    error = explained("seed=1", override)
    assert (error.key, error.value, error.fix) == (key, value, fix)


def test_a_key_that_nothing_resembles_may_be_added() -> None:
    error = explained("foo=1")
    assert (error.key, error.value) == ("foo", "1")
    assert "+foo=" in error.fix


@pytest.mark.parametrize("override", ["optimizer.dampening=0.9", "dataset.root=x", "model.depth=3"])
def test_an_argument_that_a_target_does_not_have_yet_may_be_added(override: str) -> None:
    key, _ = override.split("=")
    assert f"+{key}=" in explained(override).fix


@pytest.mark.parametrize("option", ["backend", "bucket_cap_mb", "static_graph"])
def test_an_option_of_ddp_under_another_strategy_is_not_suggested_as_it_was_typed(
    option: str,
) -> None:
    error = explained(f"parallel.{option}=1")
    assert error.key == f"parallel.{option}"
    assert "ddp" in str(error)
    assert error.fix != f"parallel.{option}=…"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("x=[", "no viable alternative at input '['"),
        ("+seed=3", "An item is already at 'seed'"),
    ],
)
def test_what_else_hydra_refuses_is_one_paragraph_in_its_words(override: str, told: str) -> None:
    text = str(explained(override))
    assert told in text
    assert "\n" not in text


def test_several_choices_without_a_sweep_name_the_three_ways_out() -> None:
    error = explained("seed=1,2")
    assert (error.key, error.value) == ("seed", "1,2")
    assert all(way in error.fix for way in ("--multirun", "seed=[1,2]", "quote"))


# Help


def help_lines() -> list[str]:
    return compose.help_page().splitlines()


def documented() -> list[tuple[str, Any]]:
    """Every key of the schema with its documentation."""
    keys = []
    for spec in dataclasses.fields(Config):
        if spec.name in NESTED:
            nested = dataclasses.fields(NESTED[spec.name])
            keys += [(f"{spec.name}.{each.name}", each.metadata["doc"]) for each in nested]
        elif spec.name != "extra" and spec.name not in GROUPS:
            keys.append((spec.name, spec.metadata["doc"]))
    return keys


@pytest.mark.parametrize(("key", "doc"), documented(), ids=[key for key, _ in documented()])
def test_the_help_page_has_a_line_with_every_key_and_its_documentation(key: str, doc: str) -> None:
    found = [line for line in help_lines() if line.split()[:1] == [key]]
    assert len(found) == 1
    assert doc in found[0]


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_the_help_page_names_every_option_that_lies_in_conf(group: str, option: str) -> None:
    shown = f"+{group}" if group in ADDED else group
    (line,) = [line for line in help_lines() if line.split()[:1] == [shown]]
    assert option in re.split(r"[,\s]+", line.strip())[1:]


def test_the_help_page_shows_the_composed_config() -> None:
    assert help_lines().count("$CONFIG") == 1


def test_registering_twice_is_harmless() -> None:
    compose.register()
    compose.register()
    assert load(composed()).batch_size == 30
