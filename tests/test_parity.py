"""The parity certificate of real runs: what passes, what fails, what the check leaves behind."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from realruns import EVERY, Runs, column, data, model

import dpexp

CHECKED = ("task=train", "check.parity=true")
MLP = ("model=mlp", "model.widths=[5,16,2]", "optimizer.lr=0.1")
DIGITS = ("dataset=digits", "model=cnn", "batch_size=400", "steps=2")
# On 2 devices 3 + 2 rows, on 3 devices 2 + 2 + 1; 12.0 is the gradient of all five.
RAMP5 = (*data("usercode.ramp5"), *model("usercode.Lin1"), "batch_size=5", "epochs=3")
# 24 rows in batches of 11: 11, 11 and 2, of which the third rank of three has none.
UNEVEN = (*MLP, "dataset.rows=24", "batch_size=11")
SOME = ("none", "dp on 2", "dp on 3", "ddp on 2", "fsdp on 2")
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "mlp": (MLP, SOME),
    "digits and a cnn": (DIGITS, ("none", "dp on 3", "ddp on 2", "fsdp on 2")),
    "uneven rows": (RAMP5, SOME),
    "micro-batches": ((*UNEVEN, "accumulate=2"), ("none", "dp on 2", "ddp on 3", "fsdp on 2")),
    "adamw": ((*MLP, "optimizer=adamw"), ("dp on 2", "ddp on 2", "fsdp on 2")),
    "a sharded optimizer": ((*MLP, "optimizer=adamw", "parallel.zero=true"), ("ddp on 2",)),
    "bf16": ((*MLP, "precision=bf16"), ("dp on 2", "ddp on 2", "fsdp on 2")),
    "fp16": ((*MLP, "precision=fp16"), ("ddp on 2",)),
    "gradients sent as fp16": ((*MLP, "parallel.comm_hook=fp16"), ("ddp on 2",)),
    "gradients sent as bf16": ((*MLP, "parallel.comm_hook=bf16"), ("ddp on 2",)),
    "clipping and momentum": (
        (*MLP, "clip_grad_norm=0.1", "++optimizer.momentum=0.9", "check.steps=4"),
        ("ddp on 3",),
    ),
    "masked targets": (
        (*data("usermodels.masked_tokens"), "model=gpt", "batch_size=4", "optimizer=adamw"),
        ("ddp on 2",),
    ),
    "a loss of the model's own": (
        (*data("usermodels.TokenDicts"), *model("usermodels.Decoder")),
        ("ddp on 2", "fsdp on 2"),
    ),
    "texts and nested dicts": (
        (*data("userparity.Texts"), *model("userparity.TextModel"), "batch.target=label"),
        ("ddp on 2",),
    ),
    "a stream": (data("userparity.Flow"), ("ddp on 2",)),
    "fewer rows than ranks": (
        (*data("userparity.steps_of_one"), "batch_size=2"),
        ("ddp on 3",),
    ),
    "a gradient of rounding alone": (
        (*model("userparity.LostKeys"), "dataset=tokens", "dataset.rows=100", "optimizer=adamw"),
        ("ddp on 2",),
    ),
    "a state of the user's own": (model("userparity.Remembering"), ("none", "ddp on 2")),
    "a model that writes into its input": (model("userparity.Overwriting"), ("fsdp on 2",)),
    "parameters without gradient": (
        (
            *model("usermodels.Unused"),
            *data("usermodels.classes"),
            "parallel.find_unused_parameters=true",
        ),
        ("ddp on 2",),
    ),
}
# Run with the slow tests: the neighbours of what `make test` runs.
PAIRS = [
    pytest.param(case, spread, marks=[pytest.mark.slow] if place and case != "mlp" else [])
    for case, (_, spreads) in CASES.items()
    for place, spread in enumerate(reversed(spreads))
]
BROKEN: dict[str, tuple[tuple[str, ...], str]] = {
    "a sum called a mean": (
        ("loss={_target_:userparity.hidden_sum}",),
        "losses differ from a single device's by 0.5 of their size",
    ),
    "an output scaled by the rank": (model("userparity.ScaledByRank"), "losses differ"),
    "a mean over the rows of a device": (model("userparity.BatchMean"), "losses differ"),
    "noise on the weights": (
        (
            "optimizer=custom",
            "optimizer._target_=userparity.NoisySGD",
            "+optimizer.lr=0.1",
        ),
        "weights differ",
    ),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory)


def certificate(done: dpexp.Run) -> dict[str, Any]:
    assert done.result.parity is not None
    return done.result.parity


# What is the same maths passes


@pytest.mark.parametrize(("case", "spread"), PAIRS)
def test_the_steps_of_a_run_are_those_of_a_single_device(run: Runs, case: str, spread: str) -> None:
    overrides, _ = CASES[case]
    found = certificate(run(*CHECKED, *EVERY[spread], *overrides))
    assert found["verdict"] == "pass", found
    assert found["steps"] >= 1
    assert found["initial_weights_identical"] is True
    # The bounds leave room: rounding uses but a part of them. (Not of a weight under Adam, which
    # may move in either direction where its gradient is nothing but rounding.)
    assert max(found[kind]["share"] for kind in ("loss", "gradients")) < 0.5


def test_one_device_without_micro_batches_is_its_own_reference(run: Runs) -> None:
    found = certificate(run(*CHECKED, *EVERY["none"], *MLP))
    for kind in ("loss", "gradients", "weights"):
        assert found[kind]["largest_absolute"] == 0.0


def test_several_devices_differ_by_rounding_but_not_by_nothing(run: Runs) -> None:
    found = certificate(run(*CHECKED, *EVERY["ddp on 2"], *MLP))
    assert 0.0 < found["gradients"]["largest_relative"] < 1e-6
    assert found["rows_identical"] is True
    assert found["terms"] == 150


# What is not fails


@pytest.mark.parametrize("case", BROKEN)
def test_other_maths_on_several_devices_fails_and_says_where(run: Runs, case: str) -> None:
    overrides, said = BROKEN[case]
    done = run(*CHECKED, *EVERY["ddp on 2"], *overrides)
    found = certificate(done)
    assert found["verdict"] == "fail", found
    differing = [kind for kind in ("loss", "gradients", "weights") if found[kind]["share"] > 1]
    assert said in found["reason"] or said.split()[0] in differing
    assert f"parity: fail: {found['reason']}" in done.result.notes
    assert done.result.status == "ok"  # the figures are those of what the user wrote


@pytest.mark.parametrize("case", ["a mean over the rows of a device", "a sum called a mean"])
def test_the_same_on_one_device_is_no_fault(run: Runs, case: str) -> None:
    overrides, _ = BROKEN[case]
    assert certificate(run(*CHECKED, *EVERY["none"], *overrides))["verdict"] == "pass"


def test_dp_sees_a_mean_over_the_rows_of_a_replica_too(run: Runs) -> None:
    done = run(*CHECKED, *EVERY["dp on 2"], *model("userparity.BatchMean"))
    assert certificate(done)["verdict"] == "fail"


# What cannot be judged says why


def test_layers_that_draw_or_look_at_other_rows_are_switched_off_and_named(run: Runs) -> None:
    found = certificate(run(*CHECKED, *EVERY["ddp on 2"], *model("userparity.Dropping")))
    assert found["verdict"] == "pass"
    assert found["switched_off"] == ["BatchNorm1d x1", "Dropout x1"]


def test_a_model_that_draws_random_numbers_is_not_judged(run: Runs) -> None:
    hidden = model("userparity.Dropping", hidden="true")
    found = certificate(run(*CHECKED, *EVERY["ddp on 2"], *hidden))
    assert found["verdict"] == "unknown"
    assert found["reason"] == "the model draws random numbers in forward"


def test_a_model_that_fits_no_single_device_is_not_judged_but_runs(run: Runs) -> None:
    done = run(*CHECKED, *EVERY["ddp on 2"], *model("userparity.OnlySharded"))
    found = certificate(done)
    assert found["verdict"] == "unknown"
    assert "OutOfMemoryError: no memory for 30 rows" in found["reason"]
    assert done.result.steps == {"measured": 3, "warmup": 1}


def test_augmentation_that_differs_by_rank_does_not_spoil_the_proof(run: Runs) -> None:
    found = certificate(run(*CHECKED, *EVERY["ddp on 2"], *data("userparity.Augmented")))
    assert found["verdict"] == "pass"
    assert found["rows_identical"] is False
    assert "augmentation" in found["rows_reason"]


def test_rows_of_a_stream_are_compared_elsewhere(run: Runs) -> None:
    found = certificate(run(*CHECKED, *EVERY["ddp on 2"], *CASES["a stream"][0]))
    assert found["rows_identical"] is None


# The timed run sees nothing of the check


@pytest.mark.parametrize(
    ("spread", "overrides"),
    [
        ("ddp on 2", model("userparity.Dropping", hidden="true")),
        ("ddp on 2", data("userparity.Augmented")),
        ("none", model("userparity.Remembering")),
        ("dp on 2", (*MLP, "optimizer=adamw", "lr_scheduler=cosine")),
        ("fsdp on 2", MLP),
    ],
)
def test_a_run_ends_with_the_same_bits_with_and_without_the_check(
    run: Runs, spread: str, overrides: tuple[str, ...]
) -> None:
    checked = run(*CHECKED, *EVERY[spread], *overrides)
    plain = run("task=train", *EVERY[spread], *overrides)
    assert plain.result.parity is None
    assert checked.result.model is not None and plain.result.model is not None
    assert checked.result.model["final_sha256"] == plain.result.model["final_sha256"]
    assert column(checked, "loss") == column(plain, "loss")
    assert column(checked, "step") == [0, 1, 2, 3]


def test_the_peak_of_memory_is_that_of_the_timed_run(run: Runs) -> None:
    memory = run(*CHECKED, *EVERY["ddp on 2"], *MLP).result.memory
    assert memory is not None
    assert memory["peak_bytes_scope"].endswith("since the parity check")
    if sys.platform == "linux":
        assert run(*CHECKED, *EVERY["ddp on 2"], *MLP).result.notes == []


def test_it_is_not_asked_for_unless_asked_for(run: Runs) -> None:
    assert run("task=train", *EVERY["none"], *MLP).result.parity is None


def test_the_users_code_fails_in_the_check_as_it_does_in_a_step(run: Runs) -> None:
    broken = model("usercode.Failing", how="raise", call=2)
    ended = run.ended(*CHECKED, *EVERY["ddp on 2"], *broken)
    error = ended.result.error
    assert ended.result.status == "failed"
    assert error is not None
    assert (error.kind, error.type, error.rank, error.step) == ("user_error", "ValueError", 1, 2)
    assert error.message.endswith("[rank 1, step 2, forward of the parity check]")


# In a sweep


def test_a_sweep_shows_no_speed_up_of_a_cell_that_fails(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("sweep") / "sweep"
    swept = dpexp.sweep(
        [
            "parallel=none,ddp",
            "num_devices=1,2",
            "task=train",
            *model("userparity.BatchMean"),
        ],
        folder=folder,
    )
    verdicts = {
        run.result.label: run.result.parity and run.result.parity["verdict"] for run in swept.runs
    }
    assert verdicts == {"none-n1": "pass", "none-n2": None, "ddp-n1": "pass", "ddp-n2": "fail"}
    report = (folder / "report.md").read_text(encoding="utf-8")
    rows = [line for line in report.splitlines() if "| ddp |" in line]
    assert [row.split("|")[8].strip() == "–" for row in rows] == [False, True]
    assert "3_ddp_n2: no speed-up: parity failed: losses differ" in report
