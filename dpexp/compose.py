"""Between Hydra and dpexp: where the config lives, its resolvers, its help page. No torch."""

from __future__ import annotations

import difflib
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf

from dpexp import checkpoint, env, repeating, rounds, searching
from dpexp.builtin import GROUPS
from dpexp.composing import SweepLoader
from dpexp.errors import NO_VALUE, ConfigError
from dpexp.help_text import help_text
from dpexp.launchers import NAMES
from dpexp.records import STEP_TABLES
from dpexp.schema import NESTED, OPTIONS, Config, StrategyName

RUNS = "outputs/runs"
SWEEPS = "outputs/sweeps"
# A choice that cannot be the name of an option, alone or in a sweep's list.
_NO_NAME = re.compile(r"(^|,)\s*(null|true|false|-?[0-9.]+|[\[{].*)?\s*(,|$)")
# `sinks` may have several, in brackets.
_NO_NAMES = re.compile(r"(^|,)\s*(null|true|false|-?[0-9.]+|\[\s*\]|\{.*)?\s*(,|$)")
# One per process: two processes started in the same second still get two folders.
_RUN_ID = secrets.token_hex(3)
_OF_EARLIER_STARTS = (checkpoint.FOLDER, checkpoint.EARLIER, rounds.RECORD)


def register() -> None:
    """Make dpexp's resolvers and its help page known to Hydra. Safe to call again."""
    OmegaConf.register_new_resolver("dpexp_run_id", lambda: _RUN_ID, replace=True)
    OmegaConf.register_new_resolver("dpexp_cell", cell_name, replace=True)
    # Resolved for --help only: as text it would be copied and written with each run's settings.
    OmegaConf.register_new_resolver("dpexp_help", help_page, replace=True)
    node = {"app_name": "dpexp", "header": "", "footer": "", "template": "${dpexp_help:}"}
    ConfigStore.instance().store(group="hydra/help", name="dpexp", node=node)
    repeating.register()
    searching.register()


def config_folder() -> Path:
    """``conf/``: packed into the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    packed = package / "conf"
    return packed if packed.is_dir() else package.parent / "conf"


@contextmanager
def composer() -> Iterator[Callable[[Sequence[str]], DictConfig]]:
    """What composes command lines of overrides to configs, without running Hydra's main.

    What it yields raises ConfigError if an override cannot be composed.
    """
    register()
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        hydra: Any = GlobalHydra.instance().hydra
        hydra.config_loader = SweepLoader(hydra.config_loader.get_search_path())
        yield _composed


def composed(overrides: Sequence[str]) -> DictConfig:
    """The config of one command line; see :func:`composer`."""
    with composer() as compose_one:
        return compose_one(overrides)


def _composed(overrides: Sequence[str]) -> DictConfig:
    refuse_bad_choices(list(overrides))
    try:
        return hydra_compose("config", list(overrides))
    except HydraException as error:
        raise explain(error, list(overrides)) from error


def fresh_folder(base: str) -> Path:
    """Make a new folder below `base` for a run or sweep that Hydra does not start."""
    now = time.localtime()
    stamp = time.strftime("%H-%M-%S", now)
    folder = (
        Path(base).absolute() / time.strftime("%Y-%m-%d", now) / f"{stamp}-{secrets.token_hex(3)}"
    )
    folder.mkdir(parents=True)  # fails rather than share a folder
    return folder


def discard(folder: Path) -> None:
    """Remove what a run or sweep that was refused has put into its folder, and nothing else.

    Also the folders above it, where they are dpexp's own and now empty. Nothing, where an earlier
    start of the run has left something: what is there may be of that one.
    """
    if any((folder / name).exists() for name in _OF_EARLIER_STARTS):
        return
    for name in (".hydra", ".submitit"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for pattern in (
        "multirun.yaml",
        "dpexp.log",
        ".lock",
        "shapes.csv",
        "events.out.tfevents.*.dpexp",
        STEP_TABLES,
    ):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)  # of several ranks each may come here
    folder = folder.absolute()
    own = Path(RUNS).absolute().parent
    above = [each for each in folder.parents if each == own or own in each.parents]
    for each in (folder, *above):
        try:
            each.rmdir()
        except OSError:  # not empty: not ours to judge
            return


def cell_name(strategy: str, num_devices: Any, device: str) -> str:
    """A cell's name, ``ddp_n2``; ``auto`` becomes the number that the plan will use."""
    if num_devices == "auto":
        from dpexp.device import gather_facts
        from dpexp.plan import device_type_of, first_index_of, resolve_num_devices

        facts = gather_facts()
        kind = device_type_of(str(device), facts)
        first = first_index_of(str(device))
        num_devices = resolve_num_devices("auto", StrategyName(strategy), kind, first, facts)
    return f"{strategy}_n{num_devices}"


def refuse_bad_choices(arguments: list[str]) -> None:
    """Refuse ``group=null``, ``group=3`` and ``~group``: Hydra has only a traceback for them.

    It also has nothing else for what is no text, such as a file's name in another encoding.

    Raises:
        ConfigError: a config group would be left without a choice, or an override is no text.
    """
    for argument in arguments:
        key, _, value = argument.partition("=")
        if not _is_text(argument):
            raise ConfigError(key, value, "is not UTF-8", fix="a name in UTF-8, such as a link's")
        if argument.startswith("="):
            raise ConfigError(
                argument, NO_VALUE, "an override needs a key", fix="key=value; see --help"
            )
        group = key.lstrip("~+")
        no_choice = _NO_NAMES if group == "sinks" else _NO_NAME
        if group not in GROUPS or not (key.startswith("~") or no_choice.search(value)):
            continue
        options = GROUPS[group]
        raise ConfigError(
            group,
            argument if key.startswith("~") else value,
            "a config group needs one of its options",
            allowed=", ".join(options),
            fix=f"{group}={options[-1]}",
        )


