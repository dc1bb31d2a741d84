"""Takes part in a run whose processes torchrun has started, instead of starting any."""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, final

import torch

from dpexp import env, hosts, rank, rounds
from dpexp.comm import Comm, connect
from dpexp.compose import RUNS, discard
from dpexp.config import to_plain
from dpexp.console import say, show_failure
from dpexp.errors import ConfigError
from dpexp.failures import LATE_PEER, LOST_PEER
from dpexp.files import claim
from dpexp.gathering import told_by
from dpexp.lifeline import Lifeline
from dpexp.loop import Progress
from dpexp.meeting import meet, own_address, reach_store, round_store
from dpexp.records import ErrorRecord, RankResult, RunResult
from dpexp.results import ended_early, placed, restarted
from dpexp.schema import Config
from dpexp.slurm import explained
from dpexp.stopping import ignored
from dpexp.witness import Witness
from dpexp.worker import RankJob

_RUN = "run"  # the meeting in which the ranks make a round


def join(job: RankJob, outer: env.OuterLauncher) -> RunResult | None:
    """Be one rank of the outer launcher's group.

    Returns:
        The run's result on rank 0, None on the others. Does not return when this rank fails: the
        first one that does writes ``run.json``, and torchrun ends the others.
    """
    part = _Part(job, outer)
    Lifeline(ignored(), of_agent=outer.name == "torchrun").start()
    result = rank.guarded(job, outer.rank, part.progress, part.keep, part.connect)
    if outer.local_rank == 0:
        rounds.forget(Path(RUNS).absolute(), job.folder)
    return None if result is None else restarted(result, part.restarts())


def refuse_together(config: Config, error: ConfigError, outer: env.OuterLauncher) -> NoReturn:
    """Tell the ranks of other hosts, which may not come to it, that this one refuses the run.

    Raises:
        ConfigError: the refusal, the same on all ranks; it names the host if others do not refuse.
    """
    said = {**_said(outer, 0, None), "refused": vars(error)}
    timeout_s = config.parallel.timeout_s
    try:
        store = reach_store(outer, timeout_s, config.parallel.interface)
        meeting = meet(store, outer, _RUN, said, lambda _token, _said: {}, timeout_s)
    except RuntimeError:  # nobody is there to be told
        raise error from None
    raise hosts.refusal(meeting.said) or error


