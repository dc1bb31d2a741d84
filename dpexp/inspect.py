"""``python -m dpexp.inspect key=value …``: what a run would do, without running it.

The module is not called `inspect` anywhere: with absolute imports it cannot shadow Python's own.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from omegaconf.errors import OmegaConfBaseException

from dpexp import compose, console
from dpexp.check import check
from dpexp.config import load
from dpexp.errors import NO_VALUE, ConfigError, RefusedInRankError
from dpexp.stopping import answer_with

USAGE = """\
What a run would do, without running it: parameters, gradient bytes, buckets, FLOPs per step,
memory by part, the shapes on each device of the first and the last batch.

  python -m dpexp.inspect [--config-dir FOLDER] [key=value ...]

The keys are those of a run: python -m dpexp --help. The rows of two batches are read; the model
is built without memory where its constructor allows it, so it may be larger than this machine.
No folder is made and no process is started.
"""
_CONFIG_DIR = "--config-dir"


def main() -> None:
    """Entry point. Exit status: 0, or 1 after a refusal."""
    console.prepare_streams()
    answer_with(console.leave_quietly)
    arguments = sys.argv[1:]
    if "--help" in arguments or "-h" in arguments:
        print(USAGE, end="")
        return
    try:
        _show(arguments)
    except ConfigError as error:
        console.refuse(error)
    except OmegaConfBaseException as error:
        console.refuse(compose.explain(error, arguments), cause=error)


def _show(arguments: list[str]) -> None:
    config = load(compose.composed(_overrides(arguments)))
    check(config)
    if config.batch_size == "auto":
        raise ConfigError(
            "batch_size",
            "auto",
            "is found by trying, and nothing is run here",
            allowed="a number of rows",
            fix="batch_size=30",
        )
    # Only now is torch imported: a mistake in the config is told without waiting for it.
    from rich.console import Console

    from dpexp.anatomy import dissect
    from dpexp.build import UserCodeError
    from dpexp.device import gather_facts
    from dpexp.plan import make_plan
    from dpexp.report.anatomy import print_anatomy

    try:
        anatomy = dissect(make_plan(config, gather_facts()))
    except UserCodeError as error:
        trace = "".join(traceback.format_exception(error))
        raise RefusedInRankError(str(error), trace) from error
    print_anatomy(anatomy, Console())


def _overrides(arguments: list[str]) -> list[str]:
    """The command line as overrides of Hydra's compose API, which takes no options.

    Raises:
        ConfigError: an option that means nothing here.
    """
    overrides, folders, left = [], [], list(arguments)
    while left:
        argument = left.pop(0)
        name, equals, value = argument.partition("=")
        if name == _CONFIG_DIR:
            folders.append(value if equals else (left.pop(0) if left else ""))
        elif argument.startswith("-"):
            raise ConfigError(
                argument,
                NO_VALUE,
                "is not an option of dpexp.inspect",
                allowed=f"{_CONFIG_DIR}, --help, and key=value",
                fix="one config at a time, without -m",
            )
        else:
            overrides.append(argument)
    for folder in folders:
        if not Path(folder).is_dir():
            raise ConfigError(_CONFIG_DIR, folder, "is not a folder", fix="an existing folder")
    if folders:
        found = ", ".join(f"'file://{Path(folder).absolute()}'" for folder in folders)
        overrides.append(f"hydra.searchpath=[{found}]")
    return overrides


if __name__ == "__main__":
    main()
