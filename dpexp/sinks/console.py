"""Progress on the console: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dpexp.rates import RateMeter
from dpexp.records import StepRecord
from dpexp.sinks.base import Sink
from dpexp.timing import now_s

# Short work needs no progress: nothing is shown before this.
QUIET_S = 1.5
LINE_EVERY_S = 5.0
# What is shown is the rate of so many seconds: a bar that slows down should show it. The run's
# throughput is another figure, and has another name.
LATELY_S = 5.0


@final
class ProgressSink(Sink):
    """The rate of the last seconds and the remaining time, updated at each flush, on stderr."""

    def __init__(self, label: str, total_steps: int | None) -> None:
        self._label = label
        self._total = total_steps
        self._console = Console(stderr=True)
        self._began_s = now_s()
        self._line_s = self._began_s
        self._first: int | None = None  # a run that goes on does not begin with step 0
        self._done = 0
        self._rows = 0
        self._meter = RateMeter(LATELY_S, self._began_s)
        self._bar: Progress | None = None

    def write(self, records: Sequence[StepRecord]) -> None:
        if self._first is None:
            self._first = records[0].step
        self._done = records[-1].step + 1
        self._rows += sum(record.global_rows for record in records)
        at_s = now_s()
        self._meter.read(at_s, self._rows)
        elapsed_s, lately = at_s - self._began_s, self._meter.lately_per_s
        if elapsed_s < QUIET_S or lately is None:
            return
        # Both, since one alone would be taken for the other.
        rate = f"{lately:,.0f} samples/s lately, {self._meter.whole_per_s:,.0f} so far"
        if self._console.is_terminal:
            self._update_bar(rate)
        elif at_s - self._line_s >= LINE_EVERY_S:
            self._line_s = at_s
            of, left = "", ""
            if self._total is not None:  # a stream ends when it ends
                here = self._done - self._first
                left_s = elapsed_s / here * (self._total - self._done)
                of, left = f"/{self._total}", f", {left_s:.0f} s left"
            print(
                f"{self._label}: step {self._done}{of}, {rate}{left}",
                file=self._console.file,
                flush=True,
            )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _update_bar(self, rate: str) -> None:
        if self._bar is None:
            # refreshed here and not by a thread of its own, which would run during steps
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
                console=self._console,
                auto_refresh=False,
                transient=True,
            )
            self._bar.start()
            self._bar.add_task(self._label, total=self._total, rate=rate)
        self._bar.update(self._bar.task_ids[0], completed=self._done, rate=rate)
        self._bar.refresh()
