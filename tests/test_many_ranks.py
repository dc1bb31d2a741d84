"""Real runs with more ranks than files are made for: the limit is lowered to two."""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from pathlib import Path

import pytest

import dpexp
from dpexp import plan, server
from dpexp.launch import _last_words
from dpexp.publish import finished
from dpexp.rank import LAST_WORDS
from dpexp.sinks import steps_of

RANKS = 3
SPREAD = ("parallel=ddp", f"num_devices={RANKS}", "task=train", "epochs=2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dpexp.Run]:
    """One that goes well, and one whose rank 1 dies in step 3."""
    server.start(several_ranks=True)
    disturbed = ("inject.die_rank=1", "inject.at_step=3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "MOST_RANK_FILES", RANKS - 1)
        return {
            name: dpexp.run([*SPREAD, *more], folder=tmp_path_factory.mktemp("run"))
            for name, more in {"ok": (), "lost": disturbed}.items()
        }


def test_a_run_makes_one_table_for_its_host_and_nothing_else_per_rank(
    runs: dict[str, dpexp.Run],
) -> None:
    assert runs["ok"].result.status == "ok"
    names = {path.name for path in runs["ok"].folder.iterdir()}
    event_file = {name for name in names if name.startswith("events.out.tfevents.")}
    assert len(event_file) == 1
    assert names - event_file == {
        *("run.json", "dpexp.log", "shapes.csv", "steps.host0.csv", "timeline.json", ".hydra"),
    }


def test_the_table_has_a_row_per_step_and_rank_and_the_global_batchs_loss(
    runs: dict[str, dpexp.Run],
) -> None:
    rows = rows_by_rank(runs["ok"].folder)
    assert set(rows) == set(range(RANKS))
    for own in rows.values():
        assert [int(row["step"]) for row in own] == list(range(8))
        # 100 rows in batches of 30, each cut in three; of the last 10 the ranks have 4, 4 and 2.
        assert sum(int(row["global_rows"]) for row in own) == 200
        assert [row["loss"] for row in own] == [row["loss"] for row in rows[0]]
    assert [int(rows[rank][3]["rows"]) for rank in range(RANKS)] == [4, 4, 2]
    assert not any(name.startswith("replica_") for name in rows[0][0])


def test_what_reads_the_steps_of_rank_0_finds_them(runs: dict[str, dpexp.Run]) -> None:
    folder = runs["ok"].folder
    assert [record.step for record in steps_of(folder)] == list(range(8))
    spent_s = sum(record.step_s for record in steps_of(folder))
    written_s = (folder / "steps.host0.csv").stat().st_mtime
    assert finished(folder).begin_s == pytest.approx(written_s - spent_s)


def test_ranks_that_end_early_write_what_they_have(runs: dict[str, dpexp.Run]) -> None:
    lost = runs["lost"]
    assert lost.result.status == "failed"
    assert lost.result.error is not None
    assert lost.result.error.rank == 1
    rows = rows_by_rank(lost.folder)
    for rank in (0, 2):
        assert [int(row["step"]) for row in rows[rank]] == [0, 1, 2]


def test_of_each_ranks_last_words_the_last_whole_ones_count(tmp_path: Path) -> None:
    words = [{"error": {"rank": rank, "message": text}} for rank, text in
             ((11, "first"), (2, "only"), (11, "second"))]  # fmt: skip
    lines = [json.dumps(word) + "\n" for word in words]
    (tmp_path / LAST_WORDS).write_text("".join(lines) + lines[1][:20])
    assert _last_words(tmp_path) == [words[1], words[2]]
    assert _last_words(tmp_path / "nothing") == []


def test_a_folder_with_such_a_table_holds_a_run(runs: dict[str, dpexp.Run]) -> None:
    folder = runs["lost"].folder
    (folder / "run.json").unlink()
    with pytest.raises(dpexp.ConfigError, match=r"already holds a run \(steps.host0.csv\)"):
        dpexp.run(SPREAD, folder=folder)


def test_the_timeline_has_the_ranks(runs: dict[str, dpexp.Run]) -> None:
    events = json.loads((runs["ok"].folder / "timeline.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == set(range(RANKS))


def rows_by_rank(folder: Path) -> dict[int, list[dict[str, str]]]:
    found = defaultdict(list)
    with (folder / "steps.host0.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            found[int(row["rank"])].append(row)
    return found
