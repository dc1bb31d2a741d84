"""Many runs in a row: no abort, no hang, nothing left behind."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

import dpexp
from dpexp import server

RUNS = 100


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_ddp_runs_in_a_row_all_end_well_and_leave_no_process(tmp_path: Path) -> None:
    server.start(several_ranks=True)
    train = ["parallel=ddp", "num_devices=2", "task=train"]
    pids = []
    for number in range(RUNS):
        run = dpexp.run(train, folder=tmp_path / str(number))
        assert run.result.status == "ok", (number, run.result.error)
        assert run.result.samples_seen == 100
        pids += [rank["pid"] for rank in run.result.ranks]
    assert len(pids) == 2 * RUNS
    fork_server = psutil.Process(server.server_pid())
    assert [child.pid for child in fork_server.children() if child.pid in pids] == []
