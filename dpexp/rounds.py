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
import time
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import psutil

from dpexp import checkpoint
from dpexp.files import write_whole

RECORD = ".rounds.json"
POINTERS = ".launches"


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


def forget(base: Path, folder: Path) -> None:
    """Undo :func:`remember` for all agents, lost ones too: the run has come to its end."""
    with contextlib.suppress(OSError):  # another rank was faster, or other launches are in it
        for pointer in (base / POINTERS).iterdir():
            if base / pointer.read_text(encoding="utf-8").strip() == folder:
                pointer.unlink(missing_ok=True)
        (base / POINTERS).rmdir()


def begin(folder: Path, agents: Set[str], token: str) -> list[dict[str, Any]]:
    """Make the folder ready for a round: what the one before has written goes to ``earlier/``.

    Args:
        agents: the ids of this round's.
        token: this round's name.

    Returns:
        What is known of the earlier rounds, the first one first: `began_s`, `first_step_s` (of the
        rank that told the end; None if there was none or nobody could), `error` (as in
        ``run.json``; None if no rank could say it), `gone_on_from` (the step that the next round
        began with) and `saved_s` (when the checkpoint of that step was taken; None without one).
        Times are Unix times.
    """
    past = _record(folder)
    rounds = past["rounds"] if not agents.isdisjoint(past["agents"]) else []
    checkpoint.put_aside(folder)
    if rounds:
        found = checkpoint.newest(folder)
        rounds[-1]["error"] = _error(folder)
        rounds[-1]["gone_on_from"] = 0 if found is None else found.step
        rounds[-1]["saved_s"] = None if found is None else found.state["taken_unix_s"]
    folder.mkdir(parents=True, exist_ok=True)
    now = {"token": token, "began_s": time.time(), "first_step_s": None}
    record = {"agents": sorted({*past["agents"], *agents}), "rounds": [*rounds, now]}
    _write(folder, record)
    return list(rounds)


def note_first_step(folder: Path, first_step_s: float) -> None:
    """Keep when the first step of the round that ends has begun."""
    record = _record(folder)
    if record["rounds"]:
        record["rounds"][-1]["first_step_s"] = first_step_s
        _write(folder, record)


def restarts(earlier: Sequence[Mapping[str, Any]], first_step_s: float) -> dict[str, Any] | None:
    """``restarts`` of ``run.json``; None in the first round.

    What is lost is the time from a round's last checkpoint, or from its first step if it saved
    none, to the first step of the next round.

    Args:
        earlier: see :func:`begin`.
        first_step_s: of this round; its end if it had none.
    """
    if not earlier:
        return None
    starts_s = [each["first_step_s"] or each["began_s"] for each in earlier]
    lost_s = 0.0
    for each, start_s, next_s in zip(earlier, starts_s, [*starts_s[1:], first_step_s], strict=True):
        lost_s += max(0.0, next_s - max(start_s, each["saved_s"] or 0.0))
    return {"count": len(earlier), "causes": [_cause(each) for each in earlier], "lost_s": lost_s}


def _cause(ended: Mapping[str, Any]) -> dict[str, Any]:
    """Why a round ended; nothing where no rank could say it, as when a host came or went."""
    error = ended["error"] or {}
    keys = ("rank", "host", "kind", "type", "message", "step")
    return {**{key: error.get(key) for key in keys}, "gone_on_from": ended["gone_on_from"]}


def is_current(folder: Path, token: str) -> bool:
    """Whether the folder, as this host sees it, is that of a round and no later one has begun."""
    rounds = _record(folder)["rounds"]
    return bool(rounds) and bool(rounds[-1]["token"] == token)


def is_of(folder: Path, agents: Collection[str]) -> bool:
    """Whether an earlier round with one of these agents has had the folder."""
    return not set(_record(folder)["agents"]).isdisjoint(agents)


def _record(folder: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"agents": [], "rounds": []}
    return record


def _write(folder: Path, record: Mapping[str, Any]) -> None:
    write_whole(folder / RECORD, json.dumps(record, indent=1) + "\n")


def _error(folder: Path) -> dict[str, Any] | None:
    """Why the last attempt ended, if one of its ranks could still say it; it lies aside by now."""
    last = checkpoint.attempts_before(folder)
    try:
        path = folder / checkpoint.EARLIER / f"attempt-{last}" / "run.json"
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    error: dict[str, Any] | None = result.get("error")
    return error
