"""What a run would do: figures computed by hand, and compared with torch where it is for real."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import specimens
import torch
from builders import make_plan_for
from conftest import TESTS
from torch import nn

from dpexp.anatomy import Anatomy, dissect
from dpexp.anatomy.data import BatchShapes, DeviceMemory, Figure
from dpexp.anatomy.parts import batch_at
from dpexp.anatomy.specimen import Fakes, replaced
from dpexp.anatomy.trace import NO_HEAVY, Caller
from dpexp.anatomy.traffic import ddp_buckets
from dpexp.batches import Inputs
from dpexp.errors import ConfigError
from dpexp.losses import make_loss
from dpexp.models import gpt, mlp
from dpexp.schedule import Schedule
from dpexp.schema import CommHook, Precision, Scaling, Task

ADAMW = {"_target_": "torch.optim.AdamW", "lr": 0.1}
MOMENTUM = {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9}
SEQUENCES = {"_target_": "specimens.Sequences"}


def train(strategy: str = "none", num_devices: int = 1, **overrides: Any) -> Anatomy:
    return dissect(make_plan_for(strategy, num_devices, task=Task.train, **overrides))


def of(name: str, strategy: str = "none", num_devices: int = 1, **overrides: Any) -> Anatomy:
    """A forward run of a model of specimens.py."""
    arguments = overrides.pop("arguments", {})
    model = {"_target_": f"specimens.{name}", **arguments}
    return dissect(make_plan_for(strategy, num_devices, model=model, **overrides))


def values(memory: DeviceMemory) -> dict[str, int | None]:
    return {name: part.value for name, part in memory.parts.items()}


def table(batch: BatchShapes | None) -> list[tuple[int, str, str, str]]:
    assert batch is not None
    return [(each.rows, each.inputs, each.target, each.output) for each in batch.devices]


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


def random_rows(rows: int = 100) -> dict[str, Any]:
    return {
        "_target_": "dpexp.datasets.random_rows",
        "rows": rows,
        "features": 5,
        "targets": 2,
        "seed": 0,
    }


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


# --- buckets: what torch itself does

REAL_BUCKETS = """
import json, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from dpexp.models import mlp
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
found = {}
for cap, widths in ((0.003, [8, 64, 32, 2]), (None, [8, 640, 640, 640, 2])):
    for unused in (False, True):
        model = DDP(mlp(widths), bucket_cap_mb=cap, find_unused_parameters=unused)
        for _ in range(3):
            model(torch.ones(4, 8)).sum().backward()
        data = model._get_ddp_logging_data()
        found[f"{cap} {unused}"] = [data["bucket_sizes"], data.get("rebuilt_bucket_sizes")]
        del model
dist.destroy_process_group()
print(json.dumps(found))
"""


def test_buckets_are_those_of_a_real_ddp(tmp_path: Any) -> None:
    command = [sys.executable, "-W", "ignore", "-c", REAL_BUCKETS, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    real = json.loads(done.stdout)
    dataset = {**random_rows(), "features": 8}
    for cap, widths in ((0.003, [8, 64, 32, 2]), ("auto", [8, 640, 640, 640, 2])):
        model = {"_target_": "dpexp.models.mlp", "widths": widths}
        for unused in (False, True):
            options = {"bucket_cap_mb": cap, "find_unused_parameters": unused}
            buckets = train("ddp", 2, model=model, dataset=dataset, parallel=options).buckets
            first, later = real[f"{None if cap == 'auto' else cap} {unused}"]
            assert buckets is not None
            assert [bucket.bytes for bucket in buckets.first_step] == _numbers(first)
            assert [bucket.bytes for bucket in buckets.later] == _numbers(later or first)
            assert len(buckets.later) > 1


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def test_buckets_in_an_order_that_is_not_known_are_those_from_the_last_parameter() -> None:
    plan = make_plan_for("ddp", 2, task=Task.train, parallel={"bucket_cap_mb": 1e-5})
    buckets = ddp_buckets(nn.Linear(5, 2), plan, ())
    assert [bucket.bytes for bucket in buckets.later] == [48]  # 8 bytes are not the 10 of a bucket
    assert "assumed" in buckets.order


REAL_TRAFFIC = """
import json, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from dpexp.models import gpt
from dpexp.parallel.fsdp import units

class Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.bytes = {}
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).split(".")[1]
        if str(func).startswith("c10d"):
            whole = max(x.nbytes for x in tree_leaves(args) if torch.is_tensor(x))
            self.bytes[name] = self.bytes.get(name, 0) + whole
        return func(*args, **(kwargs or {}))

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
found = []
for reshard in (True, False):
    for micro_batches in (1, 2):
        model = gpt(11, 6, 8, 2, 3)
        mesh = init_device_mesh("cpu", (4,))
        for unit in (*units(model, "blocks"), model):
            fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
        kept = sum(p.to_local().nbytes for p in model.parameters())
        for step in range(2):
            with Watch() as watch:
                for micro in range(micro_batches):
                    model.set_requires_gradient_sync(micro == micro_batches - 1)
                    model(torch.zeros(3, 6, dtype=torch.int64)).sum().backward()
        found.append([kept, watch.bytes["_allgather_base_"], watch.bytes["_reduce_scatter_base_"]])
dist.destroy_process_group()
print(json.dumps(found))
"""


def test_the_traffic_of_fsdp_is_that_of_its_own_collectives() -> None:
    command = [sys.executable, "-W", "ignore", "-c", REAL_TRAFFIC]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    sizes = {"vocabulary": 11, "length": 6, "width": 8, "heads": 2, "layers": 3}
    dataset = {"_target_": "dpexp.datasets.tokens", "rows": 24, "length": 6, "vocabulary": 11}
    computed = []
    for reshard in (True, False):
        for micro_batches in (1, 2):
            anatomy = train(
                "fsdp",
                4,
                model={"_target_": "dpexp.models.gpt", **sizes},
                dataset={**dataset, "seed": 0},
                batch_size=12,
                accumulate=micro_batches,
                parallel={"reshard_after_forward": reshard},
            )
            traffic = [each.step_bytes for each in anatomy.exchanges]
            computed.append([values(anatomy.memory[0])["parameters"], *traffic])
    assert computed == json.loads(done.stdout)


# --- arithmetic that torch's counter has no formula for by default


def test_an_lstm_is_counted() -> None:
    anatomy = of("Recurrent", dataset=SEQUENCES, batch_size=4)
    by_hand = 2 * (4 * 7) * 8 * 64 + 7 * 2 * 4 * 16 * 64  # all inputs at once, states one by one
    assert anatomy.forward_flops == Figure(by_hand)


@pytest.mark.parametrize("task", [Task.forward, Task.evaluate])
def test_fused_encoders_are_counted(task: Task) -> None:
    anatomy = of("Encoder", dataset=SEQUENCES, batch_size=4, task=task)
    products = 8 * 24 + 8 * 8 + 2 * 8 * 16
    by_hand = 2 * (2 * 28 * products + 2 * 2 * 4 * 2 * 7 * 7 * 4)
    assert anatomy.forward_flops == Figure(by_hand)


def test_attention_is_counted() -> None:
    rows, time, width, layers, vocabulary = 3, 6, 8, 2, 11
    sizes = {"vocabulary": vocabulary, "length": time, "width": width, "heads": 2, "layers": layers}
    tokens = {"_target_": "dpexp.datasets.tokens", "rows": 9, "length": time, "vocabulary": 11}
    anatomy = dissect(
        make_plan_for(
            model={"_target_": "dpexp.models.gpt", **sizes},
            dataset={**tokens, "seed": 0},
            batch_size=rows,
        )
    )
    products = 2 * rows * time * (layers * 12 * width**2 + width * vocabulary)
    attention = layers * 2 * (2 * rows * time * time * width)
    assert anatomy.forward_flops == Figure(products + attention)


def test_what_has_no_formula_is_named_and_never_a_zero() -> None:
    alone = of("Spectral", arguments={"layer": False}).forward_flops
    assert alone.value is None
    assert "aten._fft" in alone.note
    beside = of("Spectral", arguments={"layer": True}).forward_flops
    assert (beside.value, beside.at_least) == (600, True)
    assert "not counted: aten._fft" in beside.note


def test_a_model_without_products_says_so() -> None:
    assert of("Elementwise").forward_flops == Figure(0, NO_HEAVY)


# --- models that the meta device cannot do


def test_a_constructor_that_reads_numbers_runs_on_the_cpu() -> None:
    anatomy = of("Rates", arguments={"branches": False})
    assert anatomy.model.built_on == "cpu"
    assert any("built on the CPU" in note for note in anatomy.notes)
    assert not any("called on the CPU" in note for note in anatomy.notes)
    assert anatomy.forward_flops.value == 600


def test_such_a_model_is_called_there_when_it_depends_on_numbers() -> None:
    model = {"_target_": "specimens.Rates", "branches": True}
    anatomy = train(model=model)
    assert any("called on the CPU" in note for note in anatomy.notes)
    assert anatomy.step_flops.value == 1200
    assert values(anatomy.memory[0])["activations"] == 240


def test_a_model_on_meta_that_depends_on_numbers_is_unknown() -> None:
    model = {"_target_": "specimens.Branching"}
    anatomy = train(model=model, optimizer=MOMENTUM)
    assert anatomy.model.built_on == "meta"
    assert "values of tensors" in anatomy.problem
    assert anatomy.forward_flops == anatomy.step_flops == Figure(None, anatomy.problem)
    assert table(anatomy.first) == [(30, "[30, 5]", "[30, 2]", "")]
    memory = anatomy.memory[0]
    assert memory.parts["activations"] == Figure(None, anatomy.problem)
    assert values(memory)["optimizer state"] == 48
    assert memory.total.at_least


def test_a_forward_that_fails_is_unknown_with_the_error() -> None:
    anatomy = of("Recurrent")
    assert anatomy.problem.startswith("RuntimeError: ")
    assert anatomy.forward_flops.value is None


def test_a_backward_that_fails_leaves_the_forward() -> None:
    anatomy = train(model={"_target_": "specimens.Detached"})
    assert anatomy.problem == ""
    assert anatomy.forward_flops.value == 600
    assert anatomy.step_flops.value is None
    assert "does not require grad" in anatomy.step_flops.note


def test_what_a_run_would_refuse_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"shape \[30, 3\], the target of shape \[30, 2\]"):
        train(model={"_target_": "dpexp.models.linear", "in_features": 5, "out_features": 3})
    with pytest.raises(ConfigError, match="no trainable parameter"):
        train(model={"_target_": "specimens.Elementwise"})
    with pytest.raises(ConfigError, match="nothing is left to do"):
        train(drop_last=True, batch_size=101)


def test_tensors_of_plain_attributes_and_of_the_default_device_work() -> None:
    anatomy = of("Careless")
    assert (anatomy.problem, anatomy.model.built_on) == ("", "meta")
    assert anatomy.forward_flops.value == 600


@pytest.mark.parametrize("name", ["scripted", "traced"])
def test_models_of_torchs_compilers(name: str) -> None:
    anatomy = of(name)
    assert (anatomy.problem, anatomy.model.parameters) == ("", 12)
    assert anatomy.forward_flops.value == 600


def test_layers_hidden_in_a_list_are_told() -> None:
    anatomy = dissect(make_plan_for(model={"_target_": "usercode.Hiding"}))
    assert "torch does not count among the model's" in anatomy.problem
    assert any("plain list" in note for note in anatomy.notes)


def test_shared_parameters_count_once() -> None:
    tokens = {"_target_": "dpexp.datasets.tokens", "rows": 9, "length": 3, "vocabulary": 7}
    dataset = {**tokens, "seed": 0}
    anatomy = train("ddp", 3, model={"_target_": "specimens.Tied"}, dataset=dataset)
    assert anatomy.model.parameters == 35
    assert anatomy.exchanges[0].step_bytes == 35 * 4
    assert anatomy.buckets is not None
    assert [bucket.tensors for bucket in anatomy.buckets.later] == [1]


def test_a_model_gets_its_own_tensors_back() -> None:
    model = nn.LSTM(3, 4)
    before = dict(model.named_parameters())
    with replaced(model, Fakes(torch.device("cpu"))):
        assert model.weight_ih_l0 is not before["weight_ih_l0"]
        assert model._flat_weights[0] is model.weight_ih_l0
    assert all(before[name] is tensor for name, tensor in model.named_parameters())
    assert model._flat_weights[0] is model.weight_ih_l0


# --- activations: what autograd really keeps


@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16])
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_activations_are_those_of_real_tensors(name: str, precision: Precision) -> None:
    tokens = torch.zeros(3, 6, dtype=torch.int64)
    model, inputs = {
        "mlp": (mlp([5, 8, 2]), Inputs((torch.zeros(30, 5),), {}, torch.zeros(30, 2))),
        "gpt": (gpt(11, 6, 8, 2, 2), Inputs((tokens,), {}, tokens)),
    }[name]
    real, fake = kept(model, inputs, precision)
    assert real.value
    assert fake == real


def test_the_workspace_of_a_recurrent_layer_is_not_known() -> None:
    inputs = Inputs((torch.zeros(4, 7, 8),), {}, torch.zeros(4, 16))
    real, fake = kept(specimens.Recurrent(), inputs, Precision.fp32)
    assert real.value is not None
    assert fake.value is not None
    assert 0 < fake.value <= real.value
    assert (real.at_least, fake.at_least) == (False, fake.value < real.value)


def kept(model: nn.Module, inputs: Inputs, precision: Precision) -> tuple[Figure, Figure]:
    """What autograd keeps of real tensors, and what of fake ones."""
    cpu, loss = torch.device("cpu"), make_loss("auto", None)
    real = Caller(model, nullcontext(), cpu, precision, loss).kept(inputs)
    fakes = Fakes(cpu)
    with replaced(model, fakes):
        faked = Inputs(*map(fakes.of, inputs))
        return real, Caller(model, fakes.mode, cpu, precision, loss).kept(faked)


def test_a_micro_batch_keeps_its_part() -> None:
    assert values(train(accumulate=3).memory[0])["activations"] == 10 * 2 * 4
    # device 0 has 15 rows, cut into 4 micro-batches of 4, 4, 4 and 3
    assert values(train("ddp", 2, accumulate=4).memory[0])["activations"] == 4 * 2 * 4


# --- large


LARGE = """
import json, resource, sys
sys.path.insert(0, sys.argv[1])
from builders import make_plan_for
from dpexp.anatomy import dissect
from dpexp.schema import Task
sizes = {"vocabulary": 32000, "width": 8192, "heads": 64, "layers": 86}
data = {"_target_": "dpexp.datasets.tokens", "rows": 8, "length": 512, "vocabulary": 32000,
        "seed": 0}
