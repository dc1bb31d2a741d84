"""From config and hardware facts to a plan, or a refusal."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from builders import make_facts, make_plan_for

from dpexp.errors import ConfigError
from dpexp.plan import HardwareFacts, device_type_of, resolve_num_devices
from dpexp.schema import Backend, Scaling, StrategyName

CPU = make_facts(cores=4)
CUDA = make_facts(cores=16, accelerator="cuda", num_accelerators=4, nccl=True)
MPS = make_facts(cores=8, accelerator="mps", num_accelerators=1)
XPU = make_facts(cores=8, accelerator="xpu", num_accelerators=2)


def refusal(strategy: str, num_devices: Any = "auto", **overrides: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        make_plan_for(strategy, num_devices, **overrides)
    return caught.value


def test_the_exercise_is_one_device_one_process_and_all_cores() -> None:
    plan = make_plan_for("none", "auto", facts=CPU)
    assert (plan.label, plan.num_devices, plan.num_processes) == ("none-n1", 1, 1)
    assert (plan.device_type, plan.device_of(0), plan.backend) == ("cpu", "cpu", None)
    assert (plan.threads_per_process, plan.emulated) == (4, False)
    assert (plan.batch_rows, plan.batch_rows_per_device, plan.notes) == (30, 30, ())


def test_dp_on_a_cpu_is_one_process_of_emulated_devices() -> None:
    plan = make_plan_for("dp", 3, facts=CPU)
    assert (plan.label, plan.num_devices, plan.num_processes) == ("dp-n3", 3, 1)
    assert plan.emulated
    assert (plan.threads_per_process, plan.threads_per_replica) == (4, 1)
    assert (plan.batch_rows, plan.batch_rows_per_device) == (30, 10)


def test_ddp_is_a_process_per_device_on_a_share_of_the_cores() -> None:
    plan = make_plan_for("ddp", 2, facts=CPU)
    assert (plan.num_devices, plan.num_processes, plan.threads_per_process) == (2, 2, 2)
    assert (plan.device_of(1), plan.backend, plan.emulated) == ("cpu", "gloo", False)
    assert (plan.batch_rows, plan.batch_rows_per_device) == (30, 15)


@pytest.mark.parametrize(
    ("strategy", "facts", "emulated"),
    [("none", CPU, False), ("dp", CPU, True), ("ddp", CPU, False), ("dp", CUDA, False)],
)
def test_only_dp_on_a_cpu_is_emulated(strategy: str, facts: HardwareFacts, emulated: bool) -> None:
    count = 1 if strategy == "none" else 2
    assert make_plan_for(strategy, count, facts=facts).emulated is emulated


@pytest.mark.parametrize(
    ("cores", "ranks", "asked", "threads"),
    [
        (2, 1, None, 2),
        (2, 2, None, 1),
        (2, 4, None, 1),
        (7, 2, None, 3),
        (2, 2, 2, 2),
        (8, 2, 1, 1),
    ],
)
def test_threads_are_the_share_of_the_cores_unless_the_user_set_them(
    cores: int, ranks: int, asked: int | None, threads: int
) -> None:
    facts = make_facts(cores, requested_threads=asked)
    plan = make_plan_for("ddp", ranks, facts=facts)
    assert plan.threads_per_process == threads
    assert plan.threads_per_replica == threads


@pytest.mark.parametrize(("cores", "devices", "each"), [(8, 2, 4), (8, 3, 2), (2, 4, 1)])
def test_virtual_devices_share_the_threads_of_their_process(
    cores: int, devices: int, each: int
) -> None:
    plan = make_plan_for("dp", devices, facts=make_facts(cores))
    assert (plan.threads_per_process, plan.threads_per_replica) == (cores, each)


@pytest.mark.parametrize(
    ("strategy", "scaling", "devices", "rows", "each"),
    [
        ("none", Scaling.strong, 1, 16, 16),
        ("dp", Scaling.strong, 2, 16, 8),
        ("ddp", Scaling.strong, 2, 16, 8),
        ("ddp", Scaling.strong, 3, 16, 6),
        ("dp", Scaling.strong, 4, 16, 4),
        ("none", Scaling.weak, 1, 16, 16),
        ("dp", Scaling.weak, 2, 32, 16),
        ("ddp", Scaling.weak, 3, 48, 16),
    ],
)
def test_batch_size_is_global_under_strong_and_per_device_under_weak_scaling(
    strategy: str, scaling: Scaling, devices: int, rows: int, each: int
) -> None:
    plan = make_plan_for(strategy, devices, batch_size=16, scaling=scaling)
    assert (plan.batch_rows, plan.batch_rows_per_device) == (rows, each)


@pytest.mark.parametrize(
    ("strategy", "facts", "device", "count"),
    [
        ("none", CPU, "auto", 1),
        ("dp", CPU, "auto", 4),
        ("ddp", CPU, "cpu", 4),
        ("dp", CUDA, "auto", 4),
        ("ddp", CUDA, "cuda:1", 3),
        ("none", CUDA, "auto", 1),
        ("ddp", CUDA, "cpu", 16),
        ("none", MPS, "auto", 1),
    ],
)
def test_auto_is_all_there_is_and_one_for_none(
    strategy: str, facts: HardwareFacts, device: str, count: int
) -> None:
    assert make_plan_for(strategy, "auto", facts=facts, device=device).num_devices == count


def test_auto_under_torchrun_is_the_number_of_its_processes() -> None:
    facts = make_facts(cores=4, outer_world_size=2)
    assert make_plan_for("ddp", "auto", facts=facts).num_devices == 2


def test_another_number_than_torchruns_names_both() -> None:
    error = refusal("ddp", 3, facts=make_facts(outer_world_size=2, outer_local_size=2))
    assert error.key == "num_devices"
    assert "started 2 processes" in str(error)
    assert "with 3 devices needs 3" in str(error)


@pytest.mark.parametrize("strategy", ["none", "dp"])
def test_one_process_strategies_refuse_to_run_in_two_of_torchruns(strategy: str) -> None:
    count = 1 if strategy == "none" else 2
    assert "needs 1" in str(
        refusal(strategy, count, facts=make_facts(outer_world_size=2, outer_local_size=2))
    )


def test_following_the_advice_to_dp_under_torchrun_makes_the_run_go_through() -> None:
    error = refusal("dp", 4, facts=make_facts(outer_world_size=2, outer_local_size=2))
    assert "--nproc-per-node 1" in error.fix
    assert "num_devices=2" not in error.fix  # dp has one process whatever num_devices is


@pytest.mark.parametrize(
    ("device", "facts", "device_type"),
    [
        ("auto", CPU, "cpu"),
        ("auto", CUDA, "cuda"),
        ("auto", MPS, "mps"),
        ("cpu", CUDA, "cpu"),
        ("cuda:3", CUDA, "cuda"),
        ("cuda", CPU, "cuda"),
    ],
)
def test_the_type_of_a_device_string(device: str, facts: HardwareFacts, device_type: str) -> None:
    assert device_type_of(device, facts) == device_type


@pytest.mark.parametrize(
    ("device", "rank", "where"),
    [
        ("cuda", 0, "cuda:0"),
        ("cuda:1", 0, "cuda:1"),
        ("cuda:1", 2, "cuda:3"),
        ("auto", 1, "cuda:1"),
        ("cpu", 1, "cpu"),
    ],
)
def test_ranks_count_from_the_first_device(device: str, rank: int, where: str) -> None:
    assert make_plan_for("ddp", 3, facts=CUDA, device=device).device_of(rank) == where


@pytest.mark.parametrize("device", ["cuda:0", "cuda", "mps", "xpu"])
def test_an_absent_device_is_refused_and_never_replaced(device: str) -> None:
    error = refusal("none", 1, device=device, facts=CPU)
    assert (error.key, error.value, error.fix) == ("device", device, "device=auto")
    kind = device.split(":", maxsplit=1)[0].upper()
    assert f"{kind} is not available here: torch sees no accelerator" in str(error)


def test_an_index_beyond_the_devices_is_refused_with_the_range() -> None:
    error = refusal("none", 1, device="cuda:4", facts=CUDA)
    assert (error.key, error.allowed) == ("device", "cuda:0 to cuda:3")


@pytest.mark.parametrize(("device", "count", "left"), [("cuda", 5, 4), ("cuda:2", 3, 2)])
def test_more_devices_than_there_are_is_refused_with_what_is_left(
    device: str, count: int, left: int
) -> None:
    error = refusal("ddp", count, device=device, facts=CUDA)
    assert (error.key, error.allowed) == ("num_devices", f"1 to {left}")


def test_a_cpu_takes_more_devices_than_it_has_cores_and_notes_both_numbers() -> None:
    plan = make_plan_for("ddp", 4, facts=make_facts(cores=2), batch_size=32)
    assert plan.notes == ("4 devices share 2 cores: their times include waiting for a core",)


@pytest.mark.parametrize("strategy", ["dp", "ddp"])
@pytest.mark.parametrize("facts", [MPS, XPU], ids=["mps", "xpu"])
def test_parallel_is_refused_where_torch_cannot(strategy: str, facts: HardwareFacts) -> None:
    error = refusal(strategy, 1, facts=facts)
    assert (error.key, error.value) == ("parallel", strategy)


def test_uneven_chunks_are_noted_with_both_numbers_and_the_sizes() -> None:
    (note,) = make_plan_for("ddp", 3, batch_size=16, facts=CPU).notes
    assert "batch_size 16 is not divisible by num_devices 3" in note
    assert "the devices get 6, 6, 4 rows" in note


def test_keys_of_the_users_own_are_noted_by_name() -> None:
    notes = make_plan_for("none", 1, extra={"foo": 1, "tag": "x"}).notes
    assert [note.split(":")[0] for note in notes] == ["foo", "tag"]


@pytest.mark.parametrize(
    ("facts", "device", "asked", "backend"),
    [
        (CPU, "auto", Backend.auto, "gloo"),
        (CUDA, "auto", Backend.auto, "nccl"),
        (CUDA, "cpu", Backend.auto, "gloo"),
        (CUDA, "auto", Backend.gloo, "gloo"),
        (CUDA, "auto", Backend.nccl, "nccl"),
    ],
)
def test_the_backend_of_ddp(
    facts: HardwareFacts, device: str, asked: Backend, backend: str
) -> None:
    plan = make_plan_for("ddp", 2, facts=facts, device=device, parallel={"backend": asked})
    assert plan.backend == backend


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_nccl_without_cuda_is_refused(device: str) -> None:
    error = refusal("ddp", 2, facts=CPU, device=device, parallel={"backend": Backend.nccl})
    assert (error.key, error.fix) == ("parallel.backend", "parallel.backend=gloo")


def test_nccl_that_torch_was_built_without_is_refused() -> None:
    facts = make_facts(accelerator="cuda", num_accelerators=2, nccl=False)
    assert refusal("ddp", 2, facts=facts).key == "parallel.backend"


def test_a_plan_can_be_pickled() -> None:
    plan = make_plan_for("ddp", 2)
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_auto_never_gives_less_than_one_device() -> None:
    assert resolve_num_devices("auto", StrategyName.dp, "cuda", 4, CUDA) == 1
