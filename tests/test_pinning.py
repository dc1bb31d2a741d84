"""Cores of a run: how many, which, and each rank's share."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import make_facts, make_plan_for

from dpexp.errors import ConfigError
from dpexp.pinning import shares, whole_first

CPUS = tuple(range(8))


@pytest.mark.parametrize(
    ("strategy", "devices", "requested", "threads", "each"),
    [
        ("none", 1, None, 1, 1),  # a device is a core
        ("ddp", 4, None, 1, 1),
        ("dp", 4, None, 4, 1),
        ("ddp", 2, 3, 3, 3),
        ("dp", 4, 1, 1, 1),
    ],
)
def test_pinned_runs_have_a_core_for_each_device_or_what_omp_num_threads_says(
    strategy: str, devices: int, requested: int | None, threads: int, each: int
) -> None:
    facts = make_facts(cores=8, cpus=CPUS, requested_threads=requested)
    plan = make_plan_for(strategy, devices, facts=facts, pin=True)
    assert (plan.threads_per_process, plan.threads_per_replica) == (threads, each)
    assert plan.pinned == ()  # nothing is claimed yet


def test_each_rank_has_its_part_of_what_was_claimed() -> None:
    facts = make_facts(cores=8, cpus=CPUS, claimed_cores=(1, 5, 2, 6), requested_threads=2)
    plan = make_plan_for("ddp", 2, facts=facts, pin=True)
    assert plan.pinned == ((1, 5), (2, 6))
    assert plan.cpus() == (1, 5, 2, 6)
    assert shares((3, 4, 5), 1) == ((3, 4, 5),)
    assert shares((), 4) == ()


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"cpus": (0, 1, 2)}, "needs 4 cores and may use 3"),
        ({"cpus": ()}, "cannot keep a process on some cores"),
        ({"cpus": CPUS, "outer_world_size": 4}, "another launcher's"),
        (
            {"cpus": CPUS, "accelerator": "cuda", "num_accelerators": 4, "nccl": True},
            "the device here is cuda",
        ),
    ],
)
def test_pin_is_refused_where_nothing_can_be_pinned(facts: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"pin=true: .*{words}.* Try: .*pin=false"):
        make_plan_for("ddp", 4, facts=make_facts(cores=8, **facts), pin=True)
    make_plan_for("ddp", 4, facts=make_facts(cores=8, **facts))


def test_whole_physical_cores_come_first(tmp_path: Path) -> None:
    for cpu in range(6):
        topology = tmp_path / f"cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 3},{cpu % 3 + 3}\n")
    assert whole_first(range(6), tmp_path) == (0, 1, 2, 3, 4, 5)
    assert whole_first((0, 3, 4), tmp_path) == (0, 4, 3)
    for cpu in range(4):
        (tmp_path / f"cpu{cpu}/topology/thread_siblings_list").write_text(
            f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}\n"
        )
    assert whole_first(range(4), tmp_path) == (0, 2, 1, 3)
    assert whole_first((7, 3, 5), tmp_path / "none") == (3, 5, 7)
