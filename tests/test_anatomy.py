"""What a run would do: figures computed by hand, and compared with torch where it is for real."""

from __future__ import annotations

from typing import Any

import pytest
import specimens
import torch
from anatomies import ADAMW, MOMENTUM, SEQUENCES, of, random_rows, table, train, values
from builders import make_plan_for

from dpexp.anatomy import dissect
from dpexp.anatomy.data import Figure
from dpexp.anatomy.parts import batch_at
from dpexp.errors import ConfigError
from dpexp.schedule import Schedule
from dpexp.schema import CommHook, Scaling

# --- the exercise's model: 5 -> 2


def test_the_model_of_the_exercise_has_12_parameters_of_4_bytes() -> None:
    model = train().model
    assert (model.name, model.built_on) == ("Linear", "meta")
    assert (model.parameters, model.trainable, model.buffers) == (12, 12, 0)
    assert (model.parameter_bytes, model.gradient_bytes, model.buffer_bytes) == (48, 48, 0)
    assert model.bytes_by_dtype == {"float32": 48}


def test_its_arithmetic_is_one_product_forward_and_one_backward() -> None:
    assert dissect(make_plan_for()).forward_flops == Figure(2 * 30 * 5 * 2)
    trained = train()
    assert trained.forward_flops.value == 600
    assert trained.step_flops.value == 1200  # the inputs need no gradient
    assert trained.loss_shape == "[]"


@pytest.mark.parametrize(("strategy", "devices"), [("dp", 3), ("ddp", 3), ("fsdp", 2), ("ddp", 8)])
def test_the_arithmetic_of_a_step_does_not_depend_on_the_strategy(
    strategy: str, devices: int
) -> None:
    assert train(strategy, devices).step_flops.value == 1200


def test_a_forward_run_has_no_gradients_nor_state_and_keeps_nothing() -> None:
    anatomy = dissect(make_plan_for())
    assert values(anatomy.memory[0]) == {
        "parameters": 48,
        "buffers": 0,
        "gradients": 0,
        "optimizer state": 0,
        "activations": 0,
        "batch": 30 * 7 * 4,
    }
    assert anatomy.loss_shape == ""
    assert anatomy.exchanges == ()


@pytest.mark.parametrize(
    ("optimizer", "state_bytes"),
    [
        ({"_target_": "torch.optim.SGD", "lr": 0.1}, 0),
        (MOMENTUM, 48),
        (ADAMW, 2 * 48 + 2 * 4),  # two moments, and a step counter for each of two tensors
    ],
)
def test_the_optimizers_state(optimizer: dict[str, Any], state_bytes: int) -> None:
    assert train(optimizer=optimizer).memory[0].parts["optimizer state"].value == state_bytes


@pytest.mark.parametrize(
    ("target", "word"),
    [("torch.optim.Adafactor", "values"), ("specimens.ClosureOnly", "closure")],
)
def test_a_state_that_cannot_be_found_is_unknown_with_its_reason(target: str, word: str) -> None:
    memory = train(optimizer={"_target_": target, "lr": 0.1}).memory[0]
    state = memory.parts["optimizer state"]
    assert state.value is None
    assert word in state.note
    assert memory.total.at_least
    assert "optimizer state" in memory.total.note


def test_the_loss_keeps_the_output_and_the_layer_only_the_batch() -> None:
    memory = values(train().memory[0])
    assert memory["activations"] == 30 * 2 * 4
    assert memory["batch"] == 30 * 5 * 4 + 30 * 2 * 4


# --- the two ends of the schedule


def test_dp_cuts_the_last_batch_into_4_4_2_and_the_loss_sees_all_of_it() -> None:
    anatomy = train("dp", 3)
    assert table(anatomy.first) == [
        (10, "[10, 5]", "[30, 2]", "[10, 2]"),
        (10, "[10, 5]", "", "[10, 2]"),
        (10, "[10, 5]", "", "[10, 2]"),
    ]
    assert anatomy.last is not None
    assert (anatomy.last.step, anatomy.last.rows) == (3, 10)
    assert [row[0] for row in table(anatomy.last)] == [4, 4, 2]
    assert [row[3] for row in table(anatomy.last)] == ["[4, 2]", "[4, 2]", "[2, 2]"]


def test_each_rank_of_ddp_has_its_own_target_and_one_without_rows_is_idle() -> None:
    anatomy = train("ddp", 4, batch_size=9, dataset=random_rows(rows=9))
    assert table(anatomy.first) == [(3, "[3, 5]", "[3, 2]", "[3, 2]")] * 3 + [(0, "", "", "")]
    assert anatomy.step_flops.value == 2 * (2 * 9 * 5 * 2)


