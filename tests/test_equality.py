"""none, dp and ddp train the same weights and log the same losses, row for row."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import usercode
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch import nn

import dpexp
from dpexp import server

Runner = Callable[..., dpexp.Run]

SPREAD = {
    "dp on 2": ("parallel=dp", "num_devices=2"),
    "dp on 3": ("parallel=dp", "num_devices=3"),
    "ddp on 2": ("parallel=ddp", "num_devices=2"),
    "ddp on 3": ("parallel=ddp", "num_devices=3"),
    "dp on 4": ("parallel=dp", "num_devices=4"),
    "ddp on 4": ("parallel=ddp", "num_devices=4"),
}
FEW = ("dp on 2", "dp on 3", "ddp on 2", "ddp on 3")
EVERY = {"none": ("parallel=none",), **SPREAD}

FIVE_STEPS = ("task=train", "save_weights=true", "epochs=null", "steps=5", "optimizer.lr=0.1")
# What is trained for five steps, and the rows of each of the five global batches.
CASES: dict[str, tuple[tuple[str, ...], list[int]]] = {
    "uneven last batch": (("dataset.rows=100", "batch_size=30"), [30, 30, 30, 10, 30]),
    "momentum and weight decay": (
        ("dataset.rows=100", "++optimizer.momentum=0.9", "++optimizer.weight_decay=0.1"),
        [30, 30, 30, 10, 30],
    ),
    "digits and a cnn": (
        ("dataset=digits", "model=cnn", "batch_size=400"),
        [400, 400, 400, 400, 197],
    ),
    "last batch of one row": (("dataset.rows=10", "batch_size=3"), [3, 3, 3, 1, 3]),
    "fewer rows than devices": (("dataset.rows=10", "batch_size=2"), [2, 2, 2, 2, 2]),
}
ON = {
    "uneven last batch": FEW,
    "momentum and weight decay": ("dp on 3", "ddp on 3"),
    "digits and a cnn": FEW,
    "last batch of one row": ("dp on 3", "ddp on 3"),
    "fewer rows than devices": ("dp on 4", "ddp on 4"),
}
PAIRS = [(case, spread) for case, spreads in ON.items() for spread in spreads]

RAMP5 = ("dataset=custom", "dataset._target_=usercode.ramp5", "batch_size=5", "steps=1")
ONE_STEP = ("task=train", "save_weights=true", "optimizer.lr=0.1", "shuffle=false")


def model(name: str) -> tuple[str, ...]:
    return ("model=custom", f"model._target_={name}")


def values(*numbers: float) -> tuple[str, ...]:
    listed = ",".join(map(str, numbers))
    return ("dataset=custom", "dataset._target_=usercode.column", f"+dataset.values=[{listed}]")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Run a configuration once; asked again, give the same run."""
    server.start(several_ranks=True)
    done: dict[tuple[str, ...], dpexp.Run] = {}

    def once(*overrides: str) -> dpexp.Run:
        if overrides not in done:
            folder = tmp_path_factory.mktemp("run")
            done[overrides] = dpexp.run(list(overrides), folder=folder)
        result = done[overrides].result
        assert result.status == "ok", result.error and result.error.traceback
        return done[overrides]

    return once


def weights(run: dpexp.Run) -> dict[str, Any]:
    return torch.load(run.folder / "weights.pt", weights_only=True)


