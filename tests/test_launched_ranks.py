"""What the ranks of a run share and what each has of its own: threads, logs, seeds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from conftest import Cli
from launched import DDP2, column, diary, entries, ok, records

import dpexp
from dpexp import env, server

CORES = env.usable_cores()


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Have one fork server for all, started before any test sets a variable."""
    server.start(several_ranks=True)


# Threads


def threads(run: dpexp.Run) -> list[int]:
    assert run.result.threads_per_process == run.result.ranks[0]["threads"]
    return [rank["threads"] for rank in run.result.ranks]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("parallel=none",), [CORES]),
        (("parallel=dp", "num_devices=2"), [CORES]),
        (DDP2, [max(1, CORES // 2)] * 2),
        (("parallel=ddp", "num_devices=3"), [max(1, CORES // 3)] * 3),
    ],
    ids=["none", "dp", "ddp-2", "ddp-3"],
)
def test_the_ranks_share_the_cores(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: tuple[str, ...],
    expected: list[int],
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads(ok(*overrides, "steps=1", folder=tmp_path)) == expected


@pytest.mark.parametrize("overrides", [("parallel=none",), DDP2], ids=["none", "ddp"])
def test_a_number_of_threads_that_the_user_set_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    run = ok(*overrides, "steps=1", folder=tmp_path)
    assert set(threads(run)) == {3}
    assert run.result.environment["variables"]["OMP_NUM_THREADS"] == "3"


@pytest.mark.slow
def test_threads_set_through_hydra_are_kept_too(cli: Cli, tmp_path: Path) -> None:
    ended = cli(*DDP2, '+hydra.job.env_set.OMP_NUM_THREADS="3"', "steps=1")
    assert ended.returncode == 0, ended.stderr
    (record,) = records(tmp_path)
    assert {rank["threads"] for rank in record["ranks"]} == {3}


def test_more_devices_than_cores_is_noted_with_both_numbers(tmp_path: Path) -> None:
    run = ok("parallel=dp", f"num_devices={CORES + 1}", "steps=1", folder=tmp_path)
    assert any(f"{CORES + 1} devices share {CORES} core" in note for note in run.result.notes)


# Logs


def test_each_ranks_log_lines_are_in_the_log_and_warnings_on_the_console(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    ok(*DDP2, "model=custom", "model._target_=usercode.Talking", folder=tmp_path)
    lines = (tmp_path / "dpexp.log").read_text(encoding="utf-8").splitlines()
    said = [line.split("]", 1)[1] for line in lines if "[user]" in line]
    assert Counter(said) == Counter(
        [
            f"[rank={rank}][user][{level}] {text}"
            for rank in (0, 1)
            for level, text in (("INFO", "an info"), ("WARNING", "a warning"))
        ]
    )
    console = [line for line in capfd.readouterr().err.splitlines() if "rank=" in line]
    assert Counter(console) == Counter(
        [
            "INFO [rank=0] an info",
            "WARNING [rank=0] a warning",
            "WARNING [rank=1] a warning",
        ]
    )


def test_a_layer_hidden_in_a_list_is_warned_about_by_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    ok("model=custom", "model._target_=usercode.Hiding", folder=tmp_path)
    assert "hidden holds modules" in capfd.readouterr().err
    assert "hidden holds modules" in (tmp_path / "dpexp.log").read_text(encoding="utf-8")


# Seeds


def test_each_epoch_has_an_order_of_its_own_and_every_row_once(tmp_path: Path) -> None:
    data = (*column(*range(8)), "batch_size=4", "epochs=2")
    ok(*DDP2, *data, *diary(tmp_path / "rows", "rows"), folder=tmp_path / "run")
    first, second = entries(tmp_path / "rows", 0), entries(tmp_path / "rows", 1)
    epochs = []
    for start in (0, 2):
        order = [row for step in (start, start + 1) for row in (*first[step], *second[step])]
        assert sorted(order) == list(range(8))
        epochs.append(order)
    assert epochs[0] != epochs[1]
    assert epochs[0] != sorted(epochs[0])


def test_without_shuffling_the_rows_come_in_order(tmp_path: Path) -> None:
    data = (*column(*range(8)), "batch_size=4", "epochs=2", "shuffle=false")
    ok(*DDP2, *data, *diary(tmp_path / "rows", "rows"), folder=tmp_path / "run")
    assert entries(tmp_path / "rows", 0) == [[0, 1], [4, 5], [0, 1], [4, 5]]
    assert entries(tmp_path / "rows", 1) == [[2, 3], [6, 7], [2, 3], [6, 7]]


def test_every_strategy_has_the_same_order(tmp_path: Path) -> None:
    data = (*column(*range(8)), "batch_size=4")
    ok(*data, *diary(tmp_path / "none", "rows"), folder=tmp_path / "run-none")
    ok(*DDP2, *data, *diary(tmp_path / "ddp", "rows"), folder=tmp_path / "run-ddp")
    ranks = zip(entries(tmp_path / "ddp", 0), entries(tmp_path / "ddp", 1), strict=True)
    assert [[*first, *second] for first, second in ranks] == entries(tmp_path / "none", 0)


def test_the_ranks_draw_different_numbers_in_the_model_and_two_runs_the_same(
    tmp_path: Path,
) -> None:
    streams = []
    for number in (0, 1):
        path = tmp_path / f"noise{number}"
        noise = diary(path, "noise")
        ok(*DDP2, *column(1, 2), *noise, folder=tmp_path / f"run{number}")
        streams.append([entries(path, rank) for rank in (0, 1)])
    assert streams[0][0] != streams[0][1]
    assert streams[0] == streams[1]


@pytest.mark.parametrize(
    ("source", "workers"), [("torch", 0), ("numpy", 0), ("random", 0), ("torch", 1), ("numpy", 1)]
)
def test_the_ranks_draw_different_numbers_in_the_dataset_and_two_runs_the_same(
    tmp_path: Path, source: str, workers: int
) -> None:
    noisy = ("dataset=custom", "dataset._target_=usercode.NoisyRows", f"+dataset.source={source}")
    streams = []
    for number in (0, 1):
        path = tmp_path / f"rows{number}"
        load = (*noisy, f"loader.workers={workers}", *diary(path, "rows"))
        ok(*DDP2, *load, folder=tmp_path / f"run{number}")
        streams.append([entries(path, rank) for rank in (0, 1)])
    assert streams[0][0] != streams[0][1]
    assert streams[0] == streams[1]
