"""The elastic agent sees the end of a rank at once, however rarely it looks at its ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import dpexp
from dpexp import agent, server
from dpexp.timing import now_s

DDP2 = ("parallel=ddp", "num_devices=2")
SOON_S = 120  # wide: a machine may be busy


@pytest.mark.parametrize(
    ("how", "status"), [(None, "ok"), ("raise", "failed"), ("_exit", "failed")]
)
def test_the_end_of_a_run_is_seen_without_a_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str | None, status: str
) -> None:
    monkeypatch.setattr(agent, "LOOK_S", 10 * SOON_S)
    server.start(several_ranks=True)
    failing = ["model=custom", "model._target_=usercode.Failing", f"+model.how={how}"]
    began_s = now_s()
    run = dpexp.run([*DDP2, *(failing if how else [])], folder=tmp_path / "run")
    assert run.result.status == status
    assert now_s() - began_s < SOON_S


def test_no_thread_follows_logs_and_ranks_write_to_the_streams_of_this_process() -> None:
    variables: dict[int, dict[str, str]] = {0: {}, 1: {}}
    destinations = agent._OwnStreams().reify(variables)
    assert destinations.tee_stdouts == destinations.tee_stderrs == {}
    assert destinations.stdouts == destinations.stderrs == {0: "", 1: ""}
    assert destinations.error_files == {0: os.devnull, 1: os.devnull}
    assert variables == {0: {"TORCHELASTIC_ERROR_FILE": ""}, 1: {"TORCHELASTIC_ERROR_FILE": ""}}