def rows(run: dpexp.Run, rank: int = 0) -> list[dict[str, str]]:
    with (run.folder / f"steps.rank{rank}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def losses(run: dpexp.Run) -> list[float]:
    return [float(row["loss"]) for row in rows(run)]


def events(run: dpexp.Run) -> EventAccumulator:
    board = EventAccumulator(str(run.folder), size_guidance={"scalars": 0, "tensors": 0})
    board.Reload()
    return board


def hparams(run: dpexp.Run) -> dict[str, Any]:
    content = events(run).SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    info = HParamsPluginData.FromString(content).session_start_info
    return {key: getattr(v, v.WhichOneof("kind")) for key, v in info.hparams.items()}


def assert_equal(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(got) == list(expected)
    for name, tensor in expected.items():
        assert (got[name] - tensor).abs().max().item() <= 1e-6, name


def test_one_device_trains_like_a_loop_written_by_hand(run: Runner, tmp_path: Path) -> None:
    inputs, targets = torch.randn(100, 5), torch.randn(100, 2)
    torch.save({"x": inputs, "y": targets}, tmp_path / "rows.pt")
    data = ("dataset=tensors", f"dataset.path={tmp_path / 'rows.pt'}", "shuffle=false")
    got = run(*FIVE_STEPS, *data, "seed=7")

    torch.manual_seed(7)
    layer = nn.Linear(5, 2)
    expected = []
    for start, end in ((0, 30), (30, 60), (60, 90), (90, 100), (0, 30)):
        loss = nn.functional.mse_loss(layer(inputs[start:end]), targets[start:end])
        gradients = torch.autograd.grad(loss, list(layer.parameters()))
        for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
            parameter.data.sub_(0.1 * gradient)
        expected.append(loss.item())

    assert_equal(weights(got), layer.state_dict())
    assert losses(got) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_five_steps_on_one_device_change_the_weights_in_the_stated_batches(
    run: Runner, case: str
) -> None:
    overrides, sizes = CASES[case]
    single = run(*FIVE_STEPS, *overrides)
    assert [int(row["global_rows"]) for row in rows(single)] == sizes
    assert single.result.model["final_sha256"] != single.result.model["initial_sha256"]


@pytest.mark.parametrize(("case", "spread"), PAIRS)
def test_weights_after_five_steps_equal_those_of_one_device(
    run: Runner, case: str, spread: str
) -> None:
    overrides, _ = CASES[case]
    single = run(*FIVE_STEPS, *overrides)
    several = run(*FIVE_STEPS, *overrides, *SPREAD[spread])
    assert_equal(weights(several), weights(single))


@pytest.mark.parametrize(("case", "spread"), PAIRS)
def test_logged_losses_equal_those_of_one_device(run: Runner, case: str, spread: str) -> None:
    overrides, _ = CASES[case]
    single = run(*FIVE_STEPS, *overrides)
    several = run(*FIVE_STEPS, *overrides, *SPREAD[spread])
    assert losses(several) == pytest.approx(losses(single), abs=1e-6)
    logged = [event.value for event in events(several).Scalars("loss/train")]
    assert logged == pytest.approx(losses(single), abs=1e-6)
    summary = several.result.loss
    assert [summary["first"], summary["last"]] == pytest.approx(
        [losses(single)[0], losses(single)[-1]], abs=1e-6
    )


@pytest.mark.parametrize(("case", "spread"), PAIRS)
def test_initial_weights_are_the_same_under_every_strategy(
    run: Runner, case: str, spread: str
) -> None:
    overrides, _ = CASES[case]
    single = run(*FIVE_STEPS, *overrides)
    several = run(*FIVE_STEPS, *overrides, *SPREAD[spread])
    assert several.result.model["initial_sha256"] == single.result.model["initial_sha256"]


def test_initial_weights_differ_between_seeds(run: Runner) -> None:
    overrides, _ = CASES["uneven last batch"]
    first, other = run(*FIVE_STEPS, *overrides), run(*FIVE_STEPS, *overrides, "seed=1")
    assert first.result.model["initial_sha256"] != other.result.model["initial_sha256"]


def test_the_same_run_twice_gives_the_same_bits(run: Runner, tmp_path: Path) -> None:
    overrides = [*FIVE_STEPS, *CASES["uneven last batch"][0], *SPREAD["ddp on 2"]]
    again = dpexp.run(overrides, folder=tmp_path)
    assert again.result.model["final_sha256"] == run(*overrides).result.model["final_sha256"]


@pytest.mark.parametrize("spread", ["none", "dp on 2", "dp on 4", "ddp on 2", "ddp on 4"])
@pytest.mark.parametrize(
    ("name", "loss"),
    [("Lin1", "auto"), ("Lin1WithLoss", "output"), ("Lin1AlsoLoss", "output")],
)
def test_gradient_of_uneven_shards_is_that_of_the_whole_batch(
    run: Runner, spread: str, name: str, loss: str
) -> None:
    # x = 0..4, target 0, weight 1: loss = mean(x²) = 6, gradient = 2 mean(x²) = 12.
    got = run(*RAMP5, *ONE_STEP, *model(f"usercode.{name}"), f"loss={loss}", *EVERY[spread])
    assert weights(got)["layer.weight"].item() == pytest.approx(1 - 0.1 * 12.0, abs=1e-6)
    assert losses(got) == pytest.approx([6.0], abs=1e-6)


@pytest.mark.parametrize("spread", ["none", "dp on 2", "ddp on 2", "ddp on 4"])
def test_learning_rate_and_loss_are_not_scaled_by_the_number_of_devices(
    run: Runner, spread: str
) -> None:
    # x = 1..4, target 0, weight 1: loss = mean(x²) = 7.5, gradient = 15.
    data = (*values(1, 2, 3, 4), "batch_size=4", "steps=1")
    got = run(*data, *ONE_STEP, *model("usercode.Lin1"), *EVERY[spread])
    assert weights(got)["layer.weight"].item() == pytest.approx(1 - 0.1 * 15.0, abs=1e-6)
    assert losses(got) == pytest.approx([7.5], abs=1e-6)
    assert got.result.config["optimizer"]["lr"] == 0.1
    assert hparams(got)["optimizer.lr"] == 0.1


@pytest.mark.parametrize(
    ("spread", "mean", "variance"),
    # All of 0, 2, 10, 14: mean 6.5, unbiased variance 43.666667. Only 0 and 2: 1 and 2.
    [("none", 0.65, 5.266667), ("dp on 2", 0.1, 1.1), ("ddp on 2", 0.1, 1.1)],
)
def test_batch_norm_statistics_come_from_the_first_device(
    run: Runner, spread: str, mean: float, variance: float
) -> None:
    data = (*values(0, 2, 10, 14), "batch_size=4", "shuffle=false", "save_weights=true")
    norm = (*model("torch.nn.BatchNorm1d"), "+model.num_features=1", "+model.momentum=0.1")
    saved = weights(run(*data, *norm, *EVERY[spread]))
    assert saved["running_mean"].item() == pytest.approx(mean, abs=1e-6)
    assert saved["running_var"].item() == pytest.approx(variance, abs=1e-5)
    assert saved["num_batches_tracked"].item() == 1


def test_batch_norm_of_ddp_keeps_rank_0s_statistics_over_two_steps(run: Runner) -> None:
    # Rank 0 sees 0..3 twice: 0.9 (0.1 x 1.5) + 0.1 x 1.5 = 0.285; rank 1 would have 1.285 or more.
    data = (*values(0, 1, 2, 3, 10, 11, 12, 13), "batch_size=8", "epochs=2", "shuffle=false")
    norm = (*model("torch.nn.BatchNorm1d"), "+model.num_features=1", "save_weights=true")
    saved = weights(run(*data, *norm, *SPREAD["ddp on 2"]))
    assert saved["running_mean"].item() == pytest.approx(0.285, abs=1e-4)
    assert saved["num_batches_tracked"].item() == 2


@pytest.mark.parametrize(
    ("overrides", "calls"),
    [
        (("parallel=none",), 10),
        (("parallel=dp", "num_devices=1"), 10),
        (("parallel=dp", "num_devices=2"), 0),  # the replicas that counted are thrown away
        (("parallel=ddp", "num_devices=2"), 10),
    ],
)
def test_of_dps_replicas_only_in_place_changes_of_the_first_survive(
    run: Runner, overrides: tuple[str, ...], calls: int
) -> None:
    counting = model("usercode.Counting")
    saved = weights(run(*counting, *overrides, "batch_size=10", "save_weights=true"))
    assert saved["_extra_state"] == calls
    assert saved["buf"].item() == 10


@pytest.mark.parametrize("spread", ["dp on 2", "ddp on 2"])
def test_a_bool_buffer_reaches_every_device(run: Runner, spread: str) -> None:
    masked = (*FIVE_STEPS, *model("usercode.Masked"))
    saved = weights(run(*masked, *SPREAD[spread]))
    assert saved["mask"].tolist() == [True, False, True, True, False]
    single = weights(run(*masked))
    assert_equal({"w": saved["layer.weight"]}, {"w": single["layer.weight"]})


@pytest.mark.parametrize("spread", ["none", "dp on 2", "ddp on 2"])
@pytest.mark.parametrize(("name", "parameters"), [("torch.nn.ReLU", 0), ("usercode.Frozen", 12)])
def test_a_model_without_trainable_parameters_is_timed_under_every_strategy(
    run: Runner, spread: str, name: str, parameters: int
) -> None:
    got = run(*model(name), *EVERY[spread]).result
    assert got.model["parameters"] == parameters
    assert got.model["trainable_parameters"] == 0
    assert got.timing["forward"].count == 3
    assert got.timing["forward"].mean_s > 0


@pytest.mark.parametrize("spread", ["none", "dp on 2", "ddp on 2"])
@pytest.mark.parametrize(
    ("name", "fresh", "keys"),
    [
        ("usercode.Nested", usercode.Nested, ["module.weight", "module.bias"]),
        ("usercode.Frozen", usercode.Frozen, ["layer.weight", "layer.bias"]),
        ("usercode.Lin1", usercode.Lin1, ["layer.weight"]),
    ],
)
def test_saved_weights_have_the_models_own_keys_and_load_strictly(
    run: Runner, spread: str, name: str, fresh: type[nn.Module], keys: list[str]
) -> None:
    data = values(1, 2, 3) if name.endswith("Lin1") else ()
    saved = weights(run(*data, *model(name), *EVERY[spread], "save_weights=true"))
    assert list(saved) == keys
    fresh().load_state_dict(saved, strict=True)
    wrapped = nn.DataParallel(fresh())
    wrapped.module.load_state_dict(saved, strict=True)


def test_lists_of_the_config_reach_layers_and_optimizers_as_plain_lists(run: Runner) -> None:
    conv = (
        *model("torch.nn.Conv2d"),
        "+model.in_channels=1",
        "+model.out_channels=2",
        "+model.kernel_size=[3,3]",
        "+model.stride=[2,2]",
    )
    adam = ("optimizer=custom", "optimizer._target_=torch.optim.Adam", "+optimizer.lr=1e-3")
    target = ("loss={_target_: usercode.MeanOfOutput}",)
    digits = ("dataset=digits", "batch_size=64", "steps=2", "task=train", "save_weights=true")
    got = run(*digits, *conv, *adam, "+optimizer.betas=[0.9,0.999]", *target)
    assert set(weights(got)) == {"weight", "bias"}
    assert got.result.config["optimizer"]["betas"] == [0.9, 0.999]
    assert "[64, 2, 3, 3]" in (got.folder / "shapes.csv").read_text(encoding="utf-8")


@pytest.mark.parametrize("spread", ["none", "dp on 2", "ddp on 2"])
def test_batch_size_is_global_under_strong_scaling(run: Runner, spread: str) -> None:
    got = run("dataset.rows=64", "batch_size=16", *EVERY[spread])
    count = got.result.num_devices
    assert got.result.batch == {"global": 16, "per_device": 16 // count}
    assert [int(row["global_rows"]) for row in rows(got)] == [16, 16, 16, 16]
    assert [int(row["replica_0_rows"]) for row in rows(got)] == [16 // count] * 4
    columns = hparams(got)
    assert columns["batch_size_global"] == 16
    assert columns["batch_size_per_device"] == 16 // count


@pytest.mark.parametrize(
    ("spread", "batches", "first_device", "last_device"),
    [
        ("none", [16, 16, 16, 16], [16, 16, 16, 16], [16, 16, 16, 16]),
        ("dp on 2", [32, 32], [16, 16], [16, 16]),
        ("ddp on 2", [32, 32], [16, 16], [16, 16]),
        ("dp on 3", [48, 16], [16, 6], [16, 4]),
        ("ddp on 3", [48, 16], [16, 6], [16, 4]),
    ],
)
def test_batch_size_is_per_device_under_weak_scaling(
    run: Runner, spread: str, batches: list[int], first_device: list[int], last_device: list[int]
) -> None:
    got = run("dataset.rows=64", "batch_size=16", "scaling=weak", *EVERY[spread])
    last = got.result.num_devices - 1
    assert got.result.scaling == "weak"
    assert got.result.batch == {"global": batches[0], "per_device": 16}
    assert [int(row["global_rows"]) for row in rows(got)] == batches
    assert [int(row["replica_0_rows"]) for row in rows(got)] == first_device
    assert [int(row[f"replica_{last}_rows"]) for row in rows(got)] == last_device
    shapes = (got.folder / "shapes.csv").read_text(encoding="utf-8").splitlines()[1:]
    seen = {(int(line.split(",")[1]), line.split('"')[1]) for line in shapes}
    assert {(0, f"[{size}, 5]") for size in first_device} <= seen
    assert {(last, f"[{size}, 5]") for size in last_device} <= seen


@pytest.mark.parametrize("spread", ["dp on 2", "ddp on 2"])
def test_weak_scaling_trains_like_one_device_with_the_global_batch(
    run: Runner, spread: str
) -> None:
    train = ("dataset.rows=80", "task=train", "save_weights=true", "optimizer.lr=0.1", "epochs=2")
    single = run(*train, "batch_size=32")
    several = run(*train, "batch_size=16", "scaling=weak", *SPREAD[spread])
    assert_equal(weights(several), weights(single))


@pytest.mark.parametrize("strategy", ["dp", "ddp"])
def test_a_batch_that_does_not_divide_is_noted_with_both_numbers(
    run: Runner, strategy: str
) -> None:
    got = run("dataset.rows=64", "batch_size=16", f"parallel={strategy}", "num_devices=3")
    notes = [note for note in got.result.notes if "divisible" in note]
    assert len(notes) == 1
    assert "16" in notes[0] and "3" in notes[0]
    assert "6, 6, 4" in notes[0]


@pytest.mark.parametrize("spread", ["none", "dp on 2"])
def test_a_keyword_argument_does_not_call_an_idle_replica(run: Runner, spread: str) -> None:
    # One row x = 2, weight 1, delta 3: output 5, gradient 2 x 5 x 2 = 20.
    data = (*values(2), "batch_size=1", "steps=1", "+forward_kwargs.delta=3")
    got = run(*data, *ONE_STEP, *model("usercode.Shifted"), *EVERY[spread])
    assert weights(got)["layer.layer.weight"].item() == pytest.approx(1 - 0.1 * 20.0, abs=1e-6)
    shapes = (got.folder / "shapes.csv").read_text(encoding="utf-8").splitlines()[1:]
    assert len(shapes) == 1
    assert shapes[0].startswith(",0,")


def test_a_scalar_loss_of_the_model_is_one_number_a_step_and_no_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = ("dataset=custom", "dataset._target_=usercode.inputs_only", "+dataset.values=[1,2,3]")
    own = ("task=train", *model("usercode.Lin1WithLoss"), "epochs=null", "steps=20")
    got = dpexp.run([*data, *own, *SPREAD["dp on 2"]], folder=tmp_path)
    assert got.result.status == "ok"
    assert [event.step for event in events(got).Scalars("loss/train")] == list(range(20))
    assert "gather along dimension 0" not in capfd.readouterr().err
    assert "gather" not in (got.folder / "dpexp.log").read_text(encoding="utf-8")


@pytest.mark.parametrize("spread", ["none", "dp on 2", "ddp on 2"])
def test_nested_outputs_keep_their_structure(run: Runner, spread: str) -> None:
    got = run(*model("usercode.Returning"), "+model.what=nested", "steps=1", *EVERY[spread])
    shapes = (got.folder / "shapes.csv").read_text(encoding="utf-8")
    size = 30 // got.result.num_devices
    expected = f"{{loss: [{size}, 2], aux: NoneType, parts: ([{size}, 2], ([{size}, 5]))}}"
    assert expected in shapes


@pytest.mark.parametrize(
    ("what", "words"), [("number", ("'k'", "int")), ("dataclass", ("TwoTensors",))]
)
def test_an_output_that_dp_cannot_gather_is_refused_by_name(
    run: Runner, what: str, words: tuple[str, ...]
) -> None:
    returning = (*model("usercode.Returning"), f"+model.what={what}")
    with pytest.raises(dpexp.ConfigError) as refusal:
        run(*returning, *SPREAD["dp on 2"])
    assert all(word in str(refusal.value) for word in words), refusal.value
    assert run(*returning).result.status == "ok"


@pytest.mark.parametrize(
    ("what", "layer", "shape"),
    [
        (
            "hidden",
            ("torch.nn.GRU", "+model.input_size=3", "+model.hidden_size=8", "+model.num_layers=2"),
            "[2, 4, 8]",
        ),
        ("images", ("usercode.Sums",), "[4, 8, 8]"),
    ],
)
def test_an_input_whose_first_dimension_is_not_the_batch_is_refused_under_dp(
    run: Runner, what: str, layer: tuple[str, ...], shape: str
) -> None:
    rows = 4 if what == "hidden" else 2
    name, *arguments = layer
    odd = (
        "dataset=custom",
        "dataset._target_=usercode.OddRows",
        f"+dataset.what={what}",
        *model(name),
        *arguments,
        *(["+model.batch_first=true"] if what == "hidden" else []),
        f"batch_size={rows}",
    )
    assert run(*odd).result.status == "ok"
    with pytest.raises(dpexp.ConfigError) as refusal:
        run(*odd, *SPREAD["dp on 2"])
    assert shape in str(refusal.value)
