"""What would disturb or measure nothing is refused with the way out."""

from __future__ import annotations

from typing import Any

import pytest
from builders import make_config, make_facts, make_plan_for

from dpexp.check import check
from dpexp.check_measuring import injected, not_reached
from dpexp.errors import ConfigError
from dpexp.plan import make_plan
from dpexp.schema import Task

NAN, INF = float("nan"), float("inf")


def refusal(strategy: str = "ddp", **overrides: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check(make_config(strategy, **{"task": Task.train, **overrides}))
    return caught.value


@pytest.mark.parametrize("key", ["collective_delay_s", "data_delay_s", "noise_s"])
@pytest.mark.parametrize("seconds", [-0.1, NAN, INF, -INF, 604800.0])
def test_what_is_no_delay_is_refused(key: str, seconds: float) -> None:
    error = refusal(inject={key: seconds, "noisy_rank": 0})
    assert error.key == f"inject.{key}"
    assert error.value is seconds
    assert error.fix == f"inject.{key}=0.01"


@pytest.mark.parametrize("factor", [0.99, 0.0, -1.0, NAN, INF])
def test_nothing_can_be_made_faster(factor: float) -> None:
    error = refusal(inject={"slow_rank": 0, "slow_factor": factor})
    assert (error.key, str(error.value)) == ("inject.slow_factor", str(factor))
    assert (error.allowed, error.fix) == ("1 or more", "inject.slow_factor=1.2")


@pytest.mark.parametrize(
    "inject",
    [
        {"collective_delay_s": 0.05},
        {"slow_rank": 0, "slow_factor": 1.0},
        {"data_delay_s": 0.1, "data_rank": 1},
        {"data_delay_s": 0.1},
        {"noisy_rank": 1, "noise_s": 0.05},
        {"die_rank": 1, "at_step": 3},
        {"hang_rank": 0, "at_step": 0},
    ],
    ids=str,
)
def test_what_disturbs_is_accepted(inject: dict[str, Any]) -> None:
    check(make_config("ddp", task=Task.train, steps=4, inject=inject))


def test_a_noisy_rank_needs_noise() -> None:
    error = refusal(inject={"noisy_rank": 1})
    assert (error.key, error.value, error.fix) == ("inject.noisy_rank", 1, "inject.noise_s=0.01")


def test_noise_needs_a_noisy_rank() -> None:
    error = refusal(inject={"noise_s": 0.1})
    assert (error.key, error.value, error.fix) == ("inject.noise_s", 0.1, "inject.noisy_rank=0")


def test_a_rank_with_slow_data_needs_a_delay() -> None:
    error = refusal(inject={"data_rank": 1})
    assert (error.key, error.fix) == ("inject.data_rank", "inject.data_delay_s=0.01")


@pytest.mark.parametrize("task", [Task.forward, Task.evaluate])
@pytest.mark.parametrize(
    ("key", "node"),
    [
        ("inject.collective_delay_s", {"inject": {"collective_delay_s": 0.05}}),
        ("measure.calibration_pairs", {"measure": {"calibration_pairs": 4}}),
    ],
)
def test_what_only_acts_in_training_is_refused_elsewhere(
    task: Task, key: str, node: dict[str, Any]
) -> None:
    error = refusal(task=task, **node)
    assert (error.key, error.fix) == (key, "task=train")
    assert "for training only" in str(error)


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        (
            "inject.collective_delay_s",
            {"inject": {"collective_delay_s": 0.05}, "measure": {"comm": False}},
        ),
        (
            "measure.calibration_pairs",
            {"measure": {"comm": False, "calibration_pairs": 4}},
        ),
    ],
)
def test_what_needs_timed_collectives_is_refused_without(
    key: str, overrides: dict[str, Any]
) -> None:
    error = refusal(**overrides)
    assert (error.key, error.fix) == (key, f"measure.comm=true, or {key}=0")


def test_no_calibration_is_fine_without_timed_collectives_and_without_training() -> None:
    check(make_config("ddp", measure={"comm": False, "calibration_pairs": 0}))


@pytest.mark.parametrize("key", ["die_rank", "hang_rank"])
def test_a_rank_cannot_end_after_the_last_step(key: str) -> None:
    error = refusal(steps=3, inject={key: 0, "at_step": 3})
    assert (error.key, error.value) == ("inject.at_step", 3)
    assert (error.allowed, error.fix) == ("0 to 2", "inject.at_step=2")
    check(make_config("ddp", steps=3, inject={"at_step": 7}))  # nobody ends


def test_a_run_that_ended_before_a_rank_could_says_so() -> None:
    config = make_config("ddp", inject={"die_rank": 1, "at_step": 4})
    assert not_reached(config, 5) == ()
    (note,) = not_reached(config, 4)
    assert note.startswith(
        "inject.die_rank=1: the run ended after 4 steps, before inject.at_step=4"
    )
    assert not_reached(make_config("ddp"), 1) == ()


# Ranks that are not there


