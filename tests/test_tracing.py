"""A trace of a few steps after the timed ones."""

from __future__ import annotations

import csv
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from realruns import Runs, data, model

from dpexp.tracing import STEPS, _Labels, _without_markers

MLP = ("model=mlp", "model.widths=[5,64,2]", "task=train", "save_weights=true")
PHASES = ("data", "transfer", "forward", "backward", "optimizer", "other")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory)


def events(path: Path) -> list[dict[str, Any]]:
    trace = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(trace["traceEvents"], list)
    return [event for event in trace["traceEvents"] if event.get("ph") == "X"]


def labels(path: Path) -> Counter[str]:
    found = Counter(e["name"] for e in events(path) if e.get("cat") == "user_annotation")
    return Counter({name: found[name] for name in PHASES if found[name]})


def inside(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    begin, end = outer["ts"], outer["ts"] + outer["dur"]
    return bool(begin <= inner["ts"] and inner["ts"] + inner["dur"] <= end)


def test_a_trace_has_the_phases_and_the_operators_in_them(runs: Runs) -> None:
    path = runs(*MLP, "trace=true").folder / "trace.rank0.json"
    assert labels(path) == dict.fromkeys(PHASES, STEPS)
    forward = [event for event in events(path) if event["name"] == "forward"]
    products = [event for event in events(path) if event["name"] == "aten::addmm"]
    assert len(products) == 2 * STEPS  # two layers
    assert all(any(inside(product, each) for each in forward) for product in products)


def test_micro_batches_have_labels_of_their_own(runs: Runs) -> None:
    path = runs(*MLP, "trace=true", "accumulate=3").folder / "trace.rank0.json"
    micro = {"forward": 3 * STEPS, "backward": 3 * STEPS}
    assert labels(path) == {**dict.fromkeys(PHASES, STEPS), **micro}


def test_every_rank_writes_its_own_with_the_collectives_in_it(runs: Runs) -> None:
    folder = runs(*MLP, "trace=true", "parallel=ddp", "num_devices=2").folder
    for rank in range(2):
        path = folder / f"trace.rank{rank}.json"
        assert labels(path) == dict.fromkeys(PHASES, STEPS)
        assert "gloo:all_reduce" in {event["name"] for event in events(path)}
    assert not list(folder.glob(".trace*"))


def test_the_threads_of_virtual_devices_are_in_it(runs: Runs) -> None:
    folder = runs(*MLP, "trace=true", "parallel=dp", "num_devices=2").folder
    products = [e for e in events(folder / "trace.rank0.json") if e["name"] == "aten::addmm"]
    assert len(products) == 2 * 2 * STEPS
    assert len({event["tid"] for event in products}) == 2


@pytest.mark.parametrize("options", [("task=forward",), ("task=evaluate",)])
def test_what_does_not_happen_has_no_label(options: tuple[str, ...], runs: Runs) -> None:
    path = runs(*options, "trace=true").folder / "trace.rank0.json"
    assert set(labels(path)) == {"data", "transfer", "forward", "other"}


@pytest.mark.parametrize("options", [(), ("parallel=ddp", "num_devices=2", "shapes.depth=1")])
def test_the_numbers_and_the_weights_of_a_run_stay_the_same(
    options: tuple[str, ...], runs: Runs
) -> None:
    plain, traced = runs(*MLP, *options), runs(*MLP, *options, "trace=true")
    assert traced.result.model == plain.result.model  # the fingerprints of the weights too
    same: list[Callable[[Any], Any]] = [
        lambda run: run.result.loss,
        lambda run: run.result.steps,
        lambda run: run.result.samples_seen,
        lambda run: run.result.throughput["samples_measured"],
        lambda run: {phase: each.count for phase, each in run.result.timing.items()},
        lambda run: (run.folder / "shapes.csv").read_text(),
        lambda run: [(row["step"], row["loss"]) for row in table(run.folder)],
        lambda run: (run.folder / "weights.pt").read_bytes(),
    ]
    for read in same:
        assert read(traced) == read(plain)
    assert not list(plain.folder.glob("trace*"))


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "steps.rank0.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_stream_and_loader_processes_are_read_anew(runs: Runs) -> None:
    options = ("trace=true", "loader.workers=1", "parallel=ddp", "num_devices=2")
    stream = data("userstreams.Numbers", rows=6)
    for more in ((), (*stream, "batch_size=2", "model.in_features=1")):
        folder = runs(*options, *more).folder
        assert labels(folder / "trace.rank1.json")["forward"] == STEPS


def test_a_model_that_fails_in_the_extra_steps_leaves_the_figures(runs: Runs) -> None:
    run = runs.ended(*model("usercode.Failing", how="raise", rank=0, call=5), "trace=true")
    assert run.result.status == "failed"
    assert run.result.error is not None
    assert run.result.timing is not None
    assert run.result.steps == {"measured": 3, "warmup": 1}
    assert not list(run.folder.glob("*trace*"))


def test_labels_follow_the_phases_that_the_loop_names(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Label:
        def __init__(self, name: str) -> None:
            self._name = name

        def __enter__(self) -> None:
            told.append(f"+{self._name}")

        def __exit__(self, *_: object) -> None:
            told.append(f"-{self._name}")

    monkeypatch.setattr("dpexp.tracing.record_function", Label)
    labels = _Labels()
    labels.step = 3
    labels.phase = "data"
    labels.phase = "forward"
    labels.close()
    labels.close()
    assert told == ["+data", "-data", "+forward", "-forward"]


def test_only_the_profilers_own_markers_are_kept_from_the_terminal(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with _without_markers():
        os.write(2, b"USDT:2026 profiler_start\nWARNING: something\n")
    os.write(2, b"USDT: after\n")
    assert capfd.readouterr().err == "WARNING: something\nUSDT: after\n"
