"""What of precision, model and micro-batches a machine or a batch does not allow."""

from __future__ import annotations

from typing import Any

import pytest
from builders import make_facts, make_plan_for

from dpexp.errors import ConfigError
from dpexp.plan import HardwareFacts
from dpexp.schema import Precision, Scaling, Task

CPU = make_facts(cores=4)
CUDA = make_facts(cores=16, accelerator="cuda", num_accelerators=4, nccl=True)
MPS = make_facts(cores=8, accelerator="mps", num_accelerators=1)
XPU = make_facts(cores=8, accelerator="xpu", num_accelerators=2)


def refusal(strategy: str, num_devices: int, **overrides: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        make_plan_for(strategy, num_devices, **overrides)
    return caught.value


def test_fsdp_is_a_process_per_device_as_ddp_is() -> None:
    plan = make_plan_for("fsdp", 2, facts=CPU)
    assert (plan.label, plan.num_devices, plan.num_processes) == ("fsdp-n2", 2, 2)
    assert (plan.backend, plan.emulated, plan.threads_per_process) == ("gloo", False, 2)
    there = make_plan_for("fsdp", "auto", facts=CUDA)
    assert (there.num_processes, there.backend, there.device_of(3)) == (4, "nccl", "cuda:3")


def test_fsdp_under_torchrun_has_its_number_of_processes() -> None:
    facts = make_facts(outer_world_size=2)
    assert make_plan_for("fsdp", "auto", facts=facts).num_devices == 2
    assert "with 3 devices needs 3" in str(refusal("fsdp", 3, facts=facts))


@pytest.mark.parametrize("facts", [MPS, XPU], ids=["mps", "xpu"])
def test_fsdp_is_refused_where_torch_cannot(facts: HardwareFacts) -> None:
    error = refusal("fsdp", 1, facts=facts)
    assert (error.key, error.value) == ("parallel", "fsdp")


# Precision and pinned memory


@pytest.mark.parametrize("facts", [CPU, MPS, XPU], ids=["cpu", "mps", "xpu"])
def test_tf32_is_refused_off_cuda(facts: HardwareFacts) -> None:
    error = refusal("none", 1, facts=facts, precision=Precision.tf32)
    assert (error.key, error.value, error.fix) == ("precision", "tf32", "precision=bf16")
    assert f"the device here is {facts.accelerator or 'cpu'}" in str(error)


def test_tf32_is_refused_on_the_cpu_of_a_machine_with_cuda() -> None:
    assert refusal("none", 1, facts=CUDA, device="cpu", precision=Precision.tf32)
    make_plan_for("none", 1, facts=CUDA, precision=Precision.tf32)


@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16, Precision.fp16])
@pytest.mark.parametrize("facts", [CPU, CUDA], ids=["cpu", "cuda"])
def test_other_formats_are_everywhere(facts: HardwareFacts, precision: Precision) -> None:
    make_plan_for("none", 1, facts=facts, precision=precision)


def test_memory_is_pinned_for_cuda_only() -> None:
    error = refusal("none", 1, facts=CPU, loader={"pin_memory": True})
    assert (error.key, error.fix) == ("loader.pin_memory", "loader.pin_memory=null")
    for asked in (None, False):
        make_plan_for("none", 1, facts=CPU, loader={"pin_memory": asked})
    make_plan_for("none", 1, facts=CUDA, loader={"pin_memory": True})


# BatchNorm over all ranks


@pytest.mark.parametrize(
    ("strategy", "facts", "reason"),
    [
        ("ddp", CPU, "works on CUDA devices only; the device here is cpu"),
        ("fsdp", CPU, "works on CUDA devices only; the device here is cpu"),
        ("dp", CPU, "works between processes, and dp has only one"),
        ("dp", CUDA, "works between processes, and dp has only one"),
    ],
)
def test_sync_batchnorm_is_refused_where_it_cannot_work(
    strategy: str, facts: HardwareFacts, reason: str
) -> None:
    error = refusal(strategy, 2, facts=facts, prepare={"sync_batchnorm": True})
    assert error.key == "prepare.sync_batchnorm"
    assert reason in str(error)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_sync_batchnorm_is_accepted_between_processes_on_cuda(strategy: str) -> None:
    assert make_plan_for(strategy, 2, facts=CUDA, prepare={"sync_batchnorm": True}).notes == ()


@pytest.mark.parametrize("facts", [CPU, CUDA], ids=["cpu", "cuda"])
def test_on_a_single_device_sync_batchnorm_has_nothing_to_do_and_that_is_noted(
    facts: HardwareFacts,
) -> None:
    (note,) = make_plan_for("none", 1, facts=facts, prepare={"sync_batchnorm": True}).notes
    assert "one device sees the whole batch" in note


# Micro-batches


@pytest.mark.parametrize(
    ("strategy", "devices", "batch_size", "scaling", "most"),
    [
        ("none", 1, 4, Scaling.strong, 4),
        ("ddp", 2, 8, Scaling.strong, 4),
        ("ddp", 3, 8, Scaling.strong, 3),  # 3, 3 and 2 rows
        ("fsdp", 2, 4, Scaling.weak, 4),
        ("dp", 2, 8, Scaling.strong, 4),
    ],
)
def test_a_device_needs_a_row_for_each_micro_batch(
    strategy: str, devices: int, batch_size: int, scaling: Scaling, most: int
) -> None:
    how = {"task": Task.train, "batch_size": batch_size, "scaling": scaling}
    make_plan_for(strategy, devices, accumulate=most, **how)
    error = refusal(strategy, devices, accumulate=most + 1, **how)
    assert (error.key, error.value, error.allowed) == ("accumulate", most + 1, f"1 to {most}")
    assert f"a device has {most} rows in a step" in str(error)