@final
class _Part:
    """This rank's part in a round."""

    def __init__(self, job: RankJob, outer: env.OuterLauncher) -> None:
        self._job, self._outer = job, outer
        self._witness: Witness | None = None
        self._token = ""
        self._refused: ConfigError | None = None
        self._earlier: Sequence[dict[str, Any]] = ()
        self.progress = Progress()

    def connect(self, job: RankJob, _rank: int) -> tuple[Comm, RankJob]:
        """Meet the other ranks. Returns the communicator, and the job with what is known now.

        Raises:
            ConfigError: the hosts cannot make this run together.
            RuntimeError: not all ranks came in time.
        """
        outer, plan = self._outer, job.plan
        said = _said(outer, plan.threads_per_process, job)
        if outer.world_size == 1:
            self._token = secrets.token_hex(8)
            everyone: Sequence[dict[str, Any]] = [said]
            answer, store = self._answer(self._token, everyone), None
        else:
            timeout_s = plan.config.parallel.timeout_s
            whole = reach_store(outer, timeout_s, plan.config.parallel.interface)
            meeting = meet(whole, outer, _RUN, said, self._answer, timeout_s)
            self._token, everyone, answer = meeting.token, meeting.said, meeting.answer
            store = round_store(whole, self._token)
        self._refused = hosts.refusal(everyone)
        if self._refused is not None:
            raise self._refused
        found = hosts.hosts_of(everyone)
        if store is not None:
            holder = None if outer.agents_store else 0
            self._witness = Witness(store, outer.rank, found, holder)
        self._earlier = answer["earlier"]
        self._job = replace(job, hosts=tuple(found))
        shared = rounds.is_current(job.folder, self._token)
        if outer.local_rank == 0:
            self._prepare(shared, everyone)
        comm = connect(plan, outer.rank, store)
        notes = [*plan.notes, *hosts.warnings(everyone)]
        if len(found) > 1:
            own = next(i for i, each in enumerate(found) if outer.rank in each["ranks"])
            sees = torch.zeros(len(found))
            # The first rank of a host says it: others may look when that one has written already.
            sees[own] = float(shared and outer.local_rank == 0)
            notes += _apart(found, comm.highest(sees).tolist())
            _refuse_checkpoints_apart(plan.config, found)
        self._job = replace(self._job, plan=replace(plan, notes=tuple(notes)))
        return comm, self._job

    def _answer(self, token: str, said: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Rank 0's: make the folder ready, before another rank writes to it."""
        if hosts.refusal(said) is not None:
            return {"earlier": []}
        return {"earlier": rounds.begin(self._job.folder, _agents(said), token)}

    def _prepare(self, shared: bool, said: Sequence[Mapping[str, Any]]) -> None:
        """On each host, by one of its ranks, before there is a group."""
        if not shared:  # a folder of this host's own, below the same path
            rounds.begin(self._job.folder, _agents(said), self._token)
        if env.ranks_are_slurms():  # srun starts no further round
            return
        agent, base = rounds.own_agent(), Path(RUNS).absolute()
        if agent is not None and base in self._job.folder.parents:
            rounds.remember(agent, base, self._job.folder)

    def keep(self, error: ErrorRecord, partial: RankResult | None) -> None:
        """Write why the round failed, unless another rank has, or the next round has begun."""
        job = self._job
        if self._refused is not None:  # nothing was run: there is nothing to record
            if self._outer.local_rank == 0:
                say(f"dpexp: {self._refused}")
                discard(job.folder)
            return
        if error.phase == "set-up" and error.type in (LATE_PEER, LOST_PEER, "DistNetworkError"):
            told = f"{error.message.rstrip('.')}. {told_by(self._outer)}"
            error = replace(error, message=told)
        if self._witness is not None:
            error = self._witness.first(error)
        if self._token and not rounds.is_current(job.folder, self._token):
            return
        status = "interrupted" if error.kind == "interrupted" else "failed"
        known = [] if partial is None else [partial]
        ended = explained(ended_early(job.plan, job.environment, status, error, known))
        ended = restarted(placed(ended, job.hosts), self.restarts())
        if claim(job.folder / "run.json", ended.to_json()):
            if self.progress.began_s:
                rounds.note_first_step(job.folder, self.progress.began_s)
            show_failure(ended, job.folder)

    def restarts(self) -> dict[str, Any] | None:
        """What was lost with earlier rounds; see :func:`dpexp.rounds.restarts`."""
        return rounds.restarts(self._earlier, self.progress.began_s or time.time())


def _said(outer: env.OuterLauncher, threads: int, job: RankJob | None) -> dict[str, Any]:
    """What a rank tells the others of itself, and one rank of each host of the host."""
    agent = rounds.own_agent()
    facts = None
    if job is not None and outer.local_rank == 0:
        code = job.environment.get("code") or {}
        facts = {
            **job.environment,
            "sources": code.get("sources") or {},
            "code": _digest(),
            "config": _comparable(to_plain(job.plan.config)),
        }
    return {
        "host": platform.node(),
        "agent": outer.run_id if agent is None else agent.id,
        "address": own_address(outer) if outer.several_agents else None,
        "pid": os.getpid(),
        "threads": threads,
        "facts": facts,
        "refused": None,
    }


def _comparable(config: dict[str, Any]) -> dict[str, Any]:
    """A config without what may be another on each host."""
    parallel = {key: value for key, value in config["parallel"].items() if key != "interface"}
    return {**config, "parallel": parallel}


def _refuse_checkpoints_apart(config: Config, found: Sequence[dict[str, Any]]) -> None:
    """All ranks write to one checkpoint, and all read it.

    Raises:
        ConfigError: a host does not see the folder of rank 0's host.
    """
    asked = config.checkpoint.every_s or config.checkpoint.every_steps
    apart = [each["host"] for each in found if not each["shares_folder"]]
    if asked and apart:
        raise ConfigError(
            "hosts",
            apart[0],
            "does not see the folder of rank 0's host, and a checkpoint is of all ranks",
            fix="a folder that all hosts share, or no checkpoints",
        )


def _agents(said: Sequence[Mapping[str, Any]]) -> set[str]:
    return {each["agent"] for each in said}


def _digest() -> str:
    """Of dpexp's own files: a checkout may differ where the version does not."""
    own = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(own.rglob("*.py")):
        digest.update(f"{path.relative_to(own)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _apart(found: Sequence[dict[str, Any]], sees: Sequence[float]) -> list[str]:
    """Note the hosts that do not see rank 0's folder, in `found` too."""
    notes = []
    for each, seen in zip(found, sees, strict=True):
        each["shares_folder"] = bool(seen)
        if not each["shares_folder"]:
            notes.append(
                f"{each['host']} does not see the folder of rank 0's host: what its ranks write is "
                "below the same path there; the result is on rank 0's host"
            )
    return notes
