"""Speed-up and efficiency over the cells of a sweep."""

from __future__ import annotations

from typing import Any

import pytest

from dpexp.report.scaling import Cell, analyse


def run(
    parallel: str = "none",
    num_devices: int = 1,
    rate: float | None = 100.0,
    status: str = "ok",
    **changes: Any,
) -> dict[str, Any]:
    """What a cell's run.json holds."""
    config = {
        "parallel": {"strategy": parallel},
        "num_devices": num_devices,
        "batch_size": 16,
        "scaling": "strong",
        **changes.pop("config", {}),
    }
    return {
        "schema": 1,
        "status": status,
        "label": f"{parallel}-n{num_devices}",
        "config": config,
        "parallel": parallel,
        "num_devices": num_devices,
        "emulated": parallel == "dp",
        "scaling": config["scaling"],
        "batch": {"global": 16, "per_device": 16 // num_devices},
        "timing": {"step": {"p50_s": 0.125}},
        "throughput": {"samples_per_s": rate},
        "memory": {"peak_bytes": [100, 300]},
        "error": None,
        "notes": ["a note"],
        **changes,
    }


def figures(cells: list[Cell]) -> dict[str, tuple[float | None, float | None, str | None]]:
    return {cell.folder: (cell.speedup, cell.efficiency, cell.baseline) for cell in cells}


def test_a_cell_carries_what_the_tables_show() -> None:
    (cell,) = analyse({"0_dp_n2": run("dp", 2)})
    assert cell == Cell(
        folder="0_dp_n2",
        label="dp-n2",
        parallel="dp",
        num_devices=2,
        setting="",
        status="ok",
        reason=None,
        emulated=True,
        scaling="strong",
        batch_global=16,
        batch_per_device=8,
        step_p50_s=0.125,
        samples_per_s=100.0,
        speedup=1.0,
        efficiency=1.0,
        baseline="0_dp_n2",
        peak_bytes=300,
        notes=("a note",),
        repeats=1,
        folders=("0_dp_n2",),
    )


def test_speed_up_is_the_ratio_of_throughputs_and_efficiency_that_by_devices() -> None:
    cells = analyse(
        {
            "0_none_n1": run("none", 1, 100.0),
            "1_ddp_n2": run("ddp", 2, 150.0),
            "2_ddp_n4": run("ddp", 4, 80.0),
        }
    )
    assert figures(cells) == {
        "0_none_n1": (1.0, 1.0, "0_none_n1"),
        "1_ddp_n2": (1.5, 0.75, "0_none_n1"),
        "2_ddp_n4": (0.8, 0.2, "0_none_n1"),  # slower is reported as slower
    }


def test_the_baseline_is_the_none_cell_wherever_it_stands() -> None:
    cells = analyse({"0_ddp_n1": run("ddp", 1, 50.0), "1_none_n1": run("none", 1, 100.0)})
    assert figures(cells)["0_ddp_n1"] == (0.5, 0.5, "1_none_n1")


def test_without_none_each_strategys_smallest_count_is_its_baseline() -> None:
    cells = analyse(
        {
            "0_ddp_n4": run("ddp", 4, 300.0),
            "1_ddp_n2": run("ddp", 2, 200.0),
            "2_dp_n1": run("dp", 1, 10.0),
        }
    )
    assert figures(cells) == {
        "0_ddp_n4": (1.5, 0.75, "1_ddp_n2"),
        "1_ddp_n2": (1.0, 1.0, "1_ddp_n2"),
        "2_dp_n1": (1.0, 1.0, "2_dp_n1"),
    }


@pytest.mark.parametrize("status", ["failed", "skipped", "interrupted"])
def test_a_cell_that_did_not_end_well_is_no_baseline_and_has_no_figure(status: str) -> None:
    error = {"message": "rank 1 was killed"}
    cells = analyse(
        {
            "0_none_n1": run("none", 1, None, status, error=error, timing=None, throughput=None),
            "1_ddp_n1": run("ddp", 1, 50.0),
            "2_ddp_n2": run("ddp", 2, 75.0),
        }
    )
    assert (cells[0].status, cells[0].reason) == (status, "rank 1 was killed")
    assert (cells[0].samples_per_s, cells[0].speedup, cells[0].step_p50_s) == (None, None, None)
    assert figures(cells)["2_ddp_n2"] == (1.5, 0.75, "1_ddp_n1")


def test_a_cell_whose_steps_were_all_warm_up_is_no_baseline() -> None:
    cells = analyse({"0_none_n1": run(rate=None), "1_ddp_n2": run("ddp", 2, 75.0)})
    assert figures(cells)["1_ddp_n2"] == (1.0, 1.0, "1_ddp_n2")


def test_cells_are_compared_only_when_the_rest_of_their_config_is_the_same() -> None:
    small, large = {"batch_size": 16}, {"batch_size": 64}
    cells = analyse(
        {
            "0_none_n1": run("none", 1, 100.0, config=small),
            "1_none_n1": run("none", 1, 400.0, config=large),
            "2_ddp_n2": run("ddp", 2, 200.0, config=small),
            "3_ddp_n2": run("ddp", 2, 200.0, config=large),
        }
    )
    assert figures(cells)["2_ddp_n2"] == (2.0, 1.0, "0_none_n1")
    assert figures(cells)["3_ddp_n2"] == (0.5, 0.25, "1_none_n1")


def test_strong_and_weak_scaling_have_baselines_of_their_own() -> None:
    cells = analyse(
        {
            "0_none_n1": run("none", 1, 100.0),
            "1_none_n1": run("none", 1, 50.0, config={"scaling": "weak"}),
            "2_ddp_n2": run("ddp", 2, 100.0, config={"scaling": "weak"}),
        }
    )
    assert figures(cells)["2_ddp_n2"] == (2.0, 1.0, "1_none_n1")


def test_options_of_a_strategy_do_not_part_it_from_its_baseline() -> None:
    options = {"parallel": {"strategy": "ddp", "bucket_cap_mb": 25.0}}
    cells = analyse({"0_none_n1": run(), "1_ddp_n2": run("ddp", 2, 150.0, config=options)})
    assert figures(cells)["1_ddp_n2"] == (1.5, 0.75, "0_none_n1")


def test_a_cell_of_which_only_the_error_is_known_is_still_a_cell() -> None:
    bare = {
        "schema": 1,
        "status": "failed",
        "label": "ddp-ntwo",
        "config": {},
        "parallel": "ddp",
        "num_devices": None,
        "error": {"message": "num_devices='two': is not a number of devices."},
    }
    (cell,) = analyse({"0_ddp_ntwo": bare})
    assert (cell.num_devices, cell.samples_per_s, cell.peak_bytes) == (None, None, None)
    assert cell.reason is not None
    assert "two" in cell.reason


# Repeats


def repeated(parallel: str, num_devices: int, *rates: float | None) -> list[dict[str, Any]]:
    """Runs of one second each, or failed ones."""
    made = []
    for repeat, rate in enumerate(rates):
        config = {"repeat": repeat, "repeats": len(rates)}
        throughput = {"samples_per_s": rate, "samples_measured": rate, "wall_s": 1.0}
        changes: dict[str, Any] = {"throughput": throughput, "steps": {"measured": 10}}
        if rate is None:
            error = {"message": f"lost in {repeat}\nmore"}
            changes = {"status": "failed", "error": error, "throughput": None}
        made.append(run(parallel, num_devices, config=config, **changes))
    return made


def interleaved_sweep(**cells: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The runs of cells with equally many repeats, round by round."""
    rounds = zip(*cells.values(), strict=True)
    runs = [each for one_round in rounds for each in one_round]
    return {f"{n}_{r['parallel']}_n{r['num_devices']}": r for n, r in enumerate(runs)}


def test_repeats_are_one_row_whose_figures_are_those_of_all_of_them() -> None:
    cells = analyse(
        interleaved_sweep(
            ddp=repeated("ddp", 2, 190.0, 200.0, 210.0),
            none=repeated("none", 1, 98.0, 100.0, 102.0),
        )
    )
    base, cell = cells
    assert base.folders == ("1_none_n1", "3_none_n1", "5_none_n1")
    assert (base.folder, base.repeats, base.samples_per_s) == ("1_none_n1", 3, 100.0)
    assert (base.speedup, base.speedup_low, base.verdict) == (1.0, None, None)
    assert base.step_mean_s == pytest.approx(0.1)
    assert base.noise_floor is not None
    assert (cell.folder, cell.baseline, cell.samples_per_s) == ("0_ddp_n2", "1_none_n1", 200.0)
    assert (cell.speedup, cell.efficiency) == (2.0, 1.0)
    assert cell.speedup_low is not None and cell.speedup_high is not None
    assert 1.6 < cell.speedup_low < 2.0 < cell.speedup_high < 2.5
    assert cell.efficiency_low == pytest.approx(cell.speedup_low / 2)
    assert (cell.interval_scope, cell.speedup_scope) == ("3 repeats", "3 repeats")
    assert (cell.verdict, cell.status, cell.failures) == ("faster", "ok", ())


def test_a_failed_repeat_is_told_and_the_others_count() -> None:
    (base, cell) = analyse(
        interleaved_sweep(
            none=repeated("none", 1, 98.0, 100.0, 102.0),
            ddp=repeated("ddp", 2, None, 200.0, 210.0),
        )
    )
    assert (cell.folder, cell.repeats, cell.status) == ("3_ddp_n2", 2, "failed")
    assert cell.samples_per_s == 205.0
    assert (cell.speedup, cell.speedup_scope) == (2.05, "2 repeats")
    assert cell.failures == ("1_ddp_n2: failed: lost in 0\nmore",)
    assert base.status == "ok"


def test_a_cell_of_which_every_repeat_failed_has_all_reasons_and_no_figure() -> None:
    (cell,) = analyse(interleaved_sweep(ddp=repeated("ddp", 2, None, None)))
    assert (cell.folder, cell.repeats, cell.samples_per_s) == ("0_ddp_n2", 0, None)
    assert [line.partition("\n")[0] for line in cell.failures] == [
        "0_ddp_n2: failed: lost in 0",
        "1_ddp_n2: failed: lost in 1",
    ]


def test_a_skipped_cell_is_told_once() -> None:
    runs = interleaved_sweep(none=repeated("none", 2, None, None))
    for each in runs.values():
        each |= {"status": "skipped", "error": {"message": "one device"}}
    (cell,) = analyse(runs)
    assert (cell.status, cell.failures) == ("skipped", ("0_none_n2: skipped: one device",))


def test_a_configuration_typed_twice_is_compared_with_itself() -> None:
    same = interleaved_sweep(
        a=repeated("none", 1, 98.0, 100.0, 102.0), b=repeated("none", 1, 99.0, 101.0, 103.0)
    )
    (base, cell) = analyse(same)
    assert (base.folder, cell.folder, cell.baseline) == ("0_none_n1", "1_none_n1", "0_none_n1")
    assert cell.verdict == "no measurable difference"


# Cells whose steps are not those of a single device

BROKEN = {"verdict": "fail", "reason": "losses differ"}


def test_a_cell_that_failed_parity_has_a_rate_but_no_speed_up() -> None:
    cells = analyse({"0_none_n1": run(), "1_ddp_n2": run("ddp", 2, 180.0, parity=BROKEN)})
    assert figures(cells)["1_ddp_n2"] == (None, None, "0_none_n1")
    assert cells[1].samples_per_s == 180.0
    assert cells[1].reason == "parity failed: losses differ"


WENT_ON = {"gone_on_from": 20}
AGAIN = {"count": 1, "causes": [], "lost_s": 2.5}


def test_a_cell_that_did_not_run_in_one_go_has_no_speed_up_and_is_no_baseline() -> None:
    cells = analyse(
        {
            "0_none_n1": run(checkpoint=WENT_ON),
            "1_ddp_n1": run("ddp", 1, 50.0, checkpoint={"gone_on_from": None}),
            "2_ddp_n2": run("ddp", 2, 75.0, restarts=AGAIN, checkpoint=WENT_ON),
        }
    )
    assert figures(cells) == {
        "0_none_n1": (None, None, None),
        "1_ddp_n1": (1.0, 1.0, "1_ddp_n1"),
        "2_ddp_n2": (None, None, "1_ddp_n1"),
    }
    assert [cell.steady for cell in cells] == [False, True, False]
    assert cells[0].reason == "went on from a checkpoint after 20 steps"
    assert cells[2].reason == "started again 1 time after a rank was lost, 2.5 s lost"


def test_of_repeats_those_that_did_not_run_in_one_go_are_left_out_of_the_rate() -> None:
    first, second = (
        run(rate=rate, config={"repeat": k, "repeats": 2}) for k, rate in enumerate((100.0, 40.0))
    )
    cells = analyse({"0_none_n1": first, "1_none_n1": {**second, "checkpoint": WENT_ON}})
    assert [(cell.repeats, cell.samples_per_s, cell.speedup) for cell in cells] == [(2, 100.0, 1.0)]
    assert cells[0].steady


def test_a_cell_that_failed_parity_is_no_baseline() -> None:
    cells = analyse(
        {
            "0_none_n1": run(parity=BROKEN),
            "1_ddp_n1": run("ddp", 1, 50.0, parity={"verdict": "pass"}),
            "2_ddp_n2": run("ddp", 2, 75.0, parity={"verdict": "unknown"}),
            "3_dp_n2": run("dp", 2, 75.0, parity=BROKEN),
        }
    )
    assert figures(cells) == {
        "0_none_n1": (None, None, None),
        "1_ddp_n1": (1.0, 1.0, "1_ddp_n1"),
        "2_ddp_n2": (1.5, 0.75, "1_ddp_n1"),
        "3_dp_n2": (None, None, None),
    }
