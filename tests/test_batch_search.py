"""`batch_size=auto`: the largest batch that fits, by real tries under a memory limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import make_config
from conftest import Cli

from dpexp import server
from dpexp.batch_search import Try, _Search, find_batch_size
from dpexp.errors import ConfigError
from dpexp.plan import HardwareFacts
from dpexp.records import read_run
from dpexp.schema import Scaling, Task

FACTS = HardwareFacts(cores=2, accelerator=None, num_accelerators=0)
LIMIT = 2000.0


@pytest.fixture(autouse=True, scope="module")
def forked() -> Iterator[None]:
    server.start(several_ranks=True)
    yield
    server.stop()


def searched(
    fits: Callable[[int], bool], rows: int | None = None, least: int = 1, **overrides: Any
) -> tuple[int, list[int]]:
    """What a search over `fits` ends with, and the sizes it tried."""
    strategy = overrides.pop("strategy", "none")
    config = make_config(strategy, process_memory_mib=LIMIT, batch_size="auto", **overrides)
    search = _Search(config, FACTS, None, Path())

    def run(size: int) -> Try:
        held = rows if rows is not None and size > rows else None
        return Try(size, fits(size), None, None if fits(size) else "full", held)

    search._run = run  # type: ignore[method-assign]
    return search.largest(least), [each.batch_size for each in search.tries]


@pytest.mark.parametrize("most", [1, 2, 3, 7, 63, 64])
def test_a_small_answer_is_exact(most: int) -> None:
    assert searched(lambda size: size <= most)[0] == most


def test_in_a_sweep_a_cell_without_the_disturbed_rank_searches_too() -> None:
    config = make_config(
        "ddp", num_devices=1, batch_size="auto", process_memory_mib=LIMIT, inject={"slow_rank": 1}
    )
    with pytest.raises(ConfigError, match=r"inject\.slow_rank"):
        _Search(config, FACTS, None, Path())
    assert _Search(config, FACTS, None, Path(), in_sweep=True)._label == "ddp-n1"


def test_a_large_answer_is_exact_to_a_64th_of_itself() -> None:
    best, tried = searched(lambda size: size <= 10_000)
    assert 10_000 - 10_000 // 64 <= best <= 10_000
    assert len(tried) < 25


def test_the_search_doubles_and_then_halves_the_gap() -> None:
    assert searched(lambda size: size <= 11)[1] == [1, 2, 4, 8, 16, 12, 10, 11]


def test_under_strong_scaling_a_size_gives_every_device_the_same_rows() -> None:
    best, tried = searched(lambda size: size <= 20, least=3, strategy="dp", num_devices=3)
    assert best == 18
    assert all(size % 3 == 0 for size in tried)


def test_the_dataset_may_end_before_the_memory() -> None:
    assert searched(lambda size: True, rows=100) == (100, [1, 2, 4, 8, 16, 32, 64, 128])


def test_under_weak_scaling_the_dataset_is_divided_among_the_devices() -> None:
    best, _ = searched(
        lambda size: True, rows=100, strategy="dp", num_devices=3, scaling=Scaling.weak
    )
    assert best == 34  # 3 x 34 rows hold all 100


def test_not_even_the_smallest_batch_fits() -> None:
    with pytest.raises(ConfigError, match="not even 1 rows fit: full"):
        searched(lambda size: False)


def test_on_a_cpu_the_limit_must_be_given() -> None:
    with pytest.raises(ConfigError, match="the memory that a process may use must be given"):
        find_batch_size(make_config("none", batch_size="auto"), FACTS, Path())


def test_torchruns_processes_cannot_search() -> None:
    facts = HardwareFacts(2, None, 0, outer_world_size=2)
    config = make_config("ddp", batch_size="auto", process_memory_mib=LIMIT, num_devices=2)
    with pytest.raises(ConfigError, match="torchrun has started those of one run"):
        find_batch_size(config, facts, Path())


# A row takes 8 MiB, until the step's end.
HUNGRY = [
    "model=custom",
    "model._target_=usercode.Hungry",
    "++model.mib_per_row=8",
    "dataset.rows=400",
    "batch_size=auto",
    "steps=3",
]


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        pytest.param("none", 1, id="none", marks=pytest.mark.slow),
        pytest.param("dp", 2, id="dp", marks=pytest.mark.slow),
        pytest.param("ddp", 2, id="ddp"),
    ],
)
def test_a_batch_is_found_that_fits_and_is_near_the_limit(
    strategy: str, devices: int, cli: Cli, tmp_path: Path
) -> None:
    ended = cli(
        *HUNGRY, f"parallel={strategy}", f"num_devices={devices}",
        "process_memory_mib=600", f"hydra.run.dir={tmp_path / 'run'}",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    run = read_run(tmp_path / "run" / "run.json")
    search = run["batch_search"]
    assert run["config"]["batch_size"] == "auto"
    assert run["batch"]["global"] == search["batch_size"]
    # 600 MiB less about 200 to 330 of torch itself leave 33 to 50 rows in a process.
    in_a_process = run["batch"]["global"] // (devices if strategy == "ddp" else 1)
    assert 30 <= in_a_process <= 52
    sizes = {each["batch_size"]: each["fits"] for each in search["tries"]}
    assert sizes[search["batch_size"]] is True
    assert min(size for size, fits in sizes.items() if not fits) > search["batch_size"]
    assert search["limit_bytes_per_process"] == 600 * 2**20
    assert f"batch_size=auto: {search['batch_size']} fits" in ended.stderr
    assert run["steps"]["measured"] + run["steps"]["warmup"] == 3  # the tries are not in it


def test_a_failure_that_is_not_of_memory_ends_the_search(cli: Cli, tmp_path: Path) -> None:
    ended = cli(
        "batch_size=auto", "process_memory_mib=1000", "model=custom",
        "model._target_=usercode.Failing", "+model.how=raise", "+model.rank=0", "+model.call=0",
        f"hydra.run.dir={tmp_path / 'run'}",
    )  # fmt: skip
    assert ended.returncode == 1
    assert "boom" in ended.stderr
    assert read_run(tmp_path / "run" / "run.json")["status"] == "failed"


@pytest.mark.slow
def test_each_cell_of_a_sweep_searches_for_itself(cli: Cli, tmp_path: Path) -> None:
    ended = cli(
        "-m", *HUNGRY, "++model.mib_per_row=64", "parallel=none,dp", "num_devices=1,2",
        "task=train", "process_memory_mib=1000",
        f"hydra.sweep.dir={tmp_path / 'sweep'}",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    runs = {path.parent.name: read_run(path) for path in (tmp_path / "sweep").glob("*/run.json")}
    found = {name: run["batch_search"] for name, run in runs.items() if run["status"] == "ok"}
    assert set(found) == {"0_none_n1", "2_dp_n1", "3_dp_n2"}
    assert all(len(search["tries"]) >= 2 for search in found.values())


def test_training_is_tried_with_the_optimizers_state() -> None:
    config = make_config("none", task=Task.train, batch_size="auto", process_memory_mib=LIMIT)
    found = find_batch_size(config, FACTS, Path.cwd())
    assert found.failure is None
    assert found.record["batch_size"] == 100  # all rows of the exercise
