"""Variables of other launchers: which are seen, and when torchrun's are nobody's any more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dpexp.leftover import left_over, unused

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "gone",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "9",
}
MARK = {"TORCHELASTIC_ERROR_FILE": "/tmp/error.json"}  # torchrun sets it for every rank
ASKS = "import os; from dpexp.leftover import left_over; print(left_over(os.environ))"
# As torchrun starts a rank: as the leader of a session, from a process that has torch loaded.
STARTS = """
import mmap, os, subprocess, sys
if sys.argv[2]:
    file = open(sys.argv[2], "r+b")
    held = mmap.mmap(file.fileno(), 0)
environment = {**os.environ, **dict(each.split("=") for each in sys.argv[3:])}
subprocess.run([sys.executable, "-c", sys.argv[1]], start_new_session=True, env=environment)
"""


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({}, ""),
        ({"RANKING": "1", "SLURM_CONF": "/etc/slurm.conf"}, ""),
        ({"WORLD_SIZE": "4"}, "torchrun: WORLD_SIZE"),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}, "Slurm: SLURM_JOB_ID, SLURM_NTASKS"),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, ""),
        (
            {"PMIX_RANK": "0", "OMPI_COMM_WORLD_RANK": "0", "RANK": "0"},
            "torchrun: RANK; MPI: OMPI_COMM_WORLD_RANK, PMIX_RANK",
        ),
        (
            {**TORCHRUN, **MARK},
            "torchrun: LOCAL_RANK, MASTER_ADDR, MASTER_PORT, RANK, TORCHELASTIC_ERROR_FILE, "
            "TORCHELASTIC_RUN_ID, …",
        ),
    ],
)
def test_launchers_are_named_with_their_variables(variables: dict[str, str], told: str) -> None:
    assert unused(variables) == told


def test_what_is_no_number_is_no_rank() -> None:
    assert left_over({**TORCHRUN, "RANK": ""})
    assert left_over({**TORCHRUN, "WORLD_SIZE": "all"})
    assert not left_over(TORCHRUN)  # not those that this process was started with


def told(*command: str) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60, start_new_session=True
    ).stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
def test_variables_that_a_shell_has_exported_are_left_over() -> None:
    exported = "; ".join(f"export {name}={value}" for name, value in {**TORCHRUN, **MARK}.items())
    assert told("sh", "-c", f'{exported}; "$0" -c "$1"; :', sys.executable, ASKS) == "True"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
def test_only_what_a_process_with_torch_has_started_is_a_rank(tmp_path: Path) -> None:
    library = tmp_path / "libtorch_cpu.so"
    library.write_bytes(bytes(4096))
    every = [f"{name}={value}" for name, value in {**TORCHRUN, **MARK}.items()]
    starts = (sys.executable, "-c", STARTS, ASKS)
    assert told(*starts, str(library), *every) == "False"
    assert told(*starts, "", *every) == "True"
    assert told(*starts, str(library), *every[:-1]) == "True"  # torchrun sets more than these
