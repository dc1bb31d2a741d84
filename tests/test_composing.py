"""The quick loader composes what Hydra composes."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from dpexp import compose
from dpexp.composing import SweepLoader

MASTER = ["hydra.mode=MULTIRUN", "hydra.sweep.dir=somewhere", "batch_size=8,9"]
JOBS = [
    ["parallel=ddp", "num_devices=2"],
    ["num_devices=2", "parallel=ddp", "model=mlp", "model.widths=[4,5]"],
    ["model.widths=[4,5]", "model=mlp"],  # a value before its group
    ["+tag=x", "++seed=3", "+forward_kwargs.a=1", "~save_weights"],
    ["+experiment=digits", "steps=4"],
    ["+optimizer@other=adamw", "other.lr=0.5"],
    ["batch_size=${seed}", "seed=7", "+note=${model.in_features}"],
    ["+list=[1,a,{b: c}]", "++forward_kwargs={x: 1}", "dataset={rows: 5}"],
    ["hydra.job.name=other", "+hydra.job.env_set.A=b", "steps=1", "hydra/launcher=basic"],
    ["steps=1", "steps=2", "epochs=null", "+quoted='a b,c'", "+escaped=a\\,b"],
    ["~optimizer", "seed=1"],
    ["hydra={verbose: true}"],
    ["+steps=2"],
    ["model=mine", "seed=4"],
]
REFUSED = [
    ["optimizer@other=adamw"],
    ["no.such=1"],
    ["parallel=nowhere"],
    ["steps=1,2"],
    ["steps=["],
    ["forward_kwargs={x: 1}"],
]


@pytest.fixture
def loaders(tmp_path: Path) -> Iterator[tuple[ConfigLoaderImpl, SweepLoader]]:
    """Hydra's own and ours, with a folder of the user's own on the search path."""
    own = tmp_path / "own"
    (own / "model").mkdir(parents=True)
    (own / "model/mine.yaml").write_text("_target_: usermodels.Net\nwidth: ${seed}\n")
    compose.register()
    with initialize_config_dir(str(compose.config_folder()), version_base="1.3"):
        hydra: Any = GlobalHydra.instance().hydra
        path = hydra.config_loader.get_search_path()
        path.prepend("command-line", f"file://{own}")
        yield ConfigLoaderImpl(path), SweepLoader(path)


def composed(loader: ConfigLoaderImpl, master: DictConfig, job: list[str]) -> DictConfig | str:
    """What a job composes to, or the error."""
    try:
        return loader.load_sweep_config(master, job)
    except HydraException as error:
        return f"{type(error).__name__}: {error}"


def state(node: Any) -> Any:
    """A node with what OmegaConf knows beside its value: flags, types, interpolations."""
    inner = node._value()
    if isinstance(inner, dict):
        inner = {key: state(child) for key, child in inner.items()}
    elif isinstance(inner, list):
        inner = [state(child) for child in inner]
    meta = node._metadata
    kind = DictConfig if isinstance(node, DictConfig) else type(node)
    return (kind, meta.ref_type, meta.object_type, meta.optional, meta.flags, inner)


def same(one: DictConfig | str, other: DictConfig | str) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return state(one) == state(other) and OmegaConf.to_yaml(one) == OmegaConf.to_yaml(other)


def test_it_composes_what_hydra_composes(
    loaders: tuple[ConfigLoaderImpl, SweepLoader],
) -> None:
    hydras, ours = loaders
    master = hydras.load_configuration("config", MASTER, RunMode.MULTIRUN)
    for job in [*JOBS, *REFUSED]:
        expected = composed(hydras, master, job)
        assert isinstance(expected, str) == (job in REFUSED), expected
        for _ in range(2):  # from files, then from what is kept
            assert same(composed(ours, master, job), expected), job


def test_it_reads_files_once_for_each_choice_of_groups(
    loaders: tuple[ConfigLoaderImpl, SweepLoader], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ours = loaders
    master = ours.load_configuration("config", MASTER, RunMode.MULTIRUN)
    read = []
    load = OmegaConf.load
    monkeypatch.setattr(OmegaConf, "load", lambda file: read.append(file) or load(file))
    for strategy in ("none", "ddp"):
        for seed in range(3):
            config = ours.load_sweep_config(master, [f"parallel={strategy}", f"seed={seed}"])
            assert (config.parallel.strategy, config.seed) == (strategy, seed)
        names = [Path(file.name).name for file in read]
        assert names.count("config.yaml") == names.count("linear.yaml") == 1
        read.clear()


def test_what_was_composed_ahead_is_given_to_the_launcher_once(
    loaders: tuple[ConfigLoaderImpl, SweepLoader],
) -> None:
    hydras, ours = loaders
    master = hydras.load_configuration("config", MASTER, RunMode.MULTIRUN)
    job = ["parallel=ddp", "seed=4"]
    ahead = ours.compose_ahead(master, job)
    assert same(ahead, composed(hydras, master, job))
    assert ours.load_sweep_config(master, ["parallel=ddp", "seed=5"]).seed == 5
    assert ours.load_sweep_config(master, list(job)) is ahead
    again = ours.load_sweep_config(master, job)
    assert again is not ahead and same(again, ahead)


def test_a_launcher_may_pickle_it(loaders: tuple[ConfigLoaderImpl, SweepLoader]) -> None:
    hydras, ours = loaders
    master = hydras.load_configuration("config", MASTER, RunMode.MULTIRUN)
    expected = composed(hydras, master, JOBS[0])
    assert same(composed(ours, master, JOBS[0]), expected)
    ours.compose_ahead(master, JOBS[1])
    pickled = pickle.dumps(ours)
    assert b"QuickNode" not in pickled
    assert same(composed(pickle.loads(pickled), master, JOBS[0]), expected)
