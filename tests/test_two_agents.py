"""Two of torchrun's agents, as on two hosts, with a rank each: what they agree on, and what not."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def run(work: Path, *arguments: str, second: tuple[str, ...] = ()) -> list[str]:
    """What each agent's rank has printed; both have failed.

    Args:
        second: more arguments for the second agent's rank.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for number, more in enumerate(((), second)):
        flags = ("--nnodes=2", f"--node-rank={number}", "--nproc-per-node=1")
        store = ("--master-addr=127.0.0.1", f"--master-port={port}")
        command = ("-m", "torch.distributed.run", *flags, *store, "-m", "dpexp", "parallel=ddp")
        started.append(
            subprocess.Popen(
                [sys.executable, *command, "parallel.interface=lo", *arguments, *more],
                cwd=work,
                env={**os.environ, "PYTHONPATH": str(TESTS)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    texts = [agent.communicate(timeout=120)[0] for agent in started]
    assert [agent.returncode for agent in started] == [1, 1], texts
    return texts


def test_a_rank_that_fails_on_the_other_host_is_the_cause(tmp_path: Path) -> None:
    failing = ("model=custom", "model._target_=usercode.Failing", "+model.how=raise")
    texts = run(tmp_path, *failing)
    (path,) = tmp_path.glob("outputs/runs/*/*/run.json")
    result = json.loads(path.read_text(encoding="utf-8"))
    assert (result["status"], result["error"]["rank"]) == ("failed", 1)
    assert "boom" in result["error"]["message"]
    assert result["error"]["host"] == socket.gethostname()
    assert [each["ranks"] for each in result["hosts"]] == [[0], [1]]
    assert "".join(texts).count("ValueError: boom") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("second", "words"),
    [
        (("seed=3",), ("another config", "seed: 0 on", "here 3")),
        (("device=cuda:0",), ("device=", "(on ")),
    ],
    ids=["another config", "what one host cannot do"],
)
def test_what_one_host_alone_is_asked_for_or_refuses_is_refused_by_both(
    tmp_path: Path, second: tuple[str, ...], words: tuple[str, ...]
) -> None:
    for text in run(tmp_path, second=second):
        (told,) = [line for line in text.splitlines() if line.startswith("dpexp: ")]
        for word in words:
            assert word in told
    assert not (tmp_path / "outputs").exists()
