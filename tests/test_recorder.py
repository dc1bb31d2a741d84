"""From the loop's raw marks to step records."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import FakeComm, ListSink, TickClock, make_plan_for

from dpexp import timing
from dpexp.errors import NonFiniteLossError
from dpexp.recorder import Recorder
from dpexp.records import PHASES, StepRecord
from dpexp.rows import Row
from dpexp.schema import Task
from dpexp.uncertainty import relative_half_width

# Seconds of the six phases of a step, in their order: together 21 s.
MARKS = [100, 101, 103, 106, 110, 115, 121]


class Bench:
    """A recorder with what surrounds it, and a host clock that the test moves."""

    def __init__(
        self,
        strategy: str = "none",
        num_devices: int = 1,
        comm: FakeComm | None = None,
        **config: Any,
    ) -> None:
        self.sink, self.clock = ListSink(), TickClock()
        plan = make_plan_for(strategy, num_devices, **{"warmup_steps": 0, **config})
        self.recorder = Recorder(plan, comm or FakeComm(), self.clock, [self.sink])

    def step(self, number: int, loss: float | None = None, **changes: Any) -> None:
        row = {
            "step": number,
            "epoch": 0,
            "global_rows": 30,
            "rows": 30,
            "marks": MARKS,
            "parts": (),
            "loss": None if loss is None else torch.tensor(loss),
            "learning_rate": None,
            "peak_bytes": 1024,
        }
        self.recorder.add(Row(**{**row, **changes}))

    @property
    def records(self) -> list[StepRecord]:
        return self.sink.records


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pacing clock's time, as the only entry."""
    time = [0.0]
    monkeypatch.setattr(timing, "now_s", lambda: time[0])
    return time


def test_the_phases_are_the_spans_between_the_marks_and_add_up_to_the_step() -> None:
    bench = Bench()
    bench.step(0)
    bench.recorder.flush()
    (record,) = bench.records
    spans = [getattr(record, f"{phase}_s") for phase in PHASES]
    assert spans == [1, 2, 3, 4, 5, 6]
    assert record.step_s == 21
    assert (record.step, record.global_rows, record.rows) == (0, 30, 30)
    assert (record.loss, record.peak_bytes, record.replica_rows) == (None, 1024, (30,))


def test_every_step_of_a_long_run_counts_in_its_figures() -> None:
    bench = Bench()
    for number in range(12_000):  # more than a reader of TensorBoard's files keeps
        bench.step(number, marks=[0, number, number, number, number, number, number])
        if number % 500 == 0:
            bench.recorder.flush()
    bench.recorder.flush()
    timing = bench.recorder.timing()["data"]
    assert (timing.mean_s, timing.count, timing.max_s) == (5999.5, 12_000, 11_999)


def test_without_dps_four_steps_their_times_are_empty() -> None:
    bench = Bench("ddp", 2)
    bench.step(0)
    bench.recorder.flush()
    (record,) = bench.records
    parts = (record.scatter_s, record.replicate_s, record.parallel_apply_s, record.gather_s)
    assert parts == (None, None, None, None)
    assert "gather" not in bench.recorder.timing()


def test_dps_four_steps_are_the_spans_of_their_pairs_of_marks() -> None:
    bench = Bench("dp", 2)
    for step in range(2):
        bench.step(step, parts=((1, 2), (2, 4), (5, 8), (10, 14)))
    bench.recorder.flush()
    for record in bench.records:
        assert (record.scatter_s, record.replicate_s) == (1, 2)
        assert (record.parallel_apply_s, record.gather_s) == (3, 4)
    assert bench.recorder.timing()["gather"].mean_s == 4


@pytest.mark.parametrize(
    ("rows", "replicas"), [(9, (3, 3, 3, 0)), (5, (2, 2, 1, 0)), (3, (1, 1, 1, 0))]
)
def test_the_rows_of_each_device_are_told_and_zero_for_an_idle_one(
    rows: int, replicas: tuple[int, ...]
) -> None:
    bench = Bench("dp", 4)
    bench.step(0, global_rows=rows, rows=rows)
    bench.recorder.flush()
    assert bench.records[0].replica_rows == replicas


def test_the_forwards_and_backwards_of_micro_batches_add_up() -> None:
    # data 1, transfer 2; forward 3 + 5 + 7, backward 4 + 6 + 8; optimizer 9, other 10.
    bench = Bench(accumulate=3, task=Task.train)
    bench.step(0, marks=[0, 1, 3, 6, 10, 15, 21, 28, 36, 45, 55], learning_rate=0.25)
    bench.recorder.flush()
    (record,) = bench.records
    assert [getattr(record, f"{phase}_s") for phase in PHASES] == [1, 2, 15, 18, 9, 10]
    assert (record.step_s, record.learning_rate) == (55, 0.25)


