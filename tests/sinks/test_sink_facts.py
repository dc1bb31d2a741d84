"""What trackers are given of a run."""

from __future__ import annotations

from pathlib import Path

from builders import make_record, make_run_result

from dpexp.records import ErrorRecord, run_result_from
from dpexp.sinks import CsvSink, FinishedRun, read_steps
from dpexp.sinks.facts import Thinned, artifacts, tags


def finished(folder: Path, sweep: Path | None = None, **overrides: object) -> FinishedRun:
    return FinishedRun(folder, make_run_result("dp", 2, **overrides), sweep, begin_s=100.0)


def test_the_first_thousand_steps_are_taken_then_some_and_the_last(tmp_path: Path) -> None:
    thinned = Thinned(finished(tmp_path))
    records = [make_record(step, step_s=0.125) for step in range(1006)]
    # From step 1000 on an eighth of a second each: every second one is a quarter after the last.
    taken = [*thinned.take(records[:3]), *thinned.take(records[3:])]
    assert [record.step for record, _ in taken] == [*range(1000), 1001, 1003, 1005]
    assert taken[0][1] == 100.125
    assert taken[-1][1] == thinned.end_s == 100 + 1006 / 8
    assert list(thinned.rest()) == []
    assert list(thinned.take([make_record(1006, step_s=0.125)])) == []
    ((left, at_s),) = thinned.rest()
    assert (left.step, at_s, thinned.last_step) == (1006, 100 + 1007 / 8, 1006)


def test_tags_say_that_a_run_is_emulated_what_was_injected_and_why_it_failed(
    tmp_path: Path,
) -> None:
    error = ErrorRecord("oom", "RuntimeError", "too large", rank=1)
    run = finished(
        tmp_path / "all/1", tmp_path / "all", status="failed", error=error, injected=["a", "b"]
    )
    assert tags(run) == {
        "label": "dp-n2",
        "strategy": "dp",
        "status": "failed",
        "emulated": "true",
        "repeat": "0",
        "folder": str(tmp_path / "all/1"),
        "sweep": str(tmp_path / "all"),
        "injected": "a; b",
        "error": "oom: RuntimeError: too large",
    }
    assert {"sweep", "injected", "error"}.isdisjoint(tags(finished(tmp_path)))


def test_only_files_that_are_there_are_artifacts(tmp_path: Path) -> None:
    (tmp_path / "run.json").touch()
    (tmp_path / "weights.pt").touch()
    assert artifacts(finished(tmp_path)) == [tmp_path / "run.json"]


def test_a_table_of_steps_reads_back_as_it_was_written(tmp_path: Path) -> None:
    records = [
        make_record(0, warmup=True, replica_rows=(15, 15), comm_bytes=48, comm_exposed_s=0.25),
        make_record(1, replica_rows=(30, 0), loss=1.5, scatter_s=0.5, learning_rate=0.01),
        make_record(2, replica_rows=(8, 7), loss=float("nan")),
    ]
    sink = CsvSink(tmp_path / "steps.csv", 2)
    sink.write(records)
    sink.close()
    first, second, third = read_steps(tmp_path / "steps.csv")
    assert (first, second) == (records[0], records[1])
    assert (first.warmup, second.warmup) == (True, False)
    assert third.loss != third.loss  # NaN


def test_a_result_reads_back_as_it_was_written(tmp_path: Path) -> None:
    error = ErrorRecord("crash", "SIGKILL", "gone", rank=1, step=2)
    result = make_run_result("ddp", 2, status="failed", error=error)
    assert run_result_from({**result.to_dict(), "of_later": 1}) == result
