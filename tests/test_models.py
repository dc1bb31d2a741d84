"""Public kinds of models run by config alone, and equally under every strategy."""

from __future__ import annotations

import pytest
import torch
from realruns import NONE, SPREAD, Runs, column, data, difference, model, weights

import dpexp

TRAIN = ("task=train", "save_weights=true", "epochs=null", "steps=5", "optimizer.lr=0.1")
# Batches of 4, 4 and 2 rows: on 3 devices the third one is idle in the last batch.
TEN = ("batch_size=4",)
IMAGES = ("dataset=images", "dataset.rows=10", "dataset.height=8", "dataset.width=8")
CLASSES = ("dataset.classes=4",)

# What is trained, by the name of the kind.
KINDS: dict[str, tuple[str, ...]] = {
    "vit": (*IMAGES, *CLASSES, *model("ViT")),
    "decoder with its own loss": (*data("TokenDicts"), *model("Decoder")),
    "decoder that returns a dict": (*data("TokenDicts"), *model("Decoder", kind="dict")),
    "lstm": (*data("sequences"), *model("Recurrent")),
    "two inputs": (*data("pairs"), *model("TwoInputs")),
    "dict output": (*data("classes"), *model("DictOutput")),
    "frozen backbone": (*data("classes"), *model("Finetuned")),
    "bool buffer": (*data("classes"), *model("BoolBuffer")),
    "gpt on tokens": (
        *("dataset=tokens", "dataset.rows=10", "dataset.length=6", "dataset.vocabulary=16"),
        *("model=gpt", "model.length=6", "model.vocabulary=16", "model.width=8", "model.heads=2"),
    ),
    "nested records": (
        *data("Records"),
        *model("Weighted"),
        *("batch.inputs=[image.pixels,meta.weight]", "batch.target=label"),
    ),
    "nested records by keyword": (
        *data("Records"),
        *model("Weighted"),
        *("batch.inputs={weight: meta.weight, pixels: image.pixels}", "batch.target=label"),
    ),
    "whole records": (*data("Records"), *model("WholeRecord"), "batch.target=label"),
}
FOUR = ("dp on 2", "dp on 3", "ddp on 2", "fsdp on 2")
# Variants of a kind that has all four already.
VARIANTS = ("decoder that returns a dict", "nested records by keyword", "whole records")
# Run with the slow tests: dp on 3, and of dp and fsdp on 2 every second one, in turns.
SLOW = ({"dp on 3", "dp on 2"}, {"dp on 3", "fsdp on 2"})
PAIRS = [
    pytest.param(kind, spread, marks=[pytest.mark.slow] if spread in SLOW[place % 2] else [])
    for place, kind in enumerate(KINDS)
    if kind not in VARIANTS
    for spread in FOUR
]
PAIRS += [
    *((kind, spread) for kind in VARIANTS for spread in ("dp on 2", "ddp on 2")),
    ("gpt on tokens", "ddp on 3"),
    ("decoder with its own loss", "ddp on 3"),
]
RESNET = (*IMAGES, *CLASSES, *model("ResNet"), "batch_size=5")
# The metric and how well it has to agree: a count must agree exactly.
METRICS = {"accuracy": 0.0, "cross_entropy": 1e-6}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory)


@pytest.mark.parametrize("kind", KINDS)
def test_one_device_trains_the_kind(run: Runs, kind: str) -> None:
    got = run(*KINDS[kind], *TRAIN, *TEN, *NONE)
    assert column(got, "global_rows") == [4, 4, 2, 4, 4]
    assert got.result.model["final_sha256"] != got.result.model["initial_sha256"]
    assert all(0 < loss < 100 for loss in column(got, "loss"))


@pytest.mark.parametrize(("kind", "spread"), PAIRS)
def test_several_devices_train_the_kind_like_one(run: Runs, kind: str, spread: str) -> None:
    single = run(*KINDS[kind], *TRAIN, *TEN, *NONE)
    several = run(*KINDS[kind], *TRAIN, *TEN, *SPREAD[spread])
    assert several.result.model["initial_sha256"] == single.result.model["initial_sha256"]
    assert difference(weights(several), weights(single)) <= 1e-6
    assert column(several, "loss") == pytest.approx(column(single, "loss"), abs=1e-6)


def test_only_the_head_of_a_frozen_backbone_moves(run: Runs) -> None:
    torch.manual_seed(0)
    import usermodels

    fresh = usermodels.Finetuned().state_dict()
    for spread in (NONE, *(SPREAD[name] for name in FOUR)):
        saved = weights(run(*KINDS["frozen backbone"], *TRAIN, *TEN, *spread))
        moved = {name for name, tensor in saved.items() if not torch.equal(tensor, fresh[name])}
        assert moved == {"head.weight", "head.bias"}