def test_a_short_step_has_fewer_micro_batches_and_loses_no_time() -> None:
    bench = Bench(accumulate=3, task=Task.train)
    bench.step(0, marks=[0, 1, 3, 6, 10, 15, 21, 28, 36, 45, 55])
    bench.step(1, marks=[55, 56, 58, 61, 65, 70, 71], global_rows=1, rows=1)  # as in MARKS
    bench.step(2, marks=[71, 72, 74, 77, 81, 83, 90, 91, 93], global_rows=2, rows=2)
    bench.recorder.flush()
    short, shorter = bench.records[2], bench.records[1]
    assert [getattr(shorter, f"{phase}_s") for phase in PHASES] == [1, 2, 3, 4, 5, 1]
    assert [getattr(short, f"{phase}_s") for phase in PHASES] == [1, 2, 3 + 2, 4 + 7, 1, 2]
    assert [record.step_s for record in bench.records] == [55, 16, 22]
    assert bench.recorder.wall_s == 93


def test_dps_four_steps_add_up_over_the_micro_batches_of_each_step() -> None:
    bench = Bench("dp", 2, accumulate=2, task=Task.train)
    once = ((1, 2), (2, 4), (5, 8), (10, 14))  # 1, 2, 3 and 4 s
    again = ((20, 25), (30, 36), (40, 47), (50, 58))  # 5, 6, 7 and 8 s
    nine, seven = [0, 1, 2, 3, 4, 5, 6, 7, 8], [8, 9, 10, 11, 12, 13, 14]
    bench.step(0, marks=nine, parts=(*once, *again))
    bench.step(1, marks=seven, parts=once, global_rows=1, rows=1)
    bench.recorder.flush()
    found = [(r.scatter_s, r.replicate_s, r.parallel_apply_s, r.gather_s) for r in bench.records]
    assert found == [(6, 8, 10, 12), (1, 2, 3, 4)]
    assert bench.recorder.timing()["gather"].max_s == 12


def test_a_step_that_a_signal_cut_short_is_left_out() -> None:
    bench = Bench(accumulate=2, task=Task.train)
    bench.step(0, marks=[0, 1, 2, 3, 4, 5, 6, 7, 8])
    bench.step(1, marks=[8, 9, 10, 11, 12, 13, 14, 15])  # the last mark is missing
    bench.recorder.flush(together=False)
    assert [record.step for record in bench.records] == [0]


def test_warm_up_steps_are_written_and_flagged_but_not_in_the_statistics() -> None:
    bench = Bench(warmup_steps=2)
    bench.step(0, marks=[0, 100, 200, 300, 400, 500, 600])
    bench.step(1, marks=[0, 100, 200, 300, 400, 500, 600])
    bench.step(2)
    bench.step(3)
    bench.recorder.flush()
    assert [record.warmup for record in bench.records] == [True, True, False, False]
    summary = bench.recorder.timing()["step"]
    assert (summary.mean_s, summary.max_s, summary.count) == (21, 21, 2)
    assert (bench.recorder.steps, bench.recorder.measured_steps) == (4, 2)
    assert (bench.recorder.rows_seen, bench.recorder.measured_global_rows) == (120, 60)
    assert bench.recorder.wall_s == 42


def test_when_all_steps_are_warm_up_the_statistics_are_null() -> None:
    bench = Bench("dp", 2, warmup_steps=5)
    bench.step(0, parts=((1, 2), (2, 4), (5, 8), (10, 14)))
    bench.recorder.flush()
    assert bench.recorder.timing()["step"].mean_s is None
    assert bench.recorder.timing()["gather"].count == 0
    assert bench.recorder.wall_s == 0


def test_statistics_run_over_all_flushes() -> None:
    bench = Bench()
    for step, scale in enumerate((1, 2, 3)):
        bench.step(step, marks=[mark * scale for mark in MARKS])
        bench.recorder.flush()
    summary = bench.recorder.timing()["step"]
    assert (summary.min_s, summary.p50_s, summary.max_s, summary.count) == (21, 42, 63, 3)
    assert [record.step for record in bench.records] == [0, 1, 2]


def test_an_idle_rank_counts_no_rows_but_takes_part() -> None:
    bench = Bench("ddp", 4, comm=FakeComm(3, 4))
    bench.step(0, global_rows=3, rows=0)
    bench.recorder.flush()
    assert (bench.records[0].rows, bench.records[0].global_rows) == (0, 3)
    assert (bench.recorder.rows_seen, bench.recorder.measured_global_rows) == (0, 3)


def test_a_rank_alone_keeps_its_own_loss() -> None:
    bench = Bench()
    bench.step(0, loss=2.0)
    bench.step(1, loss=0.5)
    bench.recorder.flush()
    assert [record.loss for record in bench.records] == [2.0, 0.5]
    assert (bench.recorder.first_loss, bench.recorder.last_loss) == (2.0, 0.5)


