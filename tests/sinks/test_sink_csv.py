"""steps.rank<r>.csv and shapes.csv."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
from builders import make_plan_for, make_record, make_shape

from dpexp.sinks import (
    CsvSink,
    HostCsvSink,
    read_steps,
    step_table,
    steps_of,
    write_shapes,
)

COLUMNS = [
    "step",
    "epoch",
    "warmup",
    "global_rows",
    "rows",
    "step_s",
    "data_s",
    "transfer_s",
    "forward_s",
    "backward_s",
    "optimizer_s",
    "other_s",
    "scatter_s",
    "replicate_s",
    "parallel_apply_s",
    "gather_s",
    "comm_exposed_s",
    "comm_overlapped_s",
    "straggler_wait_s",
    "comm_arrival_s",
    "comm_bytes",
    "bus_bytes_per_s",
    "loss",
    "learning_rate",
    "peak_bytes",
]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "steps.rank0.csv"


def test_the_head_names_every_column_and_one_per_device(path: Path) -> None:
    sink = CsvSink(path, 3)
    heads = path.read_text().splitlines()
    sink.close()
    assert heads == [",".join([*COLUMNS, "replica_0_rows", "replica_1_rows", "replica_2_rows"])]


def test_a_step_without_loss_and_dp_parts_leaves_those_cells_empty(path: Path) -> None:
    sink = CsvSink(path, 1)
    sink.write([make_record(step=7, epoch=1, warmup=True)])
    sink.close()
    assert rows_of(path) == [
        {
            "step": "7",
            "epoch": "1",
            "warmup": "1",
            "global_rows": "30",
            "rows": "30",
            "step_s": "0.02",
            "data_s": "0.001",
            "transfer_s": "0.002",
            "forward_s": "0.005",
            "backward_s": "0.007",
            "optimizer_s": "0.003",
            "other_s": "0.002",
            "scatter_s": "",
            "replicate_s": "",
            "parallel_apply_s": "",
            "gather_s": "",
            "comm_exposed_s": "",
            "comm_overlapped_s": "",
            "straggler_wait_s": "",
            "comm_arrival_s": "",
            "comm_bytes": "",
            "bus_bytes_per_s": "",
            "loss": "",
            "learning_rate": "",
            "peak_bytes": str(64 * 2**20),
            "replica_0_rows": "30",
        }
    ]


def test_a_dp_step_has_its_parts_its_loss_and_the_rows_of_each_device(path: Path) -> None:
    sink = CsvSink(path, 4)
    record = make_record(
        global_rows=9,
        scatter_s=0.0001,
        replicate_s=0.0002,
        parallel_apply_s=0.0003,
        gather_s=0.0004,
        loss=6.0,
        learning_rate=0.1,
        replica_rows=(3, 3, 3, 0),
    )
    sink.write([record])
    sink.close()
    (row,) = rows_of(path)
    parts = [row[f"{part}_s"] for part in ("scatter", "replicate", "parallel_apply", "gather")]
    assert parts == ["0.0001", "0.0002", "0.0003", "0.0004"]
    assert (row["loss"], row["learning_rate"], row["warmup"]) == ("6", "0.1", "0")
    assert [row[f"replica_{i}_rows"] for i in range(4)] == ["3", "3", "3", "0"]


def test_what_the_collectives_of_a_step_cost_is_in_its_row(path: Path) -> None:
    sink = CsvSink(path, 1)
    costs = {
        "comm_exposed_s": 0.0025,
        "comm_overlapped_s": 0.0,
        "straggler_wait_s": 0.125,
        "comm_arrival_s": 1.5e-7,
        "comm_bytes": 2**33 + 1,
        "bus_bytes_per_s": 1.25e9,
    }
    sink.write([make_record(**costs), make_record(**{**costs, "straggler_wait_s": None})])
    sink.close()
    first, second = rows_of(path)
    assert [first[name] for name in costs] == [
        "0.0025", "0", "0.125", "1.5e-07", "8589934593", "1.25e+09",
    ]  # fmt: skip
    assert second["straggler_wait_s"] == ""  # nobody to wait for is not a wait of 0 s


def test_a_step_of_an_emergency_has_its_bytes_and_no_costs(path: Path) -> None:
    """The other ranks may be gone: nobody knows what of it was a wait for them."""
    sink = CsvSink(path, 1)
    known = {"comm_arrival_s": 0.5, "comm_bytes": 520, "learning_rate": 0.1}
    sink.write([make_record(4, **known, comm_exposed_s=None, comm_overlapped_s=None)])
    sink.write([make_record(5, **known, comm_exposed_s=0.25)])
    sink.close()
    first, second = rows_of(path)
    empty = ("comm_exposed_s", "comm_overlapped_s", "straggler_wait_s", "bus_bytes_per_s", "loss")
    assert [first[name] for name in empty] == [""] * 5
    assert [second[name] for name in empty] == ["0.25", "", "", "", ""]
    for row in (first, second):
        assert [row[name] for name in known] == ["0.5", "520", "0.1"]
    assert [row["peak_bytes"] for row in (first, second)] == [str(64 * 2**20)] * 2


def test_steps_with_and_without_a_loss_may_follow_each_other(path: Path) -> None:
    sink = CsvSink(path, 1)
    sink.write([make_record(0, loss=1.5), make_record(1), make_record(2, loss=0.5)])
    sink.close()
    assert [row["loss"] for row in rows_of(path)] == ["1.5", "", "0.5"]


@pytest.mark.parametrize(
    ("loss", "text"),
    [(0.1234567890123, "0.123456789"), (1e-12, "1e-12"), (math.nan, "nan"), (math.inf, "inf")],
)
def test_a_loss_keeps_nine_digits(path: Path, loss: float, text: str) -> None:
    sink = CsvSink(path, 1)
    sink.write([make_record(loss=loss)])
    sink.close()
    assert rows_of(path)[0]["loss"] == text


def test_counters_beyond_32_bits_are_exact(path: Path) -> None:
    sink = CsvSink(path, 1)
    sink.write([make_record(step=16777217, peak_bytes=2**40 + 1)])
    sink.close()
    (row,) = rows_of(path)
    assert (row["step"], row["peak_bytes"]) == ("16777217", "1099511627777")


def test_written_rows_are_in_the_file_before_it_is_closed(path: Path) -> None:
    sink = CsvSink(path, 1)
    sink.write([make_record(0), make_record(1)])
    assert [row["step"] for row in rows_of(path)] == ["0", "1"]
    sink.write([make_record(2)])
    assert [row["step"] for row in rows_of(path)] == ["0", "1", "2"]
    sink.close()


def test_shapes_are_written_one_call_site_a_row(tmp_path: Path) -> None:
    file = tmp_path / "shapes.csv"
    nested = make_shape(module="body.0", replica=1, output_shape='{a: [1], "b|c": ([2], [3])}')
    write_shapes(file, [make_shape(), nested])
    assert rows_of(file) == [
        {
            "module": "",
            "replica": "0",
            "input_shape": "[30, 5]",
            "output_shape": "[30, 2]",
            "count": "3",
            "first_step": "0",
            "last_step": "2",
        },
        {
            "module": "body.0",
            "replica": "1",
            "input_shape": "[30, 5]",
            "output_shape": '{a: [1], "b|c": ([2], [3])}',
            "count": "3",
            "first_step": "0",
            "last_step": "2",
        },
    ]


def test_without_shapes_only_the_head_is_written(tmp_path: Path) -> None:
    write_shapes(tmp_path / "shapes.csv", [])
    assert rows_of(tmp_path / "shapes.csv") == []
    assert (tmp_path / "shapes.csv").read_text().startswith("module,replica,")


def test_the_ranks_of_a_host_share_a_table_with_the_rank_in_front(tmp_path: Path) -> None:
    path = tmp_path / "steps.host3.csv"
    sinks = {rank: HostCsvSink(path, rank) for rank in (24, 25)}
    ranks = {rank: [make_record(step, rows=rank, replica_rows=()) for step in range(3)]
             for rank in sinks}  # fmt: skip
    sinks[24].write(ranks[24][:2])
    sinks[25].write(ranks[25])
    sinks[24].write(ranks[24][2:])
    for sink in sinks.values():
        sink.close()
    assert path.read_text().splitlines()[0] == ",".join(["rank", *COLUMNS])
    assert [row["rank"] for row in rows_of(path)] == ["24", "24", "25", "25", "25", "24"]
    assert list(steps_of(tmp_path, 24)) == ranks[24]
    assert list(steps_of(tmp_path, 25)) == ranks[25]
    assert len(list(read_steps(path))) == 6


def test_the_steps_of_a_rank_come_from_whichever_table_has_them(tmp_path: Path) -> None:
    for host in range(3):
        for rank in (2 * host, 2 * host + 1):
            sink = HostCsvSink(tmp_path / f"steps.host{host}.csv", rank)
            sink.write([make_record(rank, replica_rows=())])
            sink.close()
    assert [record.step for record in steps_of(tmp_path, 4)] == [4]
    assert list(steps_of(tmp_path, 6)) == []
    own = CsvSink(tmp_path / "steps.rank4.csv", 1)
    own.write([make_record(9)])
    own.close()
    assert [record.step for record in steps_of(tmp_path, 4)] == [9]


def test_a_row_of_a_shared_table_that_is_not_whole_is_left_out(tmp_path: Path) -> None:
    """On a file system without locks nobody takes it away (files.py)."""
    path = tmp_path / "steps.host0.csv"
    sink = HostCsvSink(path, 0)
    sink.write([make_record(0, replica_rows=())])
    whole = path.read_text()
    path.write_text(whole + "1,1,0,0,3" + whole.splitlines(keepends=True)[1] + "0,2,0")
    sink.close()
    assert [record.step for record in read_steps(path)] == [0]


@pytest.mark.parametrize(("ranks", "name"), [(64, "steps.rank5.csv"), (65, "steps.host2.csv")])
def test_up_to_64_ranks_each_has_a_table_and_more_have_one_per_host(
    ranks: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = {"RANK": "5", "LOCAL_RANK": "1", "GROUP_RANK": "2", "WORLD_SIZE": str(ranks)}
    told = {"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    with monkeypatch.context() as patch:
        for variable, value in {**launched, **told}.items():
            patch.setenv(variable, value)
        step_table(tmp_path, make_plan_for("ddp", ranks, batch_size=ranks), 5).close()
    assert [path.name for path in tmp_path.iterdir()] == [name]
