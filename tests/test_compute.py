"""FLOPs, MFU, memory by part and the measured peak, against numbers found by hand."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import (
    FakeComm,
    TickClock,
    make_facts,
    make_plan_for,
    make_rank_result,
    make_run_result,
)
from rich.console import Console

import dpexp
from dpexp import compute, peak
from dpexp.anatomy import dissect
from dpexp.anatomy.data import Figure
from dpexp.compute import achieved_flops_per_s, compute_of, flops_facts, mfu, peak_of, rate_facts
from dpexp.peak import devices_of, fastest, measured_peak, peak_note, product_flops, share_of
from dpexp.plan import RunPlan
from dpexp.report.single import print_run
from dpexp.schema import Precision

KNOWN = {"flops_per_step": 6000, "flops_reason": "", "flops_at_least": False}
MLP = ("model=mlp", "model.widths=[5,64,2]", "task=train")
# y = relu(x W1) W2 on 30 rows: two products forward; backward those of both weights and of the
# hidden layer's output, which are 2 * 30 * 5 * 64 and twice 2 * 30 * 64 * 2.
MLP_FLOPS = 2 * 30 * (2 * 5 * 64 + 3 * 64 * 2)


def plan_for(strategy: str = "none", count: int = 1, **more: Any) -> RunPlan:
    measure = {"flops": True, **more.pop("measure", {})}
    return make_plan_for(strategy, count, measure=measure, **more)


def test_a_product_is_a_multiplication_and_an_addition_per_term() -> None:
    assert product_flops(3) == 54


def test_achieved_flops_are_those_of_the_rows_that_were_measured() -> None:
    # 6 000 FLOP for 30 rows; 70 rows in 0.5 s on 2 devices: 14 000 / (0.5 * 2)
    assert achieved_flops_per_s(6000, 30, 70, 0.5, 2) == 14_000.0
    assert mfu(14_000.0, 56_000.0) == 0.25


def test_known_flops_and_a_known_peak_give_an_mfu() -> None:
    told = rate_facts(KNOWN, rows_per_step=30, rows=70, wall_s=0.5, devices=2, peak=(56_000.0, ""))
    assert told == {
        "achieved_flops_per_s_per_device": 14_000.0,
        "peak_flops_per_s_per_device": 56_000.0,
        "mfu": 0.25,
        "mfu_reason": "",
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"work": {**KNOWN, "flops_per_step": None, "flops_reason": "no formula"}}, "no formula"),
        ({"rows": 0}, "no step was measured"),
        ({"wall_s": 0.0}, "no step was measured"),
        ({"peak": (None, "no memory")}, "the peak is not known: no memory"),
    ],
)
def test_what_is_missing_for_an_mfu_is_named(changes: dict[str, Any], reason: str) -> None:
    given: dict[str, Any] = {
        "work": KNOWN,
        "rows_per_step": 30,
        "rows": 70,
        "wall_s": 0.5,
        "devices": 2,
        "peak": (56_000.0, ""),
        **changes,
    }
    told = rate_facts(given.pop("work"), **given)
    assert told["mfu"] is None
    assert reason in told["mfu_reason"]
    assert 0 not in told.values()


def test_flops_that_are_counted_in_part_are_a_lower_bound() -> None:
    work = {**KNOWN, "flops_at_least": True}
    told = rate_facts(work, rows_per_step=30, rows=30, wall_s=1.0, devices=1, peak=(6e4, ""))
    assert (told["mfu"], told["mfu_reason"]) == (0.1, "at least: some FLOPs are not counted")


def test_a_count_of_0_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        step_flops = Figure(0, "no matrix product in it")

    told = flops_facts(Nothing(), "")  # type: ignore[arg-type]
    assert (told["flops_per_step"], told["flops_reason"]) == (None, "no matrix product in it")


def test_the_figures_of_a_rank_come_from_the_plan_and_its_times() -> None:
    plan = plan_for("ddp", 2, measure={"peak_flops_per_device": 1e4})
    done = make_rank_result(wall_s=0.5, measured_global_rows=60, peak_bytes=500)
    ranks = [done, make_rank_result(1, wall_s=0.6)]
    told = compute_of(plan, ranks, peak_of(plan, FakeComm(0, 2)), before_bytes=300)
    # The exercise: 30 rows, one layer 5 -> 2, forward only: 600 FLOP a step, 2 steps, 0.6 s of the
    # slowest rank, 2 devices
    assert told["flops_per_step"] == 600
    assert told["achieved_flops_per_s_per_device"] == pytest.approx(1000.0)
    assert (told["mfu"], told["peak_source"]) == (pytest.approx(0.1), "given")
    memory = told["memory_parts"]
    (device,) = memory["computed"]
    assert device["parts"]["parameters"] == {"value": 48, "note": "", "at_least": False}
    assert memory["measured"]["peak_bytes"] == 500
    assert memory["measured"]["peak_bytes_before_building"] == 300
    json.dumps(told, allow_nan=False)


def test_users_code_that_fails_on_fake_tensors_is_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(_: RunPlan) -> None:
        raise ZeroDivisionError("of mine")

    monkeypatch.setattr("dpexp.anatomy.dissect", broken)
    plan = plan_for(measure={"peak_flops_per_device": 1e4})
    told = compute_of(plan, [make_rank_result()], (1e4, ""), 0)
    assert told["flops_per_step"] is None
    assert told["flops_reason"] == "ZeroDivisionError: of mine"
    assert told["mfu"] is None
    assert told["memory_parts"]["computed"] is None
    assert told["memory_parts"]["computed_reason"] == "ZeroDivisionError: of mine"


class FakeProduct:
    """A device on which a product of a size takes the seconds that are given for it, in turn."""

    def __init__(self, seconds: dict[int, list[float]]) -> None:
        self.seconds, self.size, self.log = seconds, 0, []

    def prepare(self, size: int) -> None:
        self.size = size

    def run(self, count: int) -> list[float]:
        self.start(count)
        return self.finish()

    def start(self, count: int) -> None:
        self.log.append((self.size, count))
        self.count = count

    def finish(self) -> list[float]:
        given = self.seconds[self.size]
        return (given * self.count)[: self.count]


def test_the_fastest_product_of_any_size_counts_and_devices_are_averaged() -> None:
    # 1 000 FLOP: size 5 has 250, size 10 has 2 000
    one = FakeProduct({5: [0.01, 0.005], 10: [0.02, 0.05]})
    two = FakeProduct({5: [0.01], 10: [0.04]})
    # one: 250 / 0.005 = 50 000 and 2 000 / 0.02 = 100 000; two: 25 000 and 50 000
    assert fastest([one, two], [5, 10]) == pytest.approx(75_000.0)
    # With size 5 the slower device takes 0.01 s at best: 6 products fill 0.06 s.
    assert one.log == two.log
    assert [count for size, count in one.log if size == 5] == [1, 3, 6]
    assert [count for size, count in one.log if size == 10] == [1, 3, 3]


def test_sizes_that_take_too_long_are_left_out() -> None:
    slow = FakeProduct({5: [0.1]})
    assert fastest([slow], [5, 10]) == pytest.approx(2500.0)


@pytest.mark.parametrize(
    ("strategy", "count", "cores", "expected"),
    [
        ("none", 1, 4, 1.0),
        ("ddp", 2, 4, 1.0),
        ("dp", 4, 4, 0.25),  # virtual devices share the process
        ("ddp", 8, 4, 0.5),  # 8 threads take turns on 4 cores
        ("ddp", 8, 0, 1.0),  # the cores are not known
    ],
)
def test_a_devices_share_of_what_a_process_shows(
    strategy: str, count: int, cores: int, expected: float
) -> None:
    assert share_of(plan_for(strategy, count), cores) == expected


def test_a_peak_that_is_shared_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "own_cpus", lambda: [0, 1, 2, 3])
    assert peak_note(plan_for("ddp", 4)) == ""
    assert "divided by the emulated devices" in peak_note(plan_for("dp", 2))
    assert "each of 8 threads" in peak_note(plan_for("ddp", 8))


def test_products_are_timed_one_by_one_and_waited_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = TickClock()
    monkeypatch.setattr(peak, "make_clock", lambda device: clock)
    product = peak._Product(torch.device("cpu"), torch.float32)
    product.prepare(4)
    product.start(3)
    assert clock.settled == 0  # an accelerator goes on with the other devices' products
    assert product.finish() == [1.0, 1.0, 1.0]
    assert (clock.settled, clock.ticks) == (1, 4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_peak_is_measured_on_this_machine(precision: str) -> None:
    figure, why = measured_peak(plan_for(precision=Precision(precision)), FakeComm())
    assert why == ""
    assert figure is not None
    assert figure > 1e8  # a thousandth of what a core of today does


def test_a_product_that_fails_is_a_reason_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(products: Any, sizes: Any) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(peak, "fastest", broken)
    plan = plan_for("ddp", 2)
    assert measured_peak(plan, FakeComm(0, 2)) == (None, "there was no memory for it")
    monkeypatch.setattr(peak, "fastest", lambda products, sizes: 5.0)
    assert measured_peak(plan, FakeComm(1, 2, peers_max=1.0)) == (None, "it failed on another rank")


def test_the_mean_over_ranks_is_a_devices_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "fastest", lambda products, sizes: 3e9)
    monkeypatch.setattr(peak, "own_cpus", lambda: [0, 1])
    comm = FakeComm(0, 2, peers_sum=[1e9])
    assert measured_peak(plan_for("ddp", 2, facts=make_facts(2)), comm) == (2e9, "")


def test_real_dp_multiplies_on_all_its_devices() -> None:
    facts = make_facts(accelerator="cuda", num_accelerators=4, nccl=True)
    several = plan_for("dp", 2, facts=facts, device="cuda:1")
    assert [str(device) for device in devices_of(several, 0)] == ["cuda:1", "cuda:2"]
    assert [str(d) for d in devices_of(plan_for("dp", 2), 0)] == ["cpu"]
    ranks = plan_for("ddp", 2, facts=facts, device="cuda")
    assert [str(device) for device in devices_of(ranks, 1)] == ["cuda:1"]


def summary(run: dict[str, Any]) -> str:
    text = StringIO()
    print_run(run, Path("folder"), Console(file=text, width=200))
    return text.getvalue()


def test_the_summary_tells_mfu_and_energy_where_they_are_known() -> None:
    told = {
        "flops_at_least": True,
        "mfu": 0.25,
        "achieved_flops_per_s_per_device": 2.5e9,
        "peak_flops_per_s_per_device": 1e10,
        "peak_source": "given",
    }
    known = make_run_result(compute=told, energy={"per_sample_j": 0.0123}).to_dict()
    line = "MFU at least 25 % (2.5 GFLOP/s of the model per device, given peak 10 GFLOP/s)"
    assert f"{line}; 0.0123 J per sample" in summary(known)
    unknown = make_run_result(compute={"mfu": None}, energy={"per_sample_j": None}).to_dict()
    assert "MFU" not in summary(unknown)
    assert "J per sample" not in summary(unknown)


@pytest.mark.parametrize("spread", [(), ("parallel=ddp", "num_devices=2")])
def test_a_run_counts_its_model_and_changes_nothing_by_it(
    spread: tuple[str, ...], workdir: Path
) -> None:
    options = [*MLP, *spread, "save_weights=true"]
    plain = dpexp.run(options).result
    counted = dpexp.run([*options, "measure.flops=true"]).result
    told = counted.compute
    assert plain.compute is None
    assert told is not None
    assert told["flops_per_step"] == MLP_FLOPS
    assert told["peak_source"] == "measured"
    assert told["mfu"] == pytest.approx(
        told["achieved_flops_per_s_per_device"] / told["peak_flops_per_s_per_device"]
    )
    assert counted.throughput is not None
    # Per row as many FLOPs as in the full step; the last, short step counts by its rows.
    rate = counted.throughput["samples_per_s_per_device"]
    assert rate is not None
    assert told["achieved_flops_per_s_per_device"] == pytest.approx(rate * MLP_FLOPS / 30)
    memory = told["memory_parts"]["measured"]
    assert 0 < memory["peak_bytes_before_building"] <= memory["peak_bytes"]
    assert counted.memory is not None
    assert memory["peak_bytes"] == counted.memory["peak_bytes"][0]
    assert (plain.model, plain.loss) == (counted.model, counted.loss)
    assert plain.samples_seen == counted.samples_seen


def test_the_count_is_that_of_inspect() -> None:
    plan = plan_for()
    assert flops_facts(compute.anatomy_of(plan)[0], "")["flops_per_step"] == (
        dissect(plan).step_flops.value
    )
