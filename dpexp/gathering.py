"""Which folder the ranks of an outer launcher write to. No torch where one host has all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpexp import env, rounds
from dpexp.cell import claim_folder
from dpexp.compose import RUNS
from dpexp.errors import NO_VALUE, ConfigError
from dpexp.schema import Config


def run_folder(outer: env.OuterLauncher, typed: Path | None, config: Config) -> Path:
    """The folder of this run, the same one for all its ranks and rounds.

    The ranks of one host have one parent, torchrun's agent, by which they know each other without
    a word. Those of several hosts have to meet: rank 0 says the folder.

    Args:
        typed: the folder that the user has named; None = one below ``outputs/runs``.
        config: says how long to wait for the other hosts, and where.

    Raises:
        ConfigError: the folder holds a run of another launch, or the hosts did not meet.
    """
    base = Path(RUNS).absolute()
    agent = rounds.own_agent()
    if outer.several_agents:
        return _agreed(outer, agent, typed, base, config)
    if agent is None:
        folder = typed or base / outer.run_id
        claim_folder(folder)
        return folder
    folder = typed or rounds.known_folder(agent, base) or agent.folder(base)
    if not rounds.is_of(folder, [agent.id]):
        claim_folder(folder)
    return folder


def _agreed(
    outer: env.OuterLauncher,
    agent: rounds.Agent | None,
    typed: Path | None,
    base: Path,
    config: Config,
) -> Path:
    from dpexp.meeting import meet, reach_store

    own = agent or rounds.Agent(outer.run_id, 0.0)
    known = rounds.known_folder(own, base)
    said = {"agent": own.id, "known": None if known is None else str(known.relative_to(base))}

    def answered(_token: str, everyone: Sequence[dict[str, Any]]) -> dict[str, Any]:
        agents = {each["agent"] for each in everyone}
        earlier = next((each["known"] for each in everyone if each["known"] is not None), None)
        chosen = earlier or str(own.folder(base).relative_to(base))
        folder = typed or base / chosen
        try:
            if not rounds.is_of(folder, agents):
                claim_folder(folder)
        except ConfigError as error:
            return {"refused": str(error)}
        return {"folder": chosen}

    timeout_s = config.parallel.timeout_s
    try:
        store = reach_store(outer, timeout_s, config.parallel.interface)
        answer = meet(store, outer, "folder", said, answered, timeout_s).answer
    except RuntimeError as error:
        raise _not_met(outer, timeout_s, error) from error
    if "refused" in answer:
        raise ConfigError("", NO_VALUE, answer["refused"])
    return typed or base / str(answer["folder"])


def _not_met(outer: env.OuterLauncher, timeout_s: float, error: RuntimeError) -> ConfigError:
    reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
    return ConfigError(
        "parallel.timeout_s",
        timeout_s,
        f"the ranks of this run did not meet: {reason}. {told_by(outer)}",
        fix="MASTER_PORT=<a free one> srun …"
        if outer.name == "Slurm"
        else "the address and the port that torchrun was given, and whether hosts reach each other",
    )


def told_by(outer: env.OuterLauncher) -> str:
    """Why this process waits for others at all."""
    place = f"This process is rank {outer.rank} of {outer.world_size} of {outer.name}'s run "
    if outer.name == "Slurm":
        where = f"{outer.master_addr}:{outer.master_port}"
        return (
            f"{place}{outer.run_id!r}. Rank 0 waits at {where}; if that port is taken, set "
            "MASTER_PORT. Each task of srun has to run dpexp, and --kill-on-bad-exit=1 ends all "
            "when one is lost"
        )
    return (
        f"{place}{outer.run_id!r}, by the variables TORCHELASTIC_RUN_ID, RANK, WORLD_SIZE, "
        "MASTER_ADDR and MASTER_PORT. If no torchrun runs, they are left over: unset "
        "TORCHELASTIC_RUN_ID"
    )