def test_weak_scaling_gives_each_device_the_batch_size() -> None:
    anatomy = train("ddp", 2, scaling=Scaling.weak)
    assert (anatomy.layout.batch_rows, anatomy.layout.steps) == (60, 2)
    assert [row[0] for row in table(anatomy.last)] == [20, 20]


def test_only_the_rows_of_two_batches_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = specimens.Sequences.__getitem__

    def watched(self: Any, index: int) -> torch.Tensor:
        read.append(index)
        return original(self, index)

    monkeypatch.setattr(specimens.Sequences, "__getitem__", watched)
    dataset = {**SEQUENCES, "rows": 10**6}
    of("Recurrent", "ddp", 3, dataset=dataset, batch_size=30, epochs=20)
    assert len(read) == 30 + 10


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("steps", [None, 9])
def test_a_batch_is_that_of_the_schedule(shuffle: bool, steps: int | None) -> None:
    schedule = Schedule(10, 4, 3 if steps is None else None, steps, False, shuffle, 5)
    for expected in schedule:
        found = batch_at(schedule, expected.step)
        assert (found.step, found.epoch) == (expected.step, expected.epoch)
        assert found.indices.tolist() == expected.indices.tolist()


@pytest.mark.parametrize("strategy", ["none", "dp", "ddp"])
def test_a_stream_has_a_first_batch_and_no_last_one(strategy: str) -> None:
    devices = 1 if strategy == "none" else 2
    dataset = {"_target_": "specimens.Endless"}
    anatomy = train(strategy, devices, dataset=dataset, epochs=None, steps=7)
    assert anatomy.last is None
    assert anatomy.layout.dataset_rows is None
    assert [row[1] for row in table(anatomy.first)] == [f"[{30 // devices}, 5]"] * devices


@pytest.mark.parametrize("strategy", ["none", "ddp", "dp"])
def test_texts_none_and_dicts_in_a_batch(strategy: str) -> None:
    devices = 1 if strategy == "none" else 2
    dataset = {"_target_": "specimens.Captions"}
    anatomy = of("Captioned", strategy, devices, dataset=dataset, batch_size=4)
    rows = 4 // devices
    _, inputs, target, output = table(anatomy.first)[0]
    texts = "4 x str" if rows == 4 else "str, str"
    assert inputs == f"{{pixels: [{rows}, 4], texts: ({texts}), extra: NoneType}}"
    assert (target, output) == ("", f"{{logits: [{rows}, 2]}}")
    assert anatomy.forward_flops.value == 2 * 4 * 4 * 2


def test_a_row_that_cannot_be_read_is_a_refusal() -> None:
    with pytest.raises(ConfigError, match="rows cannot be read: KeyError"):
        dissect(make_plan_for(dataset={"_target_": "specimens.Unreadable"}))


# --- strategies


def test_dp_copies_the_model_and_adds_up_the_gradients() -> None:
    anatomy = train("dp", 3, optimizer=MOMENTUM)
    assert [each.step_bytes for each in anatomy.exchanges] == [48, 48]
    first, further = anatomy.memory
    assert (first.where, further.where) == ("device 0", "each further device")
    assert values(first)["optimizer state"] == 48
    assert values(first)["batch"] == 30 * 7 * 4
    assert values(further) == {
        "parameters": 48,
        "buffers": 0,
        "gradients": 48,
        "optimizer state": 0,
        "activations": 10 * 2 * 4,
        "batch": 10 * 7 * 4,
    }


def test_dp_copies_the_model_for_each_micro_batch() -> None:
    anatomy = train("dp", 2, accumulate=3)
    assert [each.step_bytes for each in anatomy.exchanges] == [3 * 48, 3 * 48]
    assert anatomy.layout.micro_batches == 3
    assert values(anatomy.memory[0])["activations"] == 5 * 2 * 4  # 30 rows / 3 / 2 devices


@pytest.mark.parametrize(("hook", "size"), [("none", 48), ("fp16", 24), ("bf16", 24)])
def test_ddp_sends_the_gradients_or_half_of_their_bytes(hook: str, size: int) -> None:
    (gradients,) = train("ddp", 3, parallel={"comm_hook": CommHook(hook)}).exchanges
    assert gradients.step_bytes == size
    assert gradients.sent_bytes == 2 * size * 2 // 3


