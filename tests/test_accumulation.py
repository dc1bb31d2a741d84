"""What training adds to a step (micro-batches, clipping, rates, formats) under all strategies."""

from __future__ import annotations

import math
import re

import pytest
import torch
from realruns import EVERY, SPREAD, Runs, column, data, diary, difference, model, weights
from torch.nn import functional
from usermodels import masked_tokens

import dpexp
from dpexp.models import gpt

SAVE = ("task=train", "save_weights=true", "optimizer.lr=0.1")
STEPS = (*SAVE, "epochs=null", "steps=4")
# 24 rows in batches of 11: 11, 11 and 2, on 3 devices 4 + 4 + 3 and 1 + 1 + 0.
UNEVEN = ("dataset.rows=24", "batch_size=11")
MLP = ("model=mlp", "model.widths=[5,16,2]")
# Run with the slow tests: the neighbours of what `make test` runs.
SLOW_2, SLOW_4 = (pytest.param(count, marks=pytest.mark.slow) for count in (2, 4))
FIVE = ("none", "dp on 2", "ddp on 2", "ddp on 3", "fsdp on 2")
RAMP5 = (*data("usercode.ramp5"), "batch_size=5", "shuffle=false")
LIN1 = model("usercode.Lin1")
OWN_LOSS = (*data("usercode.inputs_only", values="[0,1,2,3,4]"), "batch_size=5")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory)


# accumulate


@pytest.mark.parametrize(
    ("spread", "accumulate"),
    [
        *((spread, accumulate) for spread in FIVE for accumulate in (2, 4)),
        ("ddp on 2", 1),
        ("ddp on 2", 3),
        ("ddp on 3", 3),
    ],
)
def test_micro_batches_train_like_whole_batches(run: Runs, spread: str, accumulate: int) -> None:
    whole = run(*STEPS, *UNEVEN, *MLP, *EVERY["none"])
    cut = run(*STEPS, *UNEVEN, *MLP, *EVERY[spread], *micro(accumulate))
    assert difference(weights(cut), weights(whole)) <= 1e-6
    assert column(cut, "loss") == pytest.approx(column(whole, "loss"), abs=1e-6)
    assert column(cut, "global_rows") == [11, 11, 2, 11]


def micro(accumulate: int) -> tuple[str, ...]:
    return () if accumulate == 1 else (f"accumulate={accumulate}",)


@pytest.mark.parametrize("spread", FIVE)
def test_a_models_own_loss_is_weighted_by_the_rows_of_micro_batches(run: Runs, spread: str) -> None:
    # RAMP5 in 2 micro-batches: 3 + 2 rows, on 2 devices 2 + 1 and 1 + 1. Gradient 12.
    got = run(*SAVE, *OWN_LOSS, *model("usercode.Lin1WithLoss"), "accumulate=2", *EVERY[spread])
    assert weights(got)["layer.weight"].item() == pytest.approx(1 - 0.1 * 12.0, abs=1e-6)
    assert column(got, "loss") == pytest.approx([6.0], abs=1e-6)


@pytest.mark.parametrize("spread", ["none", "dp on 2", "ddp on 2", "fsdp on 2"])
def test_gradients_are_exchanged_after_the_last_micro_batch(run: Runs, spread: str) -> None:
    # Rank 0 has 3 and 5 (mean 4), rank 1 has 6 and 8 (mean 7): the gradient is 5.5 on both.
    path = run.folder() / "calls"
    rows = (*data("usercode.column", values="[3,5,6,8]"), "batch_size=4", "shuffle=false")
    loss = "loss={_target_: usercode.MeanOfOutput}"
    twice = ("accumulate=2", "epochs=2", *EVERY[spread])
    got = run(*SAVE, *rows, *model("WeightDiary", path=path), loss, *twice)
    calls = diary(path)
    assert sorted({round(call["weight"], 6) for call in calls}) == [0.45, 1.0]
    for rank in {call["rank"] for call in calls}:
        seen = [round(call["weight"], 6) for call in calls if call["rank"] == rank]
        assert seen == sorted(seen, reverse=True)
        assert seen.count(0.45) == seen.count(1.0)
    assert weights(got)["layer.weight"].item() == pytest.approx(1 - 2 * 0.55, abs=1e-6)