def test_the_loss_of_several_ranks_is_the_mean_of_their_weighted_losses() -> None:
    # Rows 0, 1, 2 on rank 0: mean square 5/3, weighed by 3 * 2 / 5 to 2.
    # Rows 3, 4 on rank 1: mean square 12.5, weighed by 2 * 2 / 5 to 10. All five: 30 / 5 = 6.
    bench = Bench("ddp", 2, comm=FakeComm(0, 2, peers_sum=[10.0]))
    bench.step(0, loss=2.0, global_rows=5, rows=3)
    bench.recorder.flush()
    assert bench.records[0].loss == 6.0
    assert bench.recorder.first_loss == 6.0


def test_in_an_emergency_nobody_is_asked_and_a_shared_loss_stays_empty() -> None:
    class Gone(FakeComm):
        def sum_later(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
            raise RuntimeError("Connection closed by peer")

        def highest(self, values: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("Connection closed by peer")

    bench = Bench("ddp", 2, comm=Gone(0, 2))
    bench.step(0, loss=2.0)
    bench.recorder.flush(together=False)
    assert [record.loss for record in bench.records] == [None]


def test_steps_of_a_flush_in_which_a_rank_was_lost_are_written_by_the_next_one() -> None:
    class Lost(FakeComm):
        def sum_later(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
            raise RuntimeError("connection closed by peer")

    bench = Bench("ddp", 2, Lost(world_size=2))
    bench.step(0, loss=3.0)
    bench.step(1, loss=2.0)
    with pytest.raises(RuntimeError, match="closed by peer"):
        bench.recorder.flush()
    assert bench.records == []
    bench.recorder.flush(together=False)
    assert [(record.step, record.loss) for record in bench.records] == [(0, None), (1, None)]
    assert bench.recorder.timing()["step"].count == 2


def test_in_an_emergency_a_rank_alone_still_knows_its_loss() -> None:
    bench = Bench()
    bench.step(0, loss=2.0)
    bench.recorder.flush(together=False)
    assert [record.loss for record in bench.records] == [2.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_loss_is_raised_by_its_step_after_everything_is_written(value: float) -> None:
    bench = Bench()
    for step in range(3):
        bench.step(step, loss=1.0)
    bench.step(3, loss=value)
    bench.step(4, loss=value)
    with pytest.raises(NonFiniteLossError, match="at step 3"):
        bench.recorder.flush()
    assert [record.step for record in bench.records] == [0, 1, 2, 3, 4]


def test_the_device_is_waited_for_once_per_flush() -> None:
    bench = Bench()
    for step in range(10):
        bench.step(step)
    bench.recorder.flush()
    assert bench.clock.settled == 1


def test_a_flush_without_steps_does_nothing() -> None:
    bench = Bench("ddp", 2, comm=FakeComm(0, 2))
    bench.recorder.flush()
    assert (bench.records, bench.clock.settled) == ([], 0)


def test_steps_are_written_once() -> None:
    bench = Bench()
    bench.step(0)
    bench.recorder.flush()
    bench.recorder.flush()
    assert len(bench.records) == 1


def test_the_first_step_is_flushed_at_once() -> None:
    bench = Bench()
    assert not bench.recorder.flush_due()
    bench.step(0)
    assert bench.recorder.flush_due()


@pytest.mark.usefixtures("now")
@pytest.mark.parametrize(
    ("slowest_s", "due"),
    [
        (0.001, 8),  # fast steps: at most twice as many as the last time
        (1.0, 4),  # the aim is a second
        (2.0, 2),
        (100.0, 1),  # never none
    ],
)
def test_the_next_flush_is_due_after_a_second_of_the_slowest_rank(
    slowest_s: float, due: int
) -> None:
    bench = Bench("ddp", 2, comm=FakeComm(0, 2, peers_max=slowest_s))
    for step in range(4):
        bench.step(step)
    bench.recorder.flush()  # 4 steps, that took the slowest rank so long
    taken = 0
    while not bench.recorder.flush_due():
        bench.step(4 + taken)
        taken += 1
    assert taken == due


def test_a_flush_is_paced_by_the_time_since_the_one_before(now: list[float]) -> None:
    now[0] = 1000.0
    bench = Bench()
    for _ in range(2):
        for step in range(4):
            bench.step(step)
        now[0] += 2.0  # 2 steps a second
        bench.recorder.flush()
        bench.step(4)
        assert not bench.recorder.flush_due()
        bench.step(5)
        assert bench.recorder.flush_due()
        bench.recorder.flush()


def test_recording_is_told_apart_and_is_in_no_steps_time(now: list[float]) -> None:
    class SlowSink(ListSink):
        def write(self, records: Any) -> None:
            now[0] += 7.0
            super().write(records)

    sink = SlowSink()
    recorder = Recorder(make_plan_for(warmup_steps=0), FakeComm(), TickClock(), [sink])
    for step in range(2):
        recorder.add(Row(step, 0, 30, 30, list(MARKS), (), None, None, 0))
        recorder.flush()
    assert recorder.recording_s == 14.0
    assert [record.step_s for record in sink.records] == [21, 21]


# Enough steps


def uneven(step: int) -> list[int]:
    """Of 21 and 63 s in turns."""
    return MARKS if step % 2 else [*MARKS[:-1], MARKS[-1] + 42]


def flushed(bench: Bench, steps: int, **changes: Any) -> Bench:
    for step in range(steps):
        bench.step(step, **{"marks": MARKS, **changes})
    bench.recorder.flush()
    return bench


@pytest.mark.parametrize(
    ("until", "steps", "enough"),
    [
        ({"ci": 0.02}, 8, True),  # all steps take as long, and 8 are the fewest that can tell
        ({"ci": 0.02}, 7, False),
        ({"ci": None}, 50, False),
        ({"ci": 0.02, "max_s": 62.0}, 3, True),  # 3 steps of 21 s
        ({"ci": 0.02, "max_s": 64.0}, 3, False),
        ({"ci": None, "max_s": 62.0}, 3, False),
    ],
)
def test_steps_are_enough_when_their_mean_is_known_or_the_time_is_up(
    until: dict[str, Any], steps: int, enough: bool
) -> None:
    until = {"max_s": 1e6, **until}
    assert flushed(Bench(until=until), steps).recorder.enough == enough


def test_warm_up_steps_do_not_count_for_enough() -> None:
    until = {"ci": 0.02, "max_s": 1e6}
    assert not flushed(Bench(until=until, warmup_steps=1), 8).recorder.enough
    assert flushed(Bench(until=until, warmup_steps=1), 9).recorder.enough


def test_steps_that_differ_too_much_are_not_enough() -> None:
    for ci, enough in ((0.01, False), (0.9, True)):
        bench = Bench(until={"ci": ci, "max_s": 1e6})
        for step in range(20):
            bench.step(step, marks=uneven(step))
        bench.recorder.flush()
        assert bench.recorder.enough == enough


def test_rank_zero_decides_for_all_ranks_when_to_end() -> None:
    until = {"ci": 0.02, "max_s": 1e6}
    alone = flushed(Bench("ddp", 2, FakeComm(1, 2), until=until), 20)
    assert not alone.recorder.enough  # however well rank 1 knows its own mean
    told = flushed(Bench("ddp", 2, FakeComm(1, 2, peers_max=1.0), until=until), 1)
    assert told.recorder.enough
    assert flushed(Bench("ddp", 2, FakeComm(0, 2), until=until), 8).recorder.enough


def test_an_emergency_asks_nobody_whether_it_is_enough() -> None:
    bench = Bench("ddp", 2, FakeComm(0, 2), until={"ci": 0.02, "max_s": 1e6})
    for step in range(20):
        bench.step(step)
    bench.recorder.flush(together=False)
    assert not bench.recorder.enough


def test_a_mean_that_is_not_known_well_enough_is_noted_at_the_end() -> None:
    until = {"ci": 0.01, "max_s": 1e6}
    few = flushed(Bench(until=until), 3).recorder
    assert few.end_notes() == (
        "until.ci=0.01 was not reached: the mean step is not known: too few steps",
    )
    rough = Bench(until=until)
    for step in range(20):
        rough.step(step, marks=uneven(step))
    rough.recorder.flush()
    (note,) = rough.recorder.end_notes()
    width = relative_half_width(rough.recorder.step_seconds())
    assert width is not None and width > 0.01
    assert note == f"until.ci=0.01 was not reached: the mean step is known to within {width:.1%}"


def test_nothing_is_noted_where_it_was_reached_or_not_asked_for_and_once_for_all_ranks() -> None:
    until = {"ci": 0.01, "max_s": 1e6}
    assert flushed(Bench(until=until), 8).recorder.end_notes() == ()
    assert flushed(Bench(until={"ci": None}), 3).recorder.end_notes() == ()
    assert flushed(Bench("ddp", 2, FakeComm(1, 2), until=until), 3).recorder.end_notes() == ()


def test_a_pause_counts_for_no_pace(now: list[float]) -> None:
    bench = Bench()
    bench.step(0)
    now[0] += 0.1
    bench.recorder.flush()
    now[0] += 1000.0  # the pause: a calibration, say
    bench.recorder.resume()
    for step in range(2):
        bench.step(step)
    now[0] += 0.1  # 2 steps in 0.1 s: a second is 20, and at most 4 come next
    bench.recorder.flush()
    for step in range(3):
        bench.step(step)
        assert not bench.recorder.flush_due()
    bench.step(3)
    assert bench.recorder.flush_due()
