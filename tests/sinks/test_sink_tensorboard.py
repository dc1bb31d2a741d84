"""The event file, read back with TensorBoard's own reader."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import make_plan_for, make_rank_result, make_record, make_run_result, make_shape
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.hparams.metadata import (
    EXPERIMENT_TAG,
    PLUGIN_NAME,
    SESSION_START_INFO_TAG,
    parse_experiment_plugin_data,
    parse_session_start_info_plugin_data,
)

from dpexp.events.file import code_block
from dpexp.records import COMM_PARTS, DP_PARTS
from dpexp.results import assemble
from dpexp.sinks import TensorBoardSink
from dpexp.sinks.tensorboard import shapes_table


@pytest.fixture
def sink(tmp_path: Path) -> Iterator[TensorBoardSink]:
    made = TensorBoardSink(tmp_path)
    yield made
    made.close()


def read(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """(step, value) of one tag; the reader turns scalars into tensors."""
    events = read(folder)
    if tag in events.Tags()["scalars"]:
        return [(event.step, event.value) for event in events.Scalars(tag)]
    return [(event.step, event.tensor_proto.float_val[0]) for event in events.Tensors(tag)]


def tags(folder: Path) -> set[str]:
    """Of what is written step by step."""
    found = read(folder).Tags()
    return {*found["scalars"], *found["tensors"]} - {"custom_scalars__config__"}


def text(folder: Path, tag: str) -> str:
    (event,) = read(folder).Tensors(f"{tag}/text_summary")
    return str(event.tensor_proto.string_val[0].decode())


def events_with_values(folder: Path) -> list[Any]:
    """But for the layout, which is written before the first step."""
    (file,) = folder.glob("events.out.tfevents.*")
    found = [event for event in EventFileLoader(str(file)).Load() if event.HasField("summary")]
    assert found[0].summary.value[0].tag == "custom_scalars__config__"
    return found[1:]


def test_a_forward_step_has_a_scalar_per_phase_and_no_loss(
    sink: TensorBoardSink, tmp_path: Path
) -> None:
    sink.write([make_record(0, global_rows=30, step_s=0.020)])
    assert tags(tmp_path) == {
        "time/step_ms",
        "time/data_ms",
        "time/transfer_ms",
        "time/forward_ms",
        "time/backward_ms",
        "time/optimizer_ms",
        "time/other_ms",
        "throughput/samples_per_s",
        "memory/peak_mib",
        "shape/global_rows",
        "shape/replica_0_rows",
    }
    assert scalars(tmp_path, "time/step_ms") == [(0, pytest.approx(20.0))]
    assert scalars(tmp_path, "time/forward_ms") == [(0, pytest.approx(5.0))]
    assert scalars(tmp_path, "throughput/samples_per_s") == [(0, pytest.approx(1500.0))]
    assert scalars(tmp_path, "memory/peak_mib") == [(0, 64.0)]


def test_a_dp_training_step_also_has_its_parts_its_loss_and_each_devices_rows(
    sink: TensorBoardSink, tmp_path: Path
) -> None:
    record = make_record(
        0,
        global_rows=9,
        loss=6.0,
        learning_rate=0.25,
        scatter_s=0.001,
        replicate_s=0.002,
        parallel_apply_s=0.003,
        gather_s=0.004,
        replica_rows=(3, 3, 3, 0),
    )
    sink.write([record])
    assert scalars(tmp_path, "loss/train") == [(0, 6.0)]
    assert scalars(tmp_path, "optimizer/learning_rate") == [(0, 0.25)]
    assert scalars(tmp_path, "time/parallel_apply_ms") == [(0, pytest.approx(3.0))]
    assert scalars(tmp_path, "time/gather_ms") == [(0, pytest.approx(4.0))]
    rows = [scalars(tmp_path, f"shape/replica_{replica}_rows") for replica in range(4)]
    assert rows == [[(0, 3.0)], [(0, 3.0)], [(0, 3.0)], [(0, 0.0)]]


def test_what_collectives_cost_has_scalars_in_milliseconds_bytes_and_gigabytes_a_second(
    sink: TensorBoardSink, tmp_path: Path
) -> None:
    costs = {"comm_exposed_s": 0.002, "comm_overlapped_s": 0.0, "comm_bytes": 4096}
    sink.write(
        [
            make_record(0, **costs, straggler_wait_s=0.5, bus_bytes_per_s=2.5e9),
            make_record(1, **costs),  # one rank only; too short for the clock
        ]
    )
    assert scalars(tmp_path, "time/comm_exposed_ms") == [
        (0, pytest.approx(2)),
        (1, pytest.approx(2)),
    ]
    assert scalars(tmp_path, "time/comm_overlapped_ms") == [(0, 0.0), (1, 0.0)]
    assert scalars(tmp_path, "comm/bytes_per_step") == [(0, 4096.0), (1, 4096.0)]
    assert scalars(tmp_path, "time/straggler_wait_ms") == [(0, pytest.approx(500))]
    assert scalars(tmp_path, "comm/bus_gb_per_s") == [(0, pytest.approx(2.5))]


def test_one_event_carries_all_scalars_of_a_step_and_steps_increase(
    sink: TensorBoardSink, tmp_path: Path
) -> None:
    sink.write([make_record(step) for step in range(3)])
    sink.write([make_record(step) for step in range(3, 5)])
    events = events_with_values(tmp_path)
    assert [event.step for event in events] == [0, 1, 2, 3, 4]
    assert [len(event.summary.value) for event in events] == [11] * 5


def test_written_steps_can_be_read_before_the_file_is_closed(
    sink: TensorBoardSink, tmp_path: Path
) -> None:
    sink.write([make_record(0)])
    assert len(events_with_values(tmp_path)) == 1


def test_the_first_thousand_steps_are_all_written(sink: TensorBoardSink, tmp_path: Path) -> None:
    sink.write([make_record(step, step_s=1e-6) for step in range(1000)])
    assert len(events_with_values(tmp_path)) == 1000


def test_beyond_a_thousand_steps_there_is_an_event_per_quarter_second_and_the_last(
    sink: TensorBoardSink, tmp_path: Path
) -> None:
    # A power of two, so that sums of times are exact: 32 steps are a quarter of a second.
    for start in range(0, 1200, 100):  # thinning does not depend on the flushes
        sink.write([make_record(step, step_s=2.0**-7) for step in range(start, start + 100)])
    sink.finish(make_run_result(), [])
    steps = [step for step, _ in scalars(tmp_path, "time/step_ms")]
    assert steps[:1000] == list(range(1000))
    assert steps[1000:] == [1031, 1063, 1095, 1127, 1159, 1191, 1199]


def test_long_steps_are_all_written_beyond_a_thousand_too(
    sink: TensorBoardSink, tmp_path: Path
) -> None:
    sink.write([make_record(step, step_s=0.5) for step in range(999, 1010)])
    sink.finish(make_run_result(), [])
    assert [step for step, _ in scalars(tmp_path, "time/step_ms")] == list(range(999, 1010))


def test_the_file_begins_with_the_version_that_readers_ask_for(
    sink: TensorBoardSink, tmp_path: Path
) -> None:
    sink.write([make_record(0)])
    (file,) = tmp_path.iterdir()
    first = next(iter(EventFileLoader(str(file)).Load()))
    assert (first.file_version, first.HasField("summary")) == ("brain.Event:2", False)


def test_a_non_finite_loss_is_kept_as_it_is(sink: TensorBoardSink, tmp_path: Path) -> None:
    sink.write([make_record(0, loss=1.0), make_record(1, loss=math.nan)])
    (first, second) = scalars(tmp_path, "loss/train")
    assert first == (0, 1.0)
    assert math.isnan(second[1])


def test_a_whole_run_is_one_event_file(sink: TensorBoardSink, tmp_path: Path) -> None:
    sink.text("config", "    a: 1")
    sink.write([make_record(0)])
    sink.finish(make_run_result(), [make_shape()])
    sink.close()
    assert [path.is_file() for path in tmp_path.iterdir()] == [True]
    assert next(tmp_path.iterdir()).name.startswith("events.out.tfevents.")


@pytest.mark.parametrize("strategy", ["none", "dp", "ddp"])
def test_every_metric_of_the_hparams_record_is_a_finite_scalar_of_the_run(
    sink: TensorBoardSink, tmp_path: Path, strategy: str
) -> None:
    sink.write([make_record(step) for step in range(4)])
    sink.finish(make_run_result(strategy, 1), [])
    content = read(tmp_path).SummaryMetadata(EXPERIMENT_TAG).plugin_data.content
    metrics = {info.name.tag for info in parse_experiment_plugin_data(content).metric_infos}
    assert metrics == {"summary/samples_per_s", "summary/step_p50_ms", "summary/step_p95_ms"}
    for metric in metrics:
        ((step, value),) = scalars(tmp_path, metric)
        assert step == 3
        assert math.isfinite(value)


def test_the_summary_has_the_figures_of_the_measured_steps(
    sink: TensorBoardSink, tmp_path: Path
) -> None:
    sink.write([make_record(0)])
    rank = make_rank_result(measured_global_rows=70, wall_s=0.5)  # steps of 125 ms
    sink.finish(assemble(make_plan_for(), {}, [rank]), [])
    assert scalars(tmp_path, "summary/samples_per_s") == [(0, pytest.approx(140.0))]
    assert scalars(tmp_path, "summary/step_p50_ms") == [(0, pytest.approx(125.0))]


def test_the_metric_of_an_evaluation_is_a_scalar_of_the_run_under_its_name(
    sink: TensorBoardSink, tmp_path: Path
) -> None:
    metric = {"name": "accuracy", "value": 0.75, "samples": 100}
    sink.write([make_record(0)])
    sink.finish(make_run_result(metric=metric), [])
    assert scalars(tmp_path, "metric/accuracy") == [(0, 0.75)]
    content = read(tmp_path).SummaryMetadata(EXPERIMENT_TAG).plugin_data.content
    metrics = {info.name.tag for info in parse_experiment_plugin_data(content).metric_infos}
    assert "metric/accuracy" in metrics


def test_a_run_without_measured_steps_has_no_metrics_and_still_its_hparams(
    sink: TensorBoardSink, tmp_path: Path
) -> None:
    sink.write([make_record(0, warmup=True)])
    sink.finish(make_run_result(timing={}, throughput={"samples_per_s": None}), [])
    metadata = read(tmp_path).SummaryMetadata(SESSION_START_INFO_TAG)
    assert metadata.plugin_data.plugin_name == PLUGIN_NAME
    assert not {tag for tag in tags(tmp_path) if tag.startswith("summary/")}


def test_the_hparams_record_tells_config_and_plan(sink: TensorBoardSink, tmp_path: Path) -> None:
    sink.finish(make_run_result("dp", 3), [])
    content = read(tmp_path).SummaryMetadata(SESSION_START_INFO_TAG).plugin_data.content
    row = parse_session_start_info_plugin_data(content).hparams
    assert row["parallel"].string_value == "dp"
    assert row["num_devices"].number_value == 3
    assert row["batch_size_global"].number_value == 30
    assert row["batch_size_per_device"].number_value == 10
    assert row["threads_per_process"].number_value == 4
    assert row["emulated"].bool_value is True
    assert row["optimizer.lr"].number_value == pytest.approx(0.01)


def test_a_training_step_of_dp_on_eight_devices_has_at_most_thirty_tags(
    sink: TensorBoardSink, tmp_path: Path
) -> None:
    parts = {f"{part}_s": 0.001 for part in (*DP_PARTS, *COMM_PARTS) if part != "straggler_wait"}
    rest = {"comm_bytes": 9, "bus_bytes_per_s": 1.0, "loss": 1.0, "learning_rate": 0.1}
    sink.write([make_record(0, **parts, **rest, replica_rows=(4,) * 8)])
    sink.finish(make_run_result("dp", 8), [])
    found = read(tmp_path).Tags()["scalars"]
    assert len(found) == 30
    assert {f"shape/replica_{replica}_rows" for replica in range(8)} < set(found)


def test_a_text_is_stored_as_it_was_given(sink: TensorBoardSink, tmp_path: Path) -> None:
    sink.text("config", code_block("seed: 0\n\nloss: a|b\n"))
    sink.write([])
    assert text(tmp_path, "config") == "    seed: 0\n    \n    loss: a|b"


def test_the_shapes_of_a_run_are_a_text_of_it(sink: TensorBoardSink, tmp_path: Path) -> None:
    sink.finish(make_run_result(), [make_shape(module="body", count=7)])
    assert text(tmp_path, "shapes").splitlines()[2] == (
        "| body | 0 | [30, 5] | [30, 2] | 7 | 0–2 |"
    )


def test_a_bar_inside_a_value_does_not_break_the_shapes_table() -> None:
    table = shapes_table([make_shape(input_shape="{a|b: [1]}"), make_shape(module="x|y")])
    head, rule, first, second = table.splitlines()
    for line in (head, rule, first, second):
        assert line.replace("\\|", "").count("|") == 7
    assert "{a\\|b: [1]}" in first
    assert "x\\|y" in second


def test_the_model_itself_has_a_name_in_the_shapes_table() -> None:
    assert shapes_table([make_shape()]).splitlines()[2].startswith("| (model) | 0 |")
