"""The folder of a run whose ranks an outer launcher starts, perhaps several times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpexp import rounds
from dpexp.rounds import Agent

ONE, OTHER = Agent("aaaa", 1.7e9), Agent("bbbb", 1.7e9 + 3)


def test_the_parent_is_the_agent_and_looks_the_same_each_time() -> None:
    assert rounds.own_agent() == rounds.own_agent()


def test_two_agents_started_at_once_have_two_folders(tmp_path: Path) -> None:
    twin = Agent("cccc", ONE.started_s)
    assert ONE.folder(tmp_path) != twin.folder(tmp_path)
    assert ONE.folder(tmp_path).parent == twin.folder(tmp_path).parent


def test_a_later_round_finds_the_folder_until_the_run_has_ended(tmp_path: Path) -> None:
    folder = ONE.folder(tmp_path)
    assert rounds.known_folder(OTHER, tmp_path) is None
    for agent in (ONE, OTHER):  # the second one's host may be the only one in the next round
        rounds.remember(agent, tmp_path, folder)
        assert rounds.known_folder(agent, tmp_path) == folder
    third = Agent("cccc", 1.7e9)
    rounds.remember(third, tmp_path, third.folder(tmp_path))
    rounds.forget(tmp_path, folder)
    assert rounds.known_folder(OTHER, tmp_path) is None
    assert rounds.known_folder(third, tmp_path) is not None
    rounds.forget(tmp_path, third.folder(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_round_puts_aside_what_the_one_before_has_written(tmp_path: Path) -> None:
    assert rounds.begin(tmp_path, {"aaaa", "bbbb"}, "first") == []
    assert rounds.is_current(tmp_path, "first")
    error = {"rank": 1, "kind": "crash", "type": "SIGKILL", "message": "rank 1", "step": 7}
    (tmp_path / "run.json").write_text(json.dumps({"status": "failed", "error": error}))
    (tmp_path / "steps.rank0.csv").write_text("step\n")
    (tmp_path / "dpexp.log").write_text("a line\n")
    rounds.note_first_step(tmp_path, 50.0)
    (earlier,) = rounds.begin(tmp_path, {"bbbb"}, "second")  # the other host is gone
    assert earlier["error"] == error
    assert (earlier["first_step_s"], earlier["gone_on_from"], earlier["saved_s"]) == (50.0, 0, None)
    assert not (tmp_path / "run.json").exists()
    assert (tmp_path / "earlier" / "attempt-1" / "steps.rank0.csv").is_file()
    assert (tmp_path / "dpexp.log").is_file()
    assert rounds.is_current(tmp_path, "second")
    assert not rounds.is_current(tmp_path, "first")  # a rank that is left of it writes no result


def test_another_launch_neither_owns_the_folder_nor_counts_its_rounds(tmp_path: Path) -> None:
    rounds.begin(tmp_path, {"aaaa"}, "first")
    assert rounds.is_of(tmp_path, {"aaaa", "cccc"})
    assert not rounds.is_of(tmp_path, {"cccc"})
    assert rounds.begin(tmp_path, {"cccc"}, "resumed") == []


def test_lost_is_the_time_from_what_was_kept_to_the_next_first_step() -> None:
    """Saved at 130, gone on at 170; then nothing is saved until the next round goes on at 200."""
    first = {"began_s": 90.0, "first_step_s": 100.0, "gone_on_from": 30, "saved_s": 130.0}
    second = {"began_s": 160.0, "first_step_s": 170.0, "gone_on_from": 30, "saved_s": 130.0}
    error = {"rank": 3, "host": "b", "kind": "crash", "type": "X", "message": "m", "step": 35}
    found = rounds.restarts([{**first, "error": error}, {**second, "error": None}], 200.0)
    assert found is not None
    assert (found["count"], found["lost_s"]) == (2, pytest.approx(40.0 + 30.0))
    assert found["causes"][0] == {**error, "gone_on_from": 30}
    assert found["causes"][1]["kind"] is None
    assert rounds.restarts([], 200.0) is None