def plan_refusal(strategy: str, num_devices: int, inject: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        make_plan_for(strategy, num_devices, inject=inject)
    return caught.value


RANKS: list[tuple[str, dict[str, Any]]] = [
    ("slow_rank", {}),
    ("noisy_rank", {"noise_s": 0.1}),
    ("data_rank", {"data_delay_s": 0.1}),
    ("die_rank", {}),
    ("hang_rank", {}),
]


@pytest.mark.parametrize(("key", "rest"), RANKS)
@pytest.mark.parametrize("rank", [2, -1])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_that_is_not_there_is_refused(
    strategy: str, rank: int, key: str, rest: dict[str, Any]
) -> None:
    error = plan_refusal(strategy, 2, {key: rank, **rest})
    assert (error.key, error.value) == (f"inject.{key}", rank)
    assert f"parallel={strategy} has 2" in str(error)
    assert (error.allowed, error.fix) == ("0 to 1", f"inject.{key}=1")
    make_plan_for(strategy, 2, inject={key: 1, **rest})


@pytest.mark.parametrize("key", ["data_rank", "die_rank", "hang_rank"])
def test_dp_has_one_process_whatever_its_devices(key: str) -> None:
    error = plan_refusal("dp", 4, {key: 1, "data_delay_s": 0.1})
    assert (error.key, error.allowed) == (f"inject.{key}", "0")
    assert "has 1 process " in str(error)


def test_how_slow_a_rank_is_without_a_slow_rank_is_refused() -> None:
    error = refusal(inject={"slow_factor": 1.5})
    assert (error.key, error.value, error.fix) == (
        "inject.slow_factor", 1.5, "inject.slow_rank=0",
    )  # fmt: skip
    check(make_config(inject={"slow_factor": 1.2}))  # that of conf/config.yaml


def test_dp_may_have_a_slow_replica() -> None:
    make_plan_for("dp", 4, inject={"slow_rank": 3})
    make_plan_for("dp", 4, inject={"noisy_rank": 3, "noise_s": 0.1})
    assert plan_refusal("dp", 4, {"slow_rank": 4}).allowed == "0 to 3"


def test_in_a_sweep_a_cell_without_the_rank_is_not_disturbed_and_says_so() -> None:
    config = make_config("ddp", num_devices=1, inject={"slow_rank": 1})
    plan = make_plan(config, make_facts(), in_sweep=True)
    assert any("inject.slow_rank=1: parallel=ddp has 1 device here" in note for note in plan.notes)
    assert injected(config, 1, 1) == []
    assert injected(config, 2, 2) == ["rank 1 computes about 1.2 times as long"]
    assert "injected: rank 1 computes about 1.2 times as long" not in plan.notes
    spread = make_plan_for("ddp", 2, inject={"slow_rank": 1})
    assert "injected: rank 1 computes about 1.2 times as long" in spread.notes


def test_where_there_are_no_collectives_none_is_delayed_and_a_sweep_says_so() -> None:
    assert plan_refusal("none", 1, {"collective_delay_s": 0.1}).key == "inject.collective_delay_s"
    config = make_config("none", inject={"collective_delay_s": 0.1})
    plan = make_plan(config, make_facts(), in_sweep=True)
    assert any("parallel=none has no collectives" in note for note in plan.notes)
    assert injected(config, 1, 1) == []
    make_plan_for("dp", 2, inject={"collective_delay_s": 0.1})


def test_a_negative_rank_is_refused_in_a_sweep_too() -> None:
    config = make_config("ddp", num_devices=2, inject={"slow_rank": -1})
    with pytest.raises(ConfigError, match=r"inject\.slow_rank"):
        make_plan(config, make_facts(), in_sweep=True)


def test_what_is_injected_is_told_in_words() -> None:
    config = make_config(
        "ddp",
        num_devices=2,
        inject={
            "collective_delay_s": 0.02, "data_delay_s": 0.01, "data_rank": 1, "noisy_rank": 0,
            "noise_s": 0.5, "die_rank": 1, "hang_rank": 0, "at_step": 7,
        },
    )  # fmt: skip
    assert injected(config, 2, 2) == [
        "each collective takes 0.02 s longer",
        "each batch takes 0.01 s longer to fetch on rank 1",
        "rank 0 pauses for 0.5 s a step on average",
        "rank 1 kills itself at step 7",
        "rank 0 hangs at step 7; the others give up after parallel.timeout_s=300",
    ]
    again = make_config("ddp", num_devices=2, inject={"die_rank": 1}, parallel={"max_restarts": 1})
    assert injected(again, 2, 2) == ["rank 1 kills itself at step 2, in the first attempt only"]


@pytest.mark.parametrize(
    "inject",
    [{"collective_delay_s": 0.1}, {"slow_rank": 0}, {"noisy_rank": 0, "noise_s": 0.1}],
    ids=lambda inject: next(iter(inject)),
)
def test_on_an_accelerator_the_host_cannot_hold_up_the_device(inject: dict[str, Any]) -> None:
    facts = make_facts(accelerator="cuda", num_accelerators=1)
    with pytest.raises(ConfigError, match="does not hold up a cuda device"):
        make_plan(make_config("none", task=Task.train, device="cuda", inject=inject), facts)