def test_a_bool_buffer_stays_bool(run: Runs) -> None:
    for spread in (NONE, *(SPREAD[name] for name in FOUR)):
        saved = weights(run(*KINDS["bool buffer"], *TRAIN, *TEN, *spread))
        assert saved["mask"].dtype is torch.bool
        assert saved["mask"].tolist() == [True, False, True, True, False]


def test_tied_weights_stay_tied(run: Runs) -> None:
    for spread in (NONE, *(SPREAD[name] for name in FOUR)):
        saved = weights(run(*KINDS["decoder with its own loss"], *TRAIN, *TEN, *spread))
        assert torch.equal(saved["head.weight"], saved["tokens.weight"])


# A plain dataclass as output

DATACLASS = (*data("TokenDicts"), *model("Decoder", kind="dataclass"))


@pytest.mark.parametrize("spread", ["ddp on 2", "fsdp on 2"])
def test_a_dataclass_with_its_own_loss_is_trained_by_ranks(run: Runs, spread: str) -> None:
    single = run(*DATACLASS, *TRAIN, *TEN, *NONE)
    several = run(*DATACLASS, *TRAIN, *TEN, *SPREAD[spread])
    assert difference(weights(several), weights(single)) <= 1e-6


def test_a_dataclass_is_refused_by_dp_with_its_name(run: Runs) -> None:
    with pytest.raises(dpexp.ConfigError, match="PlainOutput"):
        run(*DATACLASS, *TRAIN, *TEN, *SPREAD["dp on 2"])


# BatchNorm: training differs by design, evaluation does not


@pytest.mark.parametrize("spread", ["none", *FOUR, "ddp on 3"])
def test_a_cnn_with_batch_norm_trains_under_every_strategy(run: Runs, spread: str) -> None:
    # Of 5 rows the third of 3 devices gets one, which is 64 values for each BatchNorm2d channel.
    overrides = NONE if spread == "none" else SPREAD[spread]
    got = run(*RESNET, *TRAIN, *overrides)
    saved = weights(got)
    assert saved["stem.1.num_batches_tracked"].item() == 5
    assert not torch.equal(saved["stem.1.running_mean"], torch.zeros(4))
    assert all(torch.isfinite(tensor).all() for tensor in saved.values())


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("spread", [*FOUR, "ddp on 3"])
def test_a_trained_cnn_with_batch_norm_is_evaluated_alike(
    run: Runs, spread: str, metric: str
) -> None:
    trained = run(*RESNET, *TRAIN, *NONE).folder / "weights.pt"
    evaluate = (*RESNET, "task=evaluate", f"prepare.init_from={trained}", f"metric={metric}")
    single = run(*evaluate, *NONE).result.metric
    several = run(*evaluate, *SPREAD[spread]).result.metric
    assert several["samples"] == single["samples"] == 10
    assert several["value"] == pytest.approx(single["value"], abs=METRICS[metric], rel=0)


@pytest.mark.parametrize("spread", ["dp on 2", "ddp on 2", "fsdp on 2"])
@pytest.mark.parametrize("kind", ["vit", "decoder with its own loss", "lstm", "dict output"])
def test_the_kind_is_evaluated_alike(run: Runs, kind: str, spread: str) -> None:
    evaluate = (*KINDS[kind], *TEN, "task=evaluate")
    single = run(*evaluate, *NONE).result.metric
    several = run(*evaluate, *SPREAD[spread]).result.metric
    assert several["name"] == single["name"]
    assert several["samples"] == single["samples"] == 10
    assert several["value"] == pytest.approx(single["value"], abs=1e-6)


# Parameters that the loss does not reach

UNUSED = (*data("classes"), *model("Unused"), *TEN)


def test_without_its_option_ddp_says_that_parameters_are_unused(run: Runs) -> None:
    with pytest.raises(dpexp.ConfigError, match="did not use 2 of its parameters") as caught:
        run(*UNUSED, *TRAIN, *SPREAD["ddp on 2"])
    assert str(caught.value).endswith("Try: parallel.find_unused_parameters=true")


@pytest.mark.parametrize(
    "spread",
    [
        SPREAD["dp on 2"],
        (*SPREAD["ddp on 2"], "parallel.find_unused_parameters=true"),
        (*SPREAD["ddp on 3"], "parallel.find_unused_parameters=true"),
        (*SPREAD["ddp on 2"], "parallel.static_graph=true"),
        SPREAD["fsdp on 2"],
    ],
)
def test_unused_parameters_stay_and_the_others_train_like_on_one_device(
    run: Runs, spread: tuple[str, ...]
) -> None:
    single = weights(run(*UNUSED, *TRAIN, *NONE))
    several = weights(run(*UNUSED, *TRAIN, *spread))
    assert difference(several, single) <= 1e-6