found = dissect(make_plan_for("fsdp", 8, task=Task.train, batch_size=8, dataset=data,
    model={"_target_": "specimens.Decoder", **sizes},
    optimizer={"_target_": "torch.optim.AdamW", "lr": 0.1}))
memory = {name: part.value for name, part in found.memory[0].parts.items()}
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([found.model.parameters, found.forward_flops.value, memory, peak]))
"""


def test_a_model_of_70_billion_parameters_needs_no_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LARGE, str(TESTS)],
        capture_output=True,
        text=True,
        timeout=150,
        check=True,
    )
    parameters, flops, memory, peak_kib = json.loads(done.stdout)
    width, layers, words, rows, time = 8192, 86, 32000, 8, 512
    assert parameters == 12 * layers * width**2 + 2 * words * width
    assert parameters > 69e9
    products = 2 * rows * time * (12 * layers * width**2 + words * width)
    assert flops == products + layers * 2 * (2 * rows * time * time * width)
    assert memory["parameters"] == parameters * 4 // 8
    assert memory["optimizer state"] == parameters + 4 * (4 * layers + 2)
    assert peak_kib < 1.5 * 2**20


# --- on a GPU


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_gpus_activations_are_those_of_real_tensors() -> None:
    device, loss = torch.device("cuda"), make_loss("auto", None)
    tokens = torch.zeros(3, 64, dtype=torch.int64)
    model, inputs = gpt(11, 64, 32, 2, 2), Inputs((tokens,), {}, tokens)
    fakes = Fakes(device)
    with replaced(model, fakes):
        faked = Inputs(*map(fakes.of, inputs))
        fake = Caller(model, fakes.mode, device, Precision.bf16, loss).kept(faked)
    there = Inputs((tokens.to(device),), {}, tokens.to(device))
    real = Caller(model.to(device), nullcontext(), device, Precision.bf16, loss).kept(there)
    assert fake == real