def _is_text(argument: str) -> bool:
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True


def explain(error: Exception, arguments: list[str]) -> ConfigError:
    """What Hydra or OmegaConf refused, as one paragraph."""
    text = str(error)
    if isinstance(error, OverrideParseException):
        own, _, typed = error.override.partition("=")
        # Its other lines repeat the override.
        echo = ("Error", "Lexer", "See", " ")
        known = [each for each in text.splitlines() if not each.startswith(echo)]
        problem = ": ".join(["cannot be read as an override", *known[:1]])
        fix = f"quote what is text twice: '{own}=\"…\"'" if typed else "key=value; see --help"
        return ConfigError(own, typed or NO_VALUE, problem, fix=fix)
    choice = re.search(r"Could not (?:find|load) '([^']+)/([^'/]+)'", text)
    if choice is not None:
        group = choice[1]
        options = GROUPS.get(group) or re.findall(r"^\t(\S+)$", text, re.MULTILINE)
        shown = f"+{group}" if group in ("experiment", "cluster") else group
        close = _close(choice[2], options) or next(reversed(options), "…")
        plugin = group.startswith("hydra/") and choice[2] in ("optuna", *NAMES.values())
        return ConfigError(
            shown,
            choice[2],
            "is in a plugin that is not installed" if plugin else "there is no such option",
            allowed=", ".join(options),
            fix='pip install "dpexp[launchers]"' if plugin else f"{shown}={close}",
        )
    ambiguous = re.search(r"Ambiguous value for argument '([^=]+)=([^']*)'", text)
    if ambiguous is not None:
        key, value = ambiguous.groups()
        fix = f"--multirun for a sweep, {key}=[{value}] for a list, or quote it twice for text"
        return ConfigError(key, value, "several choices are for a sweep", fix=fix)
    missing = re.search(r"Could not override '([^']+)'", text)
    if missing is not None:
        key = missing[1]
        value = next((a.split("=", 1)[1] for a in arguments if a.startswith(f"{key}=")), NO_VALUE)
        return _missing_key(key, value)
    merged = re.match(r"Error merging override ([^=]+)=(.*)", text)
    if merged is not None and error.__cause__ is not None:  # a schema of the user's own
        problem = str(error.__cause__).partition("\n")[0]
        return ConfigError(merged[1].lstrip("+"), merged[2], problem, fix="a value of that type")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return ConfigError("config", NO_VALUE, " ".join(lines[:4]).rstrip("."), fix="--help")


def explain_os(error: OSError) -> ConfigError:
    """What the system refused: usually the folder of the run cannot be made or written."""
    reason = (error.strerror or str(error)).lower()
    if error.filename is None:
        return ConfigError("output", NO_VALUE, f"cannot be written: {reason}", fix="another place")
    fix = "another hydra.run.dir (in a sweep hydra.sweep.dir)"
    return ConfigError("hydra.run.dir", str(error.filename), f"cannot be used: {reason}", fix=fix)


def _missing_key(key: str, value: object) -> ConfigError:
    """Why there is no such key, and what to type instead."""
    group, _, name = key.partition(".")
    owners = [strategy.value for strategy, own in OPTIONS.items() if name in own]
    if group == "parallel" and owners:
        problem = f"is an option of {' and '.join(owners)}"
        return ConfigError(key, value, problem, fix=f"parallel={owners[0]}")
    if group in ("dataset", "model", "optimizer") and name:
        problem = f"the chosen {group} has no such argument"
        return ConfigError(key, value, problem, fix=f"+{key}=… to add it, or another {group}")
    option = name.partition(".")[0]
    if group == "sinks" and option in GROUPS["sinks"]:
        problem = "this sink is not chosen, or has no such argument"
        return ConfigError(key, value, problem, fix=f"sinks={option}; --help shows its keys")
    known = [spec.name for spec in fields(NESTED[group] if group in NESTED and name else Config)]
    close = _close(name or group, known)
    typed = f"{group}.{close}" if name and group in NESTED else close
    fix = f"{typed}=…" if close else f"+{key}=… to add it, or --help for all keys"
    return ConfigError(key, value, "there is no such key", fix=fix)


def _close(word: str, known: Sequence[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word, known, n=1)), None)


def arguments_under_torchrun(arguments: list[str], outer: env.OuterLauncher) -> list[str]:
    """The command line of a rank that torchrun started; of its folder see gathering.py.

    Raises:
        ConfigError: a sweep, which needs processes of its own for each cell.
    """
    if {"-m", "--multirun"} & set(arguments):
        raise ConfigError(
            "--multirun",
            "torchrun",
            "torchrun has started the processes of one run; a sweep starts its own",
            fix="python -m dpexp -m …, without torchrun",
        )
    added = ["hydra.mode=RUN"]
    if outer.rank != 0:
        added.append("hydra.output_subdir=null")  # .hydra/ is written once
    return [*arguments, *added]


def help_page() -> str:
    """The text of ``--help``."""
    presets = (config_folder() / "experiment").glob("*.yaml")
    return help_text(sorted(path.stem for path in presets))
