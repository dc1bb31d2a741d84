"""Which sockets runs of one machine open, under every strategy: on loopback only."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from ports import LOOPBACK, Seen, watched

pytestmark = pytest.mark.skipif(
    sys.platform == "darwin", reason="only root may list connections there"
)
TESTS = Path(__file__).parent
LIMIT_S = 150.0
STEPS = ("task=train", "epochs=null", "steps=300")
BARE = ("check.parity=false", "measure.flops=false", "measure.calibration_pairs=0")
OF_TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "gone", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4",
    "MASTER_ADDR": "10.255.255.1", "MASTER_PORT": "9",
    "TORCHELASTIC_HEALTH_CHECK_PORT": "29999", "TORCHELASTIC_ENABLE_FILE_TIMER": "1",
}  # fmt: skip


def look_at(work: Path, *command: str, variables: dict[str, str] | None = None) -> Seen:
    """Run a Python command to its good end and look at its sockets meanwhile."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS), **(variables or {})}
    with (work / "output").open("w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=work, env=environment,
            stdout=output, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            seen = watched(process, LIMIT_S)
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        assert process.returncode == 0, output.read()
    return seen


def all_addresses(seen: Seen) -> set[str]:
    return {address for each in seen.listening.values() for address in each}


IN_PYTHON = f"""
import dpexp
hook = ["parallel=ddp", "num_devices=2", "parallel.comm_hook=fp16"]
for strategy in (["parallel=none"], hook):
    assert dpexp.run([*strategy, *{STEPS!r}]).result.status == "ok"
"""
SWEEP = ("-m", "parallel=dp,ddp,fsdp", "num_devices=2", "loader.workers=1", *STEPS, *BARE)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(
            ("-m", "dpexp", *SWEEP),
            id="dp, ddp and fsdp in a sweep with loader workers",
            marks=pytest.mark.slow,
        ),
        pytest.param(("-c", IN_PYTHON), id="none, and ddp with a hook"),
    ],
)
def test_a_run_of_one_machine_listens_on_loopback_only(
    tmp_path: Path, command: Sequence[str]
) -> None:
    seen = look_at(tmp_path, *command, variables=OF_TORCHRUN)
    assert seen.looks > 3
    assert "127.0.0.1" in all_addresses(seen)  # the store at least, or the look saw nothing
    assert all_addresses(seen) <= LOOPBACK
    assert seen.by_ss <= LOOPBACK
    assert seen.datagrams | seen.peers <= LOOPBACK
    assert not seen.ports & {29500, 29999}


@pytest.mark.slow
def test_under_torchrun_the_ranks_of_one_host_listen_on_loopback_only(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    seen = look_at(tmp_path, *torchrun, "-m", "dpexp", "parallel=ddp", *STEPS)
    assert seen.listening["below"] == {"127.0.0.1"}
    # torch's own store. If that changes, docs/clusters.md is to say so.
    assert not seen.listening["root"] <= LOOPBACK
