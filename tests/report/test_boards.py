"""A sweep's TensorBoard runs over the number of devices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from test_build_report import at_rate

from dpexp.report.boards import write_boards
from dpexp.report.scaling import Cell, analyse

RUNS = {
    "0_none_n1": at_rate("none", 1, 100.0),
    "1_ddp_n1": at_rate("ddp", 1, 80.0),
    "2_ddp_n2": at_rate("ddp", 2, 160.0),
}
CELLS = analyse({name: run.to_dict() for name, run in RUNS.items()})


def read(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


def banded(cells: list[Cell], folder: Path) -> list[str]:
    write_boards(folder, cells)
    (event,) = read(folder).Tensors("custom_scalars__config__")
    layout = Layout.FromString(event.tensor_proto.string_val[0])
    charts = layout.category[0].chart
    return [series.value for chart in charts for series in chart.margin.series]


def with_interval(cell: Cell) -> Cell:
    return replace(cell, speedup_low=0.5, speedup_high=2.0, speedup_scope="between runs")


def test_the_curves_are_pictures_too(tmp_path: Path) -> None:
    write_boards(tmp_path, CELLS)
    board = read(tmp_path)
    names = {"scaling/samples_per_s", "scaling/speedup", "scaling/efficiency"}
    assert set(board.Tags()["images"]) == names
    assert all(board.Images(name)[0].width > 300 for name in names)


def test_bands_are_for_strategies_whose_speed_ups_all_have_an_interval(tmp_path: Path) -> None:
    none, one, two = CELLS
    assert banded(CELLS, tmp_path / "a") == []
    assert banded([none, one, with_interval(two)], tmp_path / "b") == []
    both = [none, with_interval(one), with_interval(two)]
    assert banded(both, tmp_path / "c") == ["scaling/ddp/speedup"]
    assert "scaling/none/speedup_low" not in read(tmp_path / "c").Tags()["scalars"]


def test_a_band_begins_at_the_baseline_if_that_is_of_its_strategy(tmp_path: Path) -> None:
    _, one, two = CELLS
    base = replace(one, speedup=1.0, baseline=one.folder)
    assert banded([base, with_interval(two)], tmp_path) == ["scaling/ddp/speedup"]
    low = read(tmp_path).Scalars("scaling/ddp/speedup_low")
    assert [(event.step, event.value) for event in low] == [(1, 1.0), (2, 0.5)]


def test_each_setting_has_a_run_of_its_own_and_a_single_count_no_picture(tmp_path: Path) -> None:
    other = [replace(cell, setting="seed=2") for cell in CELLS[:2]]
    write_boards(tmp_path, [*(replace(cell, setting="seed=1") for cell in CELLS), *other])
    assert len(read(tmp_path / "seed=1").Tags()["images"]) == 3
    assert read(tmp_path / "seed=2").Tags()["images"] == []
    assert "scaling/ddp/speedup" in read(tmp_path / "seed=2").Tags()["scalars"]