@pytest.mark.parametrize("accumulate", [SLOW_2, 3, SLOW_4])
@pytest.mark.parametrize("spread", ["dp on 2", "ddp on 2", "ddp on 3", "fsdp on 2"])
def test_no_row_is_lost_between_ranks_and_micro_batches(
    run: Runs, spread: str, accumulate: int
) -> None:
    # Each epoch has a batch of 24 rows and one of 9: on 2 ranks 5 and 4, in 4 micro-batches
    # 2 + 2 + 1 + 0 and 1 + 1 + 1 + 1. The 24 rows are 0, so that they have no gradient.
    listed = f"[{','.join(map(str, [0] * 24 + [row / 10 for row in range(1, 10)]))}]"
    rows = (*data("usercode.column", values=listed), "batch_size=24", "shuffle=false")
    got = run(*SAVE, *rows, *LIN1, *micro(accumulate), *EVERY[spread])
    loss = sum((row / 10) ** 2 for row in range(1, 10)) / 9
    assert column(got, "loss") == pytest.approx([0, loss], abs=1e-6)
    assert weights(got)["layer.weight"].item() == pytest.approx(1 - 0.1 * 2 * loss, abs=1e-6)


# Targets that a cross-entropy leaves out. Of masked_tokens' 11 rows, row r leaves out r % 7 of
# its 6 tokens; in batches of 5 no two devices or micro-batches have equally many.

GPT = ("model=gpt", "model.vocabulary=13", "model.length=6", "model.width=8", "model.heads=2")
TOKENS = (*data("masked_tokens"), *GPT, "model.layers=1", "batch_size=5")
PIECES = {
    **{spread: EVERY[spread] for spread in ("dp on 3", "ddp on 3", "fsdp on 2")},
    "accumulate": (*EVERY["none"], "accumulate=3"),
    "dp and accumulate": (*EVERY["dp on 2"], "accumulate=2"),
    "ddp and accumulate": (*EVERY["ddp on 3"], "accumulate=2"),
}


@pytest.mark.parametrize("pieces", PIECES)
def test_masked_targets_train_alike_in_any_pieces(run: Runs, pieces: str) -> None:
    whole = run(*STEPS, *TOKENS, *EVERY["none"])
    cut = run(*STEPS, *TOKENS, *PIECES[pieces])
    assert column(cut, "loss") == pytest.approx(column(whole, "loss"), abs=1e-6)
    assert difference(weights(cut), weights(whole)) <= 1e-6
    assert not [note for note in cut.result.notes if "-100" in note]


def test_the_first_loss_is_torchs_over_the_targets_that_count(run: Runs) -> None:
    once = ("task=train", "save_weights=true", "optimizer.lr=0", "batch_size=11")
    got = run(*TOKENS, *once, *PIECES["ddp and accumulate"])
    scores, wanted = scored(got)
    assert column(got, "loss") == pytest.approx(
        [functional.cross_entropy(scores, wanted).item()], abs=1e-6
    )


@pytest.mark.parametrize("spread", ["none", "dp on 3", "ddp on 3", "fsdp on 2"])
def test_an_evaluation_counts_the_targets_that_are_not_masked(run: Runs, spread: str) -> None:
    trained = run(*STEPS, *TOKENS, *EVERY["none"])
    scores, wanted = scored(trained)
    counts = wanted != -100
    expected = {
        "cross_entropy": functional.cross_entropy(scores, wanted).item(),
        "accuracy": (scores.argmax(1) == wanted)[counts].double().mean().item(),
    }
    for metric, value in expected.items():
        evaluate = ("task=evaluate", f"metric={metric}")
        start = f"prepare.init_from={trained.folder}/weights.pt"
        found = run(*TOKENS, *evaluate, start, *EVERY[spread]).result.metric
        assert found == {"name": metric, "value": pytest.approx(value, abs=1e-6), "samples": 11}


def scored(run: dpexp.Run) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores [tokens, classes] of a run's final weights for all of masked_tokens, and these."""
    decoder = gpt(vocabulary=13, length=6, width=8, heads=2, layers=1)
    decoder.load_state_dict(weights(run))
    tokens, wanted = masked_tokens()[:]
    with torch.no_grad():
        return decoder(tokens).flatten(0, 1), wanted.flatten()


# clip_grad_norm


@pytest.mark.parametrize("accumulate", [1, SLOW_2])
@pytest.mark.parametrize("spread", [*FIVE, "fsdp on 3"])
def test_a_gradient_of_twelve_is_clipped_to_one(run: Runs, spread: str, accumulate: int) -> None:
    got = run(*SAVE, *RAMP5, *LIN1, "clip_grad_norm=1", *micro(accumulate), *EVERY[spread])
    assert weights(got)["layer.weight"].item() == pytest.approx(1 - 0.1 * 1.0, abs=1e-6)


@pytest.mark.parametrize("spread", ["none", "ddp on 2", "fsdp on 2"])
def test_a_gradient_below_the_norm_is_left_alone(run: Runs, spread: str) -> None:
    got = run(*SAVE, *RAMP5, *LIN1, "clip_grad_norm=13", *EVERY[spread])
    assert weights(got)["layer.weight"].item() == pytest.approx(1 - 0.1 * 12.0, abs=1e-6)


