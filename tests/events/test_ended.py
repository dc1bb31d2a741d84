"""Runs that did not come to their end are rows of the HParams tab too."""

from __future__ import annotations

from pathlib import Path

from builders import make_record, make_run_result
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import (
    EXPERIMENT_TAG,
    SESSION_START_INFO_TAG,
    parse_session_start_info_plugin_data,
)

from dpexp.events.ended import record_ended
from dpexp.records import ErrorRecord, RunResult
from dpexp.sinks import TensorBoardSink

ERROR = ErrorRecord("user_error", "RuntimeError", "a | b <b>", traceback="Traceback\n\n  line")


def read(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    accumulator.Reload()
    return accumulator


def status(board: EventAccumulator) -> str:
    content = board.SummaryMetadata(SESSION_START_INFO_TAG).plugin_data.content
    return str(parse_session_start_info_plugin_data(content).hparams["status"].string_value)


def text(board: EventAccumulator, tag: str) -> str:
    (event,) = board.Tensors(f"{tag}/text_summary")
    return str(event.tensor_proto.string_val[0].decode())


def test_a_failed_run_keeps_its_steps_and_gets_its_row_and_error(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.text("config", "    seed: 0")
    sink.write([make_record(0)])
    sink.close()  # as when its process was killed: nothing was finished
    failed = make_run_result(status="failed", error=ERROR, throughput=None)
    record_ended(tmp_path, failed)
    assert len(list(tmp_path.iterdir())) == 1
    board = read(tmp_path)
    assert status(board) == "failed"
    assert EXPERIMENT_TAG not in board.Tags()["tensors"]
    assert "time/step_ms" in board.Tags()["scalars"]
    assert text(board, "config") == "    seed: 0"
    assert text(board, "error") == "    failed: a | b <b>\n    \n    Traceback\n    \n      line"


def test_a_run_that_was_refused_has_a_file_with_its_config_and_its_row(tmp_path: Path) -> None:
    config = {"steps": None, "path": "${nowhere}", "loss": "a|b"}
    record_ended(tmp_path, RunResult("skipped", "none-n2", config, {}, "none", error=ERROR))
    board = read(tmp_path)
    assert status(board) == "skipped"
    assert text(board, "config") == "    steps: null\n    path: ${nowhere}\n    loss: a|b"
    assert board.Tags()["scalars"] == []
