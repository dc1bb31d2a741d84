"""The folder of a run whose ranks an outer launcher starts, perhaps again after one was lost.

Each start of all ranks is a round. The rounds of one launch share a folder, also when they have
other hosts; another launch never gets it. What tells launches apart is the process that started
the ranks on a host, torchrun's agent: it lives as long as the launch does. No torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import re
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import psutil

from dpexp.files import write_whole

RECORD = ".rounds.json"
EARLIER = "earlier"
POINTERS = ".launches"
# What a round leaves in the folder. The log goes on, and checkpoints are for the next round.
_LEFT = (
    "run.json",
    "steps.rank*.csv",
    "shapes.csv",
    "timeline.json",
    "trace.rank*.json",
    "weights.pt",
    "events.out.tfevents.*",
)


@final
@dataclass(frozen=True)
class Agent:
    """The process that started the ranks on this host."""

    id: str  # no other process of any host has it
    started_s: float

    def folder(self, base: Path) -> Path:
        """The run's folder below `base`, if this agent's host is the one to say it."""
        started = time.localtime(self.started_s)
        day, moment = time.strftime("%Y-%m-%d", started), time.strftime("%H-%M-%S", started)
        return base / day / f"{moment}-{self.id}"

    def pointer(self, base: Path) -> Path:
        """The file that tells later rounds the folder, whichever host has said it."""
        return base / POINTERS / self.id


def own_agent() -> Agent | None:
    """The agent of this rank; None where nobody knows its parent."""
    parent = psutil.Process().parent()
    if parent is None:
        return None
    text = f"{platform.node()} {parent.pid} {_start(parent)}"
    return Agent(hashlib.sha256(text.encode()).hexdigest()[:8], parent.create_time())


def _start(process: psutil.Process) -> str:
    """When a process started, such that each look gives the same; its Unix time may move."""
    try:
        text = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return repr(process.create_time())
    return text.rpartition(")")[2].split()[19]  # ticks since the boot (man proc_pid_stat)


def known_folder(agent: Agent, base: Path) -> Path | None:
    """The folder that an earlier round with this agent had; None if there was none."""
    try:
        return base / agent.pointer(base).read_text(encoding="utf-8").strip()
    except OSError:
        return None


def remember(agent: Agent, base: Path, folder: Path) -> None:
    """Let the next round find `folder`, also if this agent's host is the one to say it then."""
    pointer = agent.pointer(base)
    pointer.parent.mkdir(parents=True, exist_ok=True)
    write_whole(pointer, f"{folder.relative_to(base)}\n")


def forget(agent: Agent, base: Path) -> None:
    """Undo :func:`remember`: the run has come to its end."""
    pointer = agent.pointer(base)
    pointer.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # others are in it
        pointer.parent.rmdir()


def begin(folder: Path, agents: Collection[str], token: str) -> list[dict[str, Any]]:
    """Make the folder ready for a round: what the one before has left goes to ``earlier/``.

    Args:
        agents: the ids of this round's.
        token: this round's name.

    Returns:
        What is known of the earlier rounds, the first one first: `token`, `began_s` (Unix time)
        and `error`, that of its ``run.json`` or None.

    """
    past = _record(folder)
    rounds = past["rounds"]
    if rounds:
        rounds[-1]["error"] = _error(folder)
        _put_aside(folder, len(rounds))
    folder.mkdir(parents=True, exist_ok=True)
    now = {"token": token, "began_s": time.time(), "error": None}
    record = {"agents": sorted({*past["agents"], *agents}), "rounds": [*rounds, now]}
    write_whole(folder / RECORD, json.dumps(record, indent=1) + "\n")
    return list(rounds)


def is_current(folder: Path, token: str) -> bool:
    """Whether the folder, as this host sees it, is that of a round and no later one has begun."""
    rounds = _record(folder)["rounds"]
    return bool(rounds) and rounds[-1]["token"] == token


def is_of(folder: Path, agents: Collection[str]) -> bool:
    """Whether an earlier round with one of these agents has had the folder."""
    return not set(_record(folder)["agents"]).isdisjoint(agents)


def _record(folder: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"agents": [], "rounds": []}
    return record


def _error(folder: Path) -> dict[str, Any] | None:
    """Why the round ended, if one of its ranks could still say it."""
    try:
        result = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    error: dict[str, Any] | None = result.get("error")
    return error


def _put_aside(folder: Path, number: int) -> None:
    kept = folder / EARLIER / str(number)
    for pattern in _LEFT:
        for path in folder.glob(pattern):
            kept.mkdir(parents=True, exist_ok=True)
            # Under its own name an event file would be one more run for TensorBoard.
            path.rename(kept / re.sub("tfevents", EARLIER, path.name))
