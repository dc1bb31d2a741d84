"""What is found of odd models, of activations and of large models without running them."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext

import pytest
import specimens
import torch
from anatomies import MOMENTUM, SEQUENCES, of, table, train, values
from builders import make_plan_for
from conftest import TESTS
from torch import nn

from dpexp.anatomy import dissect
from dpexp.anatomy.data import Figure
from dpexp.anatomy.specimen import Fakes, replaced
from dpexp.anatomy.trace import NO_HEAVY, Caller
from dpexp.batches import Inputs
from dpexp.errors import ConfigError
from dpexp.losses import make_loss
from dpexp.models import gpt, mlp
from dpexp.schema import Precision, Task

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


@pytest.mark.slow
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
