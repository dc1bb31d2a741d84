"""Which code a run was made with, and which runs of a sweep were made with another. No torch."""

from __future__ import annotations

import functools
import hashlib
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

GIT_S = 10.0  # for a large repository on a slow disk
# Keys of a config that may name a class of the user's.
_WITH_TARGETS = ("dataset", "model", "optimizer", "loss", "metric", "lr_scheduler")
# What is compared of ``environment``, and how it is called.
_FACTS = {
    "dpexp": "dpexp",
    "torch": "torch",
    "python": "Python",
    "host": "host",
    "processor": "processor",
    "devices": "devices",
    "cores": "cores",
}
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


def code_of(config: Mapping[str, Any], user_dir: Path) -> dict[str, Any]:
    """The user's code behind a run, as it is now: ``environment.code`` of ``run.json``.

    Returns:
        `git_commit` and `git_dirty` (whether tracked files differ from it) of the folder where the
        user started, both None outside of a repository; `sources`: the SHA-256 of each file that a
        `_target_` of the config lies in, by module, where that file is the user's own.
    """
    commit, dirty = git_state(user_dir)
    modules = {target.rpartition(".")[0] for target in _targets(config)}
    sources = {name: _source_hash(name, user_dir) for name in sorted(modules)}
    return {
        "git_commit": commit,
        "git_dirty": dirty,
        "sources": {name: found for name, found in sources.items() if found is not None},
    }


@functools.cache
def git_state(folder: Path) -> tuple[str | None, bool | None]:
    """The commit of a folder's repository and whether tracked files differ from it.

    Asked once in a process; `git_state.cache_clear()` begins anew.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None, None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return commit, None if changes is None else bool(changes)


def _git(folder: Path, *arguments: str) -> str | None:
    """What git says, or None if it cannot."""
    # Locks would get in the way of what the user does in her repository meanwhile.
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=GIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None


def _targets(config: Mapping[str, Any]) -> Iterator[str]:
    nodes = [config.get(key) for key in _WITH_TARGETS]
    while nodes:
        node = nodes.pop()
        if isinstance(node, Mapping):
            target = node.get("_target_")
            if isinstance(target, str):
                yield target
            nodes.extend(node.values())
        elif isinstance(node, (list, tuple)):
            nodes.extend(node)


def _source_hash(module: str, user_dir: Path) -> str | None:
    """SHA-256 of the file of a module that is the user's own; it is not imported for that."""
    path = _origin(module, user_dir)
    if path is None or path.suffix != ".py" or _is_installed(path):
        return None
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _origin(module: str, user_dir: Path) -> Path | None:
    """The file of the deepest module of a dotted name (a class may hold the target as well)."""
    # importlib.util.find_spec would import the packages above.
    where: list[str] | None = [str(user_dir), *sys.path]
    found = None
    name = ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        try:
            spec = PathFinder.find_spec(name, where) if part and where is not None else None
        except (ImportError, ValueError):
            spec = None
        if spec is None:
            break
        found = spec.origin
        where = spec.submodule_search_locations and list(spec.submodule_search_locations)
    return None if found is None else Path(found)


def _is_installed(path: Path) -> bool:
    """Whether a file is Python's, of an installed package or dpexp's own: versions tell these."""
    installed = _folders_of_packages().intersection(path.parents)
    return bool(installed or {"site-packages", "dist-packages"} & set(path.parts))


@functools.cache
def _folders_of_packages() -> frozenset[Path]:
    folders = [Path(folder) for folder in sysconfig.get_paths().values()]
    return frozenset([*folders, Path(__file__).resolve().parent])


def with_notes(runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The results of a sweep; each that ended well under another code or environment says so.

    Another than most of them: "measured with torch 2.12, others with torch 2.13". Pure.

    Args:
        runs: ``run.json`` data by folder name.
    """
    ok = {name: _facts(run) for name, run in runs.items() if run.get("status") == "ok"}
    noted = dict(runs)
    for fact in dict.fromkeys(fact for facts in ok.values() for fact in facts):
        values = {name: facts[fact] for name, facts in ok.items() if fact in facts}
        counts = Counter(values.values())
        if len(counts) < 2:
            continue
        usual = counts.most_common(1)[0][0]  # of equally frequent ones the first in the sweep
        for name, value in values.items():
            if value != usual:
                note = f"measured with {fact} {value}, others with {fact} {usual}"
                notes = [*(noted[name].get("notes") or ()), note]
                noted[name] = {**noted[name], "notes": notes}
    return noted


def _facts(run: Mapping[str, Any]) -> dict[str, str]:
    """What of a run's environment is compared, by the name under which it is told."""
    environment = run.get("environment") or {}
    facts = {
        told: str(environment[key])
        for key, told in _FACTS.items()
        if environment.get(key) is not None
    }
    variables = environment.get("variables") or {}
    facts |= {name: str(variables.get(name) or "not set") for name in _VARIABLES}
    code = environment.get("code") or {}
    if code.get("git_commit"):
        changed = " and uncommitted changes" if code.get("git_dirty") else ""
        facts["commit"] = f"{code['git_commit'][:12]}{changed}"
    for module, digest in (code.get("sources") or {}).items():
        facts[f"module {module}"] = f"(sha256 {digest[:8]})"
    return facts
