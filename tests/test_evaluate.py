"""`task=evaluate`: one exact figure over all samples, however many devices share them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from realruns import EVERY, Runs, data, model
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

import dpexp

EVALUATE = ("task=evaluate",)
LIN1 = model("usercode.Lin1")
SPREADS = ["none", "dp on 1", "dp on 2", "dp on 3"]
SPREADS += ["ddp on 1", "ddp on 2", "ddp on 3", "fsdp on 2"]
KINDS = ["map", "stream"]
EVAL5 = {"map": data("usermetrics.eval5"), "stream": data("usermetrics.Stream", of="eval5")}


def numbers(count: int, kind: str = "map") -> tuple[str, ...]:
    """Rows with the values 0, 1, … and the target 0."""
    listed = f"[{','.join(map(str, range(count)))}]"
    if kind == "map":
        return data("usercode.column", values=listed)
    return data("usermetrics.Stream", of="column", values=listed)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory)


def metric(run: dpexp.Run) -> dict[str, Any]:
    """As run.json has it, which must be what the API gives."""
    written = json.loads((run.folder / "run.json").read_text(encoding="utf-8"))["metric"]
    assert written == run.result.metric
    return dict(written)


# EVAL5: 4 of 5 are right. Samples that are counted twice would give 4/6.


@pytest.mark.parametrize(
    ("spread", "kind"),
    [*((spread, "map") for spread in SPREADS)]
    + [(spread, "stream") for spread in ("none", "dp on 3", "ddp on 2", "ddp on 3", "fsdp on 2")],
)
def test_four_of_five_are_right(run: Runs, spread: str, kind: str) -> None:
    got = run(
        *EVALUATE, *EVAL5[kind], *model("usermetrics.SaysOne"), "batch_size=2", *EVERY[spread]
    )
    assert metric(got) == {"name": "accuracy", "value": 0.8, "samples": 5}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spread", ["none", "ddp on 2", "ddp on 3"])
def test_four_of_five_are_right_from_two_loader_processes(
    run: Runs, spread: str, kind: str
) -> None:
    loader = ("batch_size=2", "loader.workers=2")
    got = run(*EVALUATE, *EVAL5[kind], *model("usermetrics.SaysOne"), *loader, *EVERY[spread])
    assert metric(got) == {"name": "accuracy", "value": 0.8, "samples": 5}


# Means: 4.0 of 0..8, 4.5 of 0..9


@pytest.mark.parametrize(
    ("spread", "count", "mean"),
    [*((spread, 9, 4.0) for spread in SPREADS), ("ddp on 2", 10, 4.5), ("ddp on 3", 10, 4.5)],
)
def test_the_mean_counts_each_sample_once(run: Runs, spread: str, count: int, mean: float) -> None:
    got = run(*EVALUATE, *numbers(count), *LIN1, "metric=l1", "batch_size=4", *EVERY[spread])
    assert metric(got) == {"name": "l1", "value": mean, "samples": count}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spread", ["ddp on 2"])
def test_ten_rows_a_batch_are_five_for_each_rank(
    run: Runs, spread: str, kind: str, workers: int
) -> None:
    how = ("metric=l1", "batch_size=10", f"loader.workers={workers}")
    got = run(*EVALUATE, *numbers(9, kind), *LIN1, *how, *EVERY[spread])
    assert metric(got) == {"name": "l1", "value": 4.0, "samples": 9}


@pytest.mark.parametrize("spread", SPREADS)
def test_a_mean_that_the_model_returns_is_weighted_by_its_rows(run: Runs, spread: str) -> None:
    # Of 9 rows in batches of 4 the parts are unequal under every strategy.
    inputs = data("usercode.inputs_only", values="[0,1,2,3,4,5,6,7,8]")
    got = run(*EVALUATE, *inputs, *model("usermetrics.MeanOutput"), "batch_size=4", *EVERY[spread])
    assert metric(got)["value"] == pytest.approx(4.0, abs=1e-6)
    assert metric(got)["samples"] == 9


# Metrics of the user's


@pytest.mark.parametrize("name", ["absolute", "mean_absolute"])
@pytest.mark.parametrize("spread", ["none", "dp on 3", "ddp on 2", "ddp on 3"])
def test_a_users_function_is_a_mean_over_rows(run: Runs, spread: str, name: str) -> None:
    own = f"metric={{_target_: usermetrics.{name}}}"
    got = run(*EVALUATE, *numbers(9), *LIN1, own, "batch_size=4", *EVERY[spread])
    assert metric(got)["name"] == name
    assert metric(got)["value"] == pytest.approx(4.0, abs=1e-6)
    assert metric(got)["samples"] == 9


@pytest.mark.parametrize(
    ("spread", "workers"),
    [("none", 0), ("dp on 3", 0), ("ddp on 2", 0), ("ddp on 3", 2), ("fsdp on 2", 0)],
)
def test_an_object_with_update_and_compute_sees_each_row_once(
    run: Runs, spread: str, workers: int
) -> None:
    own = ("metric={_target_: usermetrics.Largest}", "batch_size=4", *EVERY[spread])
    loader = (f"loader.workers={workers}",) if workers else ()
    got = run(*EVALUATE, *numbers(9), *LIN1, *own, *loader)
    assert metric(got) == {"name": "Largest", "value": 8.009, "samples": 9}


@pytest.mark.parametrize("spread", ["none", "ddp on 2", "fsdp on 2"])
@pytest.mark.parametrize("kind", ["dataclass", "model_output"])
def test_a_users_function_gets_whole_batches_of_a_users_output(
    run: Runs, kind: str, spread: str
) -> None:
    own = ("metric={_target_: usermetrics.mean_logits}", "batch_size=4", *EVERY[spread])
    got = run(*EVALUATE, *numbers(9), *model("usermetrics.Fielded", kind=kind), *own)
    assert metric(got)["value"] == pytest.approx(4.0, abs=1e-6)
    assert metric(got)["samples"] == 9


# Where the figure is written


def hparams_metrics(board: EventAccumulator) -> list[str]:
    content = board.SummaryMetadata("_hparams_/experiment").plugin_data.content
    experiment = HParamsPluginData.FromString(content).experiment
    return [info.name.tag for info in experiment.metric_infos]


def event_files(folder: Path) -> list[Path]:
    return list(folder.rglob("events.out.tfevents.*"))


@pytest.mark.parametrize("spread", ["none", "dp on 3", "ddp on 2"])
@pytest.mark.parametrize(
    ("asked", "tag", "value"),
    [
        ("metric=l1", "metric/l1", 4.0),
        ("metric={_target_: usermetrics.absolute}", "metric/absolute", 4.0),
        ("metric={_target_: usermetrics.Largest}", "metric/Largest", 8.009),
    ],
)
def test_the_metric_is_a_scalar_and_a_column_of_hparams(
    run: Runs, spread: str, asked: str, tag: str, value: float
) -> None:
    got = run(*EVALUATE, *numbers(9), *LIN1, asked, "batch_size=4", *EVERY[spread])
    assert len(event_files(got.folder)) == 1
    board = EventAccumulator(str(got.folder))
    board.Reload()
    scalars = board.Scalars(tag)
    assert [event.value for event in scalars] == pytest.approx([value], abs=1e-6)
    assert tag in hparams_metrics(board)
    assert not [name for name in board.Tags()["scalars"] if name.startswith("loss/")]


def test_an_evaluation_changes_no_weight(run: Runs) -> None:
    for spread in SPREADS:
        got = run(
            *EVALUATE, *EVAL5["map"], *model("usermetrics.SaysOne"), "batch_size=2", *EVERY[spread]
        )
        facts = got.result.model
        assert facts["final_sha256"] == facts["initial_sha256"]


@pytest.mark.parametrize("wrong", ["drop_last=true", "epochs=2", "accumulate=2"])
def test_what_would_count_samples_otherwise_is_refused(run: Runs, wrong: str) -> None:
    with pytest.raises(dpexp.ConfigError, match=wrong.partition("=")[0]):
        run(*EVALUATE, *numbers(9), *LIN1, wrong)
