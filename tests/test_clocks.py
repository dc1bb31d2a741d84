"""How the clocks of several hosts differ."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dpexp import clocks
from dpexp.clocks import closest, machine_id


def test_the_peers_clock_is_compared_with_the_middle_of_question_and_answer() -> None:
    got = closest([(10.0, 107.0, 12.0)])
    assert got.offset_s == pytest.approx(96.0)  # it said 107 when it was about 11 here
    assert got.error_s == pytest.approx(1.0)


def test_the_answer_that_took_least_time_counts() -> None:
    answers = [(0.0, 50.0, 10.0), (20.0, 70.5, 20.5), (30.0, 80.0, 39.0)]
    got = closest(answers)
    assert got.offset_s == pytest.approx(50.25)
    assert got.error_s == pytest.approx(0.25)


def test_a_peer_that_is_behind_has_a_negative_offset() -> None:
    assert closest([(10.0, 3.0, 10.0)]) == (-7.0, 0.0)


@pytest.mark.parametrize("there", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_however_lopsided_the_ways_are_the_offset_is_within_its_error(there: float) -> None:
    """The peer reads its clock, 5 s ahead, after a share of the 2 s."""
    asked, took = 100.0, 2.0
    got = closest([(asked, asked + there * took + 5.0, asked + took)])
    assert abs(got.offset_s - 5.0) <= got.error_s + 1e-12


def test_the_error_holds_for_random_ways() -> None:
    draws = random.Random(0)
    for _ in range(200):
        answers, now = [], 0.0
        for _ in range(16):
            there, back = draws.expovariate(1.0), draws.expovariate(0.3)
            answers.append((now, now + there - 3.0, now + there + back))
            now += there + back
        got = closest(answers)
        assert abs(got.offset_s + 3.0) <= got.error_s + 1e-9
        assert got.error_s == pytest.approx(min(each[2] - each[0] for each in answers) / 2)


def test_a_machine_is_the_boot_of_its_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "boot_id").write_text("1234-abcd\n")
    monkeypatch.setattr(clocks, "_BOOT_ID", tmp_path / "boot_id")
    monkeypatch.setattr(clocks, "_CLOCKS", tmp_path / "none")
    assert machine_id() == "1234-abcd"


def test_containers_with_clocks_of_their_own_are_several_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "clocks").symlink_to("time:[1]")
    monkeypatch.setattr(clocks, "_CLOCKS", tmp_path / "clocks")
    first = machine_id()
    (tmp_path / "clocks").unlink()
    (tmp_path / "clocks").symlink_to("time:[2]")
    assert machine_id() != first


def test_where_the_kernel_does_not_tell_it_is_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clocks, "_BOOT_ID", tmp_path / "nothing")
    monkeypatch.setattr("platform.node", lambda: "box")
    assert machine_id() == "box"