@pytest.mark.parametrize("spread", ["none", "dp on 2", "ddp on 2", "fsdp on 2"])
def test_in_fp16_the_gradient_is_clipped_without_its_scale(run: Runs, spread: str) -> None:
    # 12 times the first scale of 65536 overflows, so a few updates are left out before.
    fp16 = ("clip_grad_norm=1", "precision=fp16", "epochs=null", "steps=9")
    got = run(*SAVE, *RAMP5, *LIN1, *fp16, *EVERY[spread])
    done = 9 - skipped(got)
    assert 0 < done < 9
    assert weights(got)["layer.weight"].item() == pytest.approx(1 - 0.1 * done, abs=1e-5)


def skipped(run: dpexp.Run) -> int:
    """How many updates a note says that fp16 left out."""
    notes = [re.search(r"precision=fp16: (\d+) updates", note) for note in run.result.notes]
    return sum(int(found[1]) for found in notes if found)


@pytest.mark.parametrize(
    ("spread", "clip"),
    [
        *((spread, ()) for spread in ("none", "dp on 2", "ddp on 2", "zero", "fsdp on 2")),
        ("ddp on 2", ("clip_grad_norm=1",)),
        ("fsdp on 2", ("clip_grad_norm=1",)),
    ],
)
def test_in_fp16_one_overflow_leaves_out_the_update_of_all_parameters_on_all_devices(
    run: Runs, spread: str, clip: tuple[str, ...]
) -> None:
    # Gradients 0.1 and 10 of a weight's two rows, which are on different ranks under fsdp.
    overrides = {**EVERY, "zero": (*SPREAD["ddp on 2"], "parallel.zero=true")}[spread]
    two = (
        *data("usermetrics.one_far_target"),
        *model("torch.nn.Linear", in_features=1, out_features=2),
    )
    got = run(*SAVE, *two, "precision=fp16", "batch_size=4", *clip, *overrides)
    assert skipped(got) == 1
    assert got.result.model["final_sha256"] == got.result.model["initial_sha256"]


@pytest.mark.parametrize("spread", ["dp on 2", "ddp on 2", "ddp on 3", "fsdp on 2", "fsdp on 3"])
def test_the_norm_is_over_all_parameters_and_devices(run: Runs, spread: str) -> None:
    clipped = (*STEPS, *UNEVEN, *MLP, "clip_grad_norm=0.01")
    single = run(*clipped, *EVERY["none"])
    assert difference(weights(single), weights(run(*STEPS, *UNEVEN, *MLP))) > 1e-3
    assert difference(weights(run(*clipped, *EVERY[spread])), weights(single)) <= 1e-6


# lr_scheduler


@pytest.mark.parametrize(
    ("schedule", "spread"),
    [*(("cosine", spread) for spread in FIVE), ("linear", "none"), ("linear", "ddp on 2")],
)
def test_the_recorded_learning_rate_follows_the_formula(
    run: Runs, schedule: str, spread: str
) -> None:
    got = run(*STEPS, *UNEVEN, f"lr_scheduler={schedule}", *EVERY[spread])
    expected = {
        "cosine": [0.05 * (1 + math.cos(math.pi * step / 4)) for step in range(4)],
        "linear": [0.1 * (1 - step / 4) for step in range(4)],
    }[schedule]
    assert column(got, "learning_rate") == pytest.approx(expected, abs=1e-9)
    single = run(*STEPS, *UNEVEN, f"lr_scheduler={schedule}", *EVERY["none"])
    assert difference(weights(got), weights(single)) <= 1e-6


@pytest.mark.parametrize("spread", ["none", "ddp on 2"])
def test_the_rate_moves_once_a_step_and_not_once_a_micro_batch(run: Runs, spread: str) -> None:
    got = run(*STEPS, *UNEVEN, "lr_scheduler=linear", "accumulate=3", *EVERY[spread])
    assert column(got, "learning_rate") == pytest.approx([0.1, 0.075, 0.05, 0.025], abs=1e-9)


# ZeRO and communication hooks


@pytest.mark.parametrize(
    ("count", "extra"),
    [
        (2, ("optimizer=sgd", "optimizer.momentum=0.9")),
        (2, ("optimizer=adamw", "accumulate=2")),
        (3, ("optimizer=adamw", "lr_scheduler=cosine")),
        (3, ("optimizer=sgd", "optimizer.momentum=0.9", "clip_grad_norm=0.01")),
    ],
)
def test_zero_trains_like_plain_ddp(run: Runs, count: int, extra: tuple[str, ...]) -> None:
    chosen = (*STEPS, *UNEVEN, *MLP, *extra, *SPREAD[f"ddp on {count}"])
    plain, zero = run(*chosen), run(*chosen, "parallel.zero=true")
    assert difference(weights(zero), weights(plain)) <= 1e-6
    assert column(zero, "learning_rate") == column(plain, "learning_rate")


