"""The rules by which a sweep is gone on with."""

from __future__ import annotations

from typing import Any

import pytest
from builders import make_config

from dpexp.config import to_plain
from dpexp.errors import ConfigError
from dpexp.identity import config_hash, differences
from dpexp.resuming import (
    Found,
    Planned,
    check_resuming,
    contiguous,
    in_first_order,
    refuse_other_run,
    rerun_of,
    to_run,
    without_own,
)
from dpexp.schema import Task
from dpexp.schema_measuring import Rerun

FIRST = ["parallel=none,ddp", "num_devices=1,2", "steps=10"]


def refusal(*arguments: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        in_first_order("s", *arguments)
    return caught.value


# The overrides


def test_another_order_is_brought_into_the_first_one() -> None:
    assert in_first_order("s", ["steps=10", "num_devices=1,2", "parallel=none,ddp"], FIRST) == FIRST


def test_changed_overrides_are_refused_with_the_difference() -> None:
    error = refusal([*FIRST[:2], "steps=20", "+tag=x"], FIRST)
    assert error.key == "resume"
    assert error.problem.endswith("other overrides: - steps=10, + steps=20, + +tag=x")


def test_of_a_key_that_comes_twice_the_order_counts() -> None:
    assert in_first_order("s", ["a=1", "b=2", "a=3"], ["a=1", "a=3", "b=2"]) == [
        "a=1",
        "a=3",
        "b=2",
    ]
    assert "- a=1, - a=3, + a=3, + a=1" in refusal(["a=3", "a=1"], ["a=1", "a=3"]).problem


def test_a_limit_of_time_may_change_but_not_vary() -> None:
    typed = ["loader.timeout_s=9", *FIRST, "parallel.timeout_s=5"]
    assert in_first_order("s", typed, [*FIRST, "parallel.timeout_s=60"]) == [
        *FIRST, "parallel.timeout_s=5", "loader.timeout_s=9",
    ]  # fmt: skip
    assert "+ parallel.timeout_s=1,2" in refusal([*FIRST, "parallel.timeout_s=1,2"], FIRST).problem


def test_of_hydras_own_keys_only_the_jobs_environment_counts() -> None:
    in_first_order("s", ["hydra.sweep.dir=a", "hydra/launcher=joblib"], ["hydra.sweep.dir=b"])
    assert "+ +hydra.job.env_set.A=1" in refusal(["+hydra.job.env_set.A=1"], []).problem


def test_resume_and_rerun_are_no_overrides_of_the_cells() -> None:
    assert without_own(["resume=last", "a=1", "++rerun=all", "resumed=1"]) == ["a=1", "resumed=1"]


def test_a_single_run_that_trains_takes_a_run_and_no_sweep() -> None:
    for resume in (None, True, "outputs/runs/a"):
        check_resuming(make_config(resume=resume, task=Task.train))
    with pytest.raises(ConfigError, match=r"resume='last'.*Try: resume=true, or -m"):
        check_resuming(make_config(resume="last", task=Task.train))
    with pytest.raises(ConfigError, match="only training has checkpoints"):
        check_resuming(make_config(resume=True))
    with pytest.raises(ConfigError, match="Try: resume=last, or rerun=null"):
        check_resuming(make_config(rerun=Rerun.failed))


def test_a_run_goes_on_with_what_trains_the_same() -> None:
    old = to_plain(make_config(task=Task.train, steps=10))
    free = {"steps": 20, "num_devices": 2, "warmup_steps": 0, "trace": True}
    refuse_other_run("run", old, {**old, **free, "parallel": {"strategy": "fsdp"}})
    with pytest.raises(ConfigError, match=r"resume='run'.*another config: batch_size: 30, now 60"):
        refuse_other_run("run", old, {**old, **free, "batch_size": 60})
    # A key that begins with the name of one that is free is not.
    with pytest.raises(ConfigError, match="steps_more: 1, now 2"):
        refuse_other_run("run", {**old, "steps_more": 1}, {**old, "steps_more": 2})


def test_a_schedule_that_ends_with_the_last_step_keeps_it() -> None:
    old = to_plain(make_config(task=Task.train, steps=10, lr_scheduler="cosine"))
    refuse_other_run("run", old, {**old, "num_devices": 2})
    with pytest.raises(ConfigError, match="steps: 10, now 20"):
        refuse_other_run("run", old, {**old, "steps": 20})


def test_rerun_is_one_of_its_choices() -> None:
    assert [rerun_of(value) for value in (None, "failed", "all")] == [None, Rerun.failed, Rerun.all]
    with pytest.raises(ConfigError, match=r"rerun='some'.*failed, all, or null"):
        rerun_of("some")


# The cells

CONFIG = {"steps": 10, "model": {"bias": True}}


def planned(count: int) -> list[Planned]:
    return [Planned(number, f"{number}_c", CONFIG) for number in range(count)]


def found(*statuses: str | None) -> dict[int, Found]:
    """None = without a readable result; "" = nothing there."""
    results = {
        None: None,
        **{status: {"status": status, "config": CONFIG} for status in statuses if status},
    }
    return {
        number: Found(f"{number}_c", results[status])
        for number, status in enumerate(statuses)
        if status != ""
    }


STATUSES = ("ok", "failed", "interrupted", "skipped", None, "")


@pytest.mark.parametrize(
    ("rerun", "numbers"),
    [(None, [1, 2, 3, 4, 5]), (Rerun.failed, [1, 2, 4]), (Rerun.all, [0, 1, 2, 3, 4, 5])],
)
def test_which_cells_run(rerun: Rerun | None, numbers: list[int]) -> None:
    assert to_run("s", planned(6), found(*STATUSES), rerun) == numbers


def test_a_done_cell_of_another_config_is_refused_with_the_key() -> None:
    other = {"status": "ok", "config": {"steps": 12, "model": {"bias": True}, "old": 1}}
    cells = {0: Found("0_c", {**other, "config_hash": "x"})}
    with pytest.raises(
        ConfigError, match="0_c is done, with another config: steps: 12, now 10; old"
    ):
        to_run("s", planned(1), cells, None)
    assert to_run("s", planned(1), cells, Rerun.all) == [0]


def test_a_cell_that_is_none_of_the_sweep_is_refused() -> None:
    with pytest.raises(ConfigError, match="2_c is no cell of the sweep that is typed"):
        to_run("s", planned(2), found("ok", "ok", "ok"), Rerun.all)


def test_numbers_are_grouped_without_gaps() -> None:
    assert list(contiguous([0, 1, 3, 4, 5, 9])) == [[0, 1], [3, 4, 5], [9]]
    assert list(contiguous([0, 1, 2, 4], 2)) == [[0, 1], [2], [4]]
    assert list(contiguous([])) == []


# The hash


def test_the_hash_knows_neither_order_nor_limits_of_time() -> None:
    one = {"a": 1, "loader": {"workers": 2, "timeout_s": 300}, "watchdog_s": 9}
    two = {"loader": {"timeout_s": 1, "workers": 2}, "a": 1}
    assert config_hash(one) == config_hash(two)
    assert config_hash(one) != config_hash({**one, "a": 2})
    # By hand: echo -n '{"a":1,"loader":{"workers":2}}' | sha256sum
    assert config_hash(one)[:16] == "507088ab6aa77808"


def test_differences_name_keys_that_come_and_go() -> None:
    assert differences({"a": {"b": 1}, "c": None}, {"a": {"b": 2}, "d": "x"}) == [
        "a.b: 1, now 2", "c: null, now not there", 'd: not there, now "x"',
    ]  # fmt: skip
