"""What the hosts of a run are, and how they differ. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpexp.errors import NO_VALUE, ConfigError
from dpexp.identity import differences

# What is told of each host in ``run.json``.
_TOLD = (
    "cores",
    "processor",
    "memory_bytes",
    "platform",
    "python",
    "torch",
    "dpexp",
    "accelerator",
    "devices",
    "variables",
)
# What may differ, and how it is called where it does.
_COMPARED = {
    "torch": "torch",
    "python": "Python",
    "numpy": "numpy",
    "processor": "the processor",
    "cores": "the number of cores",
    "accelerator": "the accelerator",
    "devices": "the devices",
}


def hosts_of(said: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """``hosts`` of ``run.json``: for each agent's host its ranks and what it is.

    Args:
        said: by each rank, in order: `host`, `agent`, `address`, `pid`, `threads` and, by the first
            rank of each host, `facts`.
    """
    found: dict[str, dict[str, Any]] = {}
    for rank, each in enumerate(said):
        entry = found.setdefault(
            each["agent"],
            {
                "host": each["host"],
                "address": each["address"],
                "ranks": [],
                "pids": [],
                "threads": [],
            },
        )
        entry["ranks"].append(rank)
        entry["pids"].append(each["pid"])
        entry["threads"].append(each["threads"])
        if each["facts"] is not None:
            entry.update({key: each["facts"].get(key) for key in _TOLD})
    return list(found.values())


def host_of(hosts: Sequence[Mapping[str, Any]], rank: int) -> str | None:
    """The name of a rank's host; None where all ranks are on one, or nothing is known."""
    if len(hosts) < 2:
        return None
    return next((str(each["host"]) for each in hosts if rank in each["ranks"]), None)


def where(hosts: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> str:
    """Ranks in words, with their host where there are several: ``ranks 2 and 3 on b``."""
    by_host: dict[str | None, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(host_of(hosts, rank), []).append(rank)
    parts = []
    for host, own in by_host.items():
        numbers = " and ".join(filter(None, [", ".join(map(str, own[:-1])), str(own[-1])]))
        parts.append(f"rank{'s' * (len(own) > 1)} {numbers}" + (f" on {host}" if host else ""))
    return "; ".join(parts)


def refusal(said: Sequence[Mapping[str, Any]]) -> ConfigError | None:
    """Why these hosts cannot make one run together; None if they can.

    Args:
        said: see :func:`hosts_of`; `refused` too, a rank's own refusal or None, and in `facts`
            `config` and `code`, a digest of dpexp's own files.
    """
    for each in said:
        if each["refused"] is not None:
            return _refused(each, [other["refused"] for other in said])
    first, *others = [each for each in said if each["facts"] is not None]
    for other in others:
        own, its = first["facts"], other["facts"]
        if own["code"] != its["code"]:
            return ConfigError(
                "hosts",
                other["host"],
                f"has another dpexp than {first['host']}: version {its['dpexp']}, files "
                f"{its['code']}; there version {own['dpexp']}, files {own['code']}",
                fix="the same dpexp on all hosts",
            )
        lines = differences(own["config"], its["config"])
        if lines:
            changed = "; ".join(lines[:4]).replace(", now ", f" on {first['host']}, here ")
            return ConfigError(
                "hosts",
                other["host"],
                f"was given another config: {changed}",
                fix="the same arguments on all hosts",
            )
    return None


def _refused(first: Mapping[str, Any], refusals: Sequence[Any]) -> ConfigError:
    told = first["refused"]
    alike = all(each == told for each in refusals)
    where_ = "" if alike else f" (on {first['host']})"
    return ConfigError(
        told["key"],
        NO_VALUE if told["value"] is None else told["value"],
        told["problem"] + where_,
        allowed=told["allowed"],
        fix=told["fix"],
    )


def warnings(said: Sequence[Mapping[str, Any]]) -> list[str]:
    """What differs between the hosts and may make the run's figures doubtful."""
    firsts = [each for each in said if each["facts"] is not None]
    told = []
    for key, name in _COMPARED.items():
        values = {each["host"]: each["facts"].get(key) for each in firsts}
        if len({str(value) for value in values.values()}) > 1:
            listed = ", ".join(f"{value} on {host}" for host, value in values.items())
            told.append(f"warning: {name} differs between hosts: {listed}")
    told += _other_sources(firsts)
    for host in hosts_of(said):
        threads = sum(host["threads"])
        if len(firsts) > 1 and host.get("cores") and threads > host["cores"]:
            told.append(
                f"on {host['host']} {len(host['ranks'])} ranks with {threads} threads share "
                f"{host['cores']} cores: their times include waiting for a core"
            )
    return told


def _other_sources(firsts: Sequence[Mapping[str, Any]]) -> list[str]:
    """A warning for each module of the user's whose file is another one on another host."""
    told = []
    own = firsts[0]["facts"]["sources"]
    for other in firsts[1:]:
        its = other["facts"]["sources"]
        told += [
            f"warning: {module} is another file on {other['host']} than on {firsts[0]['host']}"
            for module in sorted({*own, *its})
            if own.get(module) != its.get(module)
        ]
    return told
