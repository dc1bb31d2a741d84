"""Variables that another launcher has left in the environment. No torch.

A shell in an allocation of Slurm, one where somebody has exported torchrun's variables, a program
that a rank has started: all of them hand such variables on to processes that nobody waits for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# The variables by which launchers tell a process its place among others; with a _ at the end, all
# that begin so.
_PLACING = {
    "torchrun": (
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_"),
    ),
    "Slurm": ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    "MPI": ("OMPI_COMM_WORLD_", "PMI_", "PMIX_"),
}
SHOWN = 6  # names of one launcher


def unused(variables: Mapping[str, str]) -> str:
    """The launchers whose variables are set, with the names; for a run that uses none of them.

    Not those of a Slurm job with a single task: that task is this process.
    """
    told = []
    for who, known in _PLACING.items():
        begins = tuple(each for each in known if each.endswith("_"))
        names = [name for name in sorted(variables) if name in known or name.startswith(begins)]
        if not names or (who == "Slurm" and variables.get("SLURM_NTASKS") == "1"):
            continue
        more = ", …" if len(names) > SHOWN else ""
        told.append(f"{who}: {', '.join(names[:SHOWN])}{more}")
    return "; ".join(told)


def left_over(variables: Mapping[str, str]) -> bool:
    """Whether torchrun's variables were inherited from a shell or program that is no agent of it.

    torchrun starts each rank with these variables, as the leader of a session. So where the leader
    lacks them, or was not started by a process that has torch loaded, no agent waits for this one.
    What cannot be looked at (other systems than Linux) counts as torchrun's.
    """
    if not all(variables[name].isdigit() for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")):
        return True
    run, rank = "TORCHELASTIC_RUN_ID", "RANK"
    if _started_with("self").get(run) != variables[run]:
        return False  # set within this process, by who means it
    if "TORCHELASTIC_ERROR_FILE" not in variables:  # torchrun always sets it
        return True
    leader = os.getsid(0)
    theirs = _started_with(leader)
    if theirs and (theirs.get(run), theirs.get(rank)) != (variables[run], variables[rank]):
        return True
    try:
        agent = int(Path(f"/proc/{leader}/stat").read_text().rpartition(")")[2].split()[1])
        # An agent that has died leaves its ranks to process 1: they are to end, not to run alone.
        return agent > 1 and "/libtorch" not in Path(f"/proc/{agent}/maps").read_text()
    except OSError:
        return False


def _started_with(pid: int | str) -> dict[str, str]:
    """The environment with which a process was started; {} where that cannot be read."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (os.fsdecode(each).partition("=") for each in raw.split(b"\0") if each)
    return {name: value for name, _, value in pairs}