def test_powersgd_sends_factors_of_what_they_halve() -> None:
    model = {"_target_": "dpexp.models.linear", "in_features": 5, "out_features": 64}
    dataset = {**random_rows(), "targets": 64}
    options = {"comm_hook": CommHook.powersgd, "powersgd_rank": 2}
    anatomy = train("ddp", 2, model=model, dataset=dataset, parallel=options)
    # (64 + 5) * 2 is less than half of 64 * 5; the 64 biases are sent as they are
    assert anatomy.exchanges[0].step_bytes == (69 * 2 + 64) * 4
    assert values(anatomy.memory[0])["powersgd"] == (64 * 5 + 64) * 4


def test_ddp_sends_buffers_once_a_step_and_no_gradients_in_a_forward_run() -> None:
    overrides = {"dataset": images(), "batch_size": 4, "loss": "cross_entropy"}
    model = {"_target_": "specimens.Normed"}
    anatomy = train("ddp", 2, model=model, **overrides)
    assert anatomy.model.buffers == 7
    assert anatomy.model.buffer_bytes == 6 * 4 + 8
    assert anatomy.model.bytes_by_dtype == {"float32": (9 + 3 + 6 + 6) * 4, "int64": 8}
    assert [each.step_bytes for each in anatomy.exchanges] == [18 * 4, 32]
    assert dissect(make_plan_for("ddp", 2, model=model, **overrides)).exchanges == ()


def images() -> dict[str, Any]:
    sizes = {"rows": 8, "channels": 3, "height": 4, "width": 4, "classes": 3, "seed": 0}
    return {"_target_": "dpexp.datasets.images", **sizes}


def test_one_device_exchanges_nothing() -> None:
    for strategy in ("none", "dp", "ddp", "fsdp"):
        assert train(strategy, 1).exchanges == ()


def test_zero_gives_each_rank_the_state_of_some_parameters() -> None:
    anatomy = train("ddp", 2, optimizer=ADAMW, parallel={"zero": True})
    # the 10 weights go to rank 0, the 2 biases to rank 1
    assert values(anatomy.memory[0])["optimizer state"] == 2 * 40 + 4
    assert [each.step_bytes for each in anatomy.exchanges] == [48, 48]


def test_the_buckets_hold_a_copy_of_the_gradients_unless_these_are_views() -> None:
    assert values(train("ddp", 2).memory[0])["DDP buckets"] == 48
    options = {"gradient_as_bucket_view": True}
    assert values(train("ddp", 2, parallel=options).memory[0])["DDP buckets"] == 0


def test_fsdp_on_two_devices_halves_what_each_keeps() -> None:
    anatomy = train("fsdp", 2, optimizer=ADAMW)
    memory = values(anatomy.memory[0])
    assert (memory["parameters"], memory["gradients"]) == (24, 24)
    assert memory["optimizer state"] == 2 * 24 + 2 * 4
    assert memory["parameters gathered"] == 48
    assert [(each.step_bytes, each.sent_bytes) for each in anatomy.exchanges] == [
        (96, 48),  # in forward and in backward
        (48, 24),
    ]


def test_fsdp_pads_what_does_not_divide() -> None:
    memory = values(train("fsdp", 3).memory[0])  # 2 rows of weights over 3 ranks: 1, 1 and 0
    assert memory["parameters"] == 5 * 4 + 4


def test_fsdp_without_resharding_gathers_once_and_accumulation_gathers_each_time() -> None:
    kept = train("fsdp", 2, parallel={"reshard_after_forward": False})
    assert kept.exchanges[0].step_bytes == 48
    accumulated = train("fsdp", 2, accumulate=3)
    assert [each.step_bytes for each in accumulated.exchanges] == [3 * 96, 48]
    assert values(accumulated.memory[0])["gradients"] == 24 + 48


def test_the_units_of_fsdp_are_the_blocks_and_the_rest() -> None:
    sizes = {"vocabulary": 11, "width": 4, "heads": 2, "layers": 3}
    dataset = {"_target_": "dpexp.datasets.tokens", "rows": 8, "length": 6, "vocabulary": 11}
    model = {"_target_": "specimens.Decoder", **sizes}
    anatomy = train("fsdp", 2, model=model, dataset={**dataset, "seed": 0}, batch_size=4)
    block = 3 * 16 + 16 + 2 * 64
    assert [(unit.name, unit.parameters) for unit in anatomy.units] == [
        ("blocks.0", block),
        ("blocks.1", block),
        ("blocks.2", block),
        ("the rest", 2 * 11 * 4),
    ]
    assert values(anatomy.memory[0])["parameters gathered"] == (2 * block + 88) * 4
