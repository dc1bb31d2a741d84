"""Progress on the console."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from builders import make_record

from dpexp.sinks import ProgressSink, console

Now = Callable[[float], None]

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Now:
    """Sets the clock that paces the progress."""
    time = [100.0]
    monkeypatch.setattr(console, "now_s", lambda: time[0])

    def set_to(seconds_since_begin: float) -> None:
        time[0] = 100.0 + seconds_since_begin

    return set_to


@pytest.fixture
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")


@pytest.mark.usefixtures("no_terminal")
def test_short_work_shows_nothing(at: Now, capsys: pytest.CaptureFixture[str]) -> None:
    sink = ProgressSink("none-n1", 100)
    at(1.4)
    sink.write([make_record(step) for step in range(50)])
    sink.close()
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


@pytest.mark.usefixtures("no_terminal")
def test_long_work_is_a_line_now_and_then_on_stderr(
    at: Now, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = ProgressSink("ddp-n2", 40)
    for seconds in range(1, 13):
        at(float(seconds))
        sink.write([make_record(seconds - 1, global_rows=30)])
    sink.close()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "ddp-n2: step 5/40, 30 samples/s lately, 30 so far, 35 s left",
        "ddp-n2: step 10/40, 30 samples/s lately, 30 so far, 30 s left",
    ]


@pytest.mark.usefixtures("no_terminal")
def test_the_rate_is_that_of_the_last_seconds_and_says_so(
    at: Now, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = ProgressSink("none-n1", 40)
    for seconds in (1, 2, 3, 4, 5):
        at(float(seconds))
        sink.write([make_record(seconds - 1, global_rows=30)])
    at(10.0)  # the sixth step took 5 seconds
    sink.write([make_record(5, global_rows=30)])
    sink.close()
    assert capsys.readouterr().err.splitlines() == [
        "none-n1: step 5/40, 30 samples/s lately, 30 so far, 35 s left",
        "none-n1: step 6/40, 6 samples/s lately, 18 so far, 57 s left",
    ]


@pytest.mark.usefixtures("no_terminal")
def test_where_the_number_of_steps_is_not_known_no_end_is_promised(
    at: Now, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = ProgressSink("ddp-n2", None)
    at(6.0)
    sink.write([make_record(step, global_rows=30) for step in range(4)])
    sink.close()
    assert capsys.readouterr().err == "ddp-n2: step 4, 20 samples/s lately, 20 so far\n"


@pytest.mark.usefixtures("terminal")
def test_a_bar_shows_what_is_done_where_the_number_of_steps_is_not_known(
    at: Now, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = ProgressSink("dp-n3", None)
    at(2.0)
    sink.write([make_record(step, global_rows=30) for step in range(4)])
    sink.close()
    shown = capsys.readouterr().err
    assert "4/?" in shown
    assert "60 samples/s lately, 60 so far" in shown


@pytest.mark.usefixtures("terminal")
def test_on_a_terminal_it_is_a_bar_with_label_count_and_rate(
    at: Now, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = ProgressSink("dp-n3", 8)
    at(2.0)
    sink.write([make_record(step, global_rows=30) for step in range(4)])
    sink.close()
    shown = capsys.readouterr().err
    assert "dp-n3" in shown
    assert "4/8" in shown
    assert "60 samples/s lately, 60 so far" in shown
    assert shown.rindex(SHOW_CURSOR) > shown.rindex(HIDE_CURSOR)


@pytest.mark.usefixtures("terminal")
def test_on_a_terminal_short_work_shows_nothing_either(
    at: Now, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = ProgressSink("dp-n3", 8)
    at(1.4)
    sink.write([make_record(0)])
    sink.close()
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("terminal")
def test_the_bar_has_no_thread_that_would_run_during_steps(at: Now) -> None:
    before = threading.active_count()
    sink = ProgressSink("dp-n3", 8)
    at(2.0)
    sink.write([make_record(0)])
    during = threading.active_count()
    sink.close()
    assert during == before