# Largest difference after four steps of rate 0.1 and gradients below 1: fp16 keeps 11 bits of a
# gradient, bf16 8; powersgd keeps one column of each matrix and the rest for later steps.
HOOKS = {"fp16": 4 * 0.1 * 2**-10, "bf16": 4 * 0.1 * 2**-7, "powersgd": 0.05}


@pytest.mark.parametrize("accumulate", [1, SLOW_2])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_communication_hook_trains_nearly_like_plain_ddp(
    run: Runs, hook: str, accumulate: int
) -> None:
    chosen = (*STEPS, *UNEVEN, *MLP, *micro(accumulate), *SPREAD["ddp on 2"])
    early = ("parallel.powersgd_start=2",) if hook == "powersgd" else ()
    plain = weights(run(*chosen))
    hooked = weights(run(*chosen, f"parallel.comm_hook={hook}", *early))
    assert 0 < difference(hooked, plain) <= HOOKS[hook]


# precision. bf16 keeps 8 bits of each number, fp16 11. The loss is so small that fp16's scale does
# not make it overflow, and no update is left out.

FORMATS = {"bf16": 1e-2, "fp16": 1.5e-3}
SMALL = ("loss={_target_: usermetrics.small_mse}", "task=train", "save_weights=true")
SMALL_STEPS = (*SMALL, "optimizer.lr=10", "epochs=null", "steps=4", *UNEVEN, *MLP)


@pytest.mark.parametrize("precision", FORMATS)
@pytest.mark.parametrize("spread", ["none", "dp on 2", "ddp on 2", "fsdp on 2"])
def test_sixteen_bits_train_nearly_like_thirty_two(run: Runs, spread: str, precision: str) -> None:
    tolerance = FORMATS[precision]
    exact = weights(run(*SMALL_STEPS, *EVERY["none"]))
    single = weights(run(*SMALL_STEPS, f"precision={precision}", *EVERY["none"]))
    several = run(*SMALL_STEPS, f"precision={precision}", *EVERY[spread])
    got = weights(several)
    assert skipped(several) == 0
    assert all(tensor.dtype is torch.float32 for tensor in got.values())
    assert 0 < difference(got, exact) <= tolerance
    assert difference(got, single) <= tolerance


@pytest.mark.parametrize("precision", FORMATS)
@pytest.mark.parametrize("spread", ["none", "dp on 2", "ddp on 2", "fsdp on 2"])
def test_every_replica_computes_in_sixteen_bits(run: Runs, spread: str, precision: str) -> None:
    path = run.folder() / "calls"
    rows = (*RAMP5, *model("WeightDiary", path=path))
    run(*SAVE, *rows, f"precision={precision}", *EVERY[spread])
    named = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[precision]
    assert {call["dtype"] for call in diary(path)} == {named}


# Weights to a file and back


@pytest.mark.parametrize("trained_on", ["none", "dp on 2", "ddp on 2", "fsdp on 2"])
def test_saved_weights_are_evaluated_alike_wherever_they_were_trained(
    run: Runs, trained_on: str
) -> None:
    trained = run(*STEPS, *UNEVEN, *MLP, *EVERY[trained_on])
    evaluate = ("task=evaluate", *UNEVEN, *MLP, f"prepare.init_from={trained.folder}/weights.pt")
    reference = run("task=evaluate", *UNEVEN, *MLP).result.metric["value"]
    values = []
    for spread in ("none", "dp on 2", "ddp on 2", "fsdp on 2"):
        got = run(*evaluate, *EVERY[spread]).result
        assert got.model["initial_sha256"] == trained.result.model["final_sha256"]
        assert not [note for note in got.notes if "module." in note]
        values.append(got.metric["value"])
    assert values == pytest.approx([values[0]] * 4, abs=1e-7)
    assert abs(values[0] - reference) > 1e-4


@pytest.mark.parametrize("spread", ["none", "dp on 2", "ddp on 2", "fsdp on 2"])
def test_a_wrappers_prefix_is_taken_off_with_a_note(run: Runs, spread: str) -> None:
    trained = run(*STEPS, *UNEVEN, *MLP)
    file = run.folder() / "wrapped.pt"
    torch.save({f"module.{name}": tensor for name, tensor in weights(trained).items()}, file)
    got = run("task=evaluate", *UNEVEN, *MLP, f"prepare.init_from={file}", *EVERY[spread]).result
    assert got.model["initial_sha256"] == trained.result.model["final_sha256"]
    notes = [note for note in got.notes if "module." in note]
    assert len(notes) == 1
    assert str(file) in notes[0]
