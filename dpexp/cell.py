"""One run from its config to its ``run.json``: what the command line, sweeps and the API share."""

from __future__ import annotations

import platform
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpexp import env, network, server, slurm
from dpexp.check import check
from dpexp.config import to_plain
from dpexp.console import leave_quietly, say
from dpexp.errors import ConfigError, RefusedInRankError, SkippedCellError
from dpexp.plan import HardwareFacts, RunPlan, make_plan
from dpexp.provenance import code_of, git_state
from dpexp.recording import UnwrittenResultError, record, write_result
from dpexp.records import STEP_TABLES, STEPS_LEFT, ErrorRecord, RunResult
from dpexp.schema import ONE_PROCESS, Config
from dpexp.schema_measuring import RanksFrom
from dpexp.seats import seated
from dpexp.slurm_requests import check_ranks_from
from dpexp.stopping import STOP_SIGNALS, listen


class InterruptedRunError(Exception):
    """A signal ended the run; what it left is on disk and `result` says so."""

    def __init__(self, signum: int, result: RunResult) -> None:
        self.signum = signum
        self.result = result
        super().__init__(f"stopped by {signal.Signals(signum).name}")


def run_cell(
    config: Config,
    folder: Path,
    user_dir: Path,
    *,
    in_sweep: bool = False,
    told: Sequence[str] = (),
) -> RunResult | None:
    """Plan, run and record one configuration.

    Args:
        folder: the run's own folder; exists, and holds no other run.
        user_dir: where the user started: her modules and relative paths are found there.
        in_sweep: refusals become results (``failed`` or ``skipped``) instead of errors.
        told: notes for the record that the user has been shown already.

    Returns:
        The result, also written to ``run.json``; None on a rank other than 0 under torchrun.

    Raises:
        ConfigError: the config is refused (not in a sweep).
        InterruptedRunError: SIGINT, SIGTERM or SIGHUP came.
        UnwrittenResultError: the disk is full, or the folder is read-only.
    """
    environment: dict[str, Any] = {"variables": env.recorded()}
    if not in_sweep:
        git_state.cache_clear()
    try:
        seen = _admit(config, in_sweep=in_sweep)
        # Only now is torch imported: a mistake in the config is told without waiting for it.
        from dpexp.device import describe_environment, gather_facts

        facts = gather_facts()
        environment = describe_environment(facts) | _provenance(config, user_dir)
        with (
            _interrupts_recorded(folder, user_dir),
            seated(config, facts, environment, folder, in_sweep) as facts,
        ):
            plan, search = _plan(config, facts, environment, user_dir, in_sweep)
            announce((*seen, *plan.notes))
            plan = replace(plan, notes=(*seen, *plan.notes, *told))
            result = _run(plan, environment, folder, user_dir)
    except ConfigError as error:
        if in_sweep:
            return refused(config, environment, error, folder)
        _tell_other_hosts(config, error)
        raise
    except _SearchFailedError as ended:
        result, search = ended.result, None
    if result is None:
        return None  # on a rank of torchrun's other than 0
    _raise_if_refused(result, in_sweep)
    if result.status == "ok":
        announce([note for note in result.notes if note not in plan.notes])
    return _recorded(result if search is None else _with_search(result, search), folder, user_dir)


def _recorded(result: RunResult, folder: Path, user_dir: Path) -> RunResult:
    recorded = record(result, folder, user_dir)
    announce(recorded.notes[len(result.notes) :])
    return recorded


def _tell_other_hosts(config: Config, error: ConfigError) -> None:
    """A refusal where ranks are on several hosts: not all may come to it."""
    outer = env.outer_launcher()
    if outer is not None and outer.several_agents:
        from dpexp.join import refuse_together

        refuse_together(config, error, outer)


def _admit(config: Config, *, in_sweep: bool) -> tuple[str, ...]:
    """Refuse what is wrong without importing torch; then let the fork server import it.

    Returns:
        Notes for the user and the record.

    Raises:
        ConfigError: see the message.
    """
    check(config, in_sweep=in_sweep)
    if config.parallel.ranks_from is RanksFrom.slurm:
        check_ranks_from(config)
        slurm.take_rank(in_sweep=in_sweep)
    outer = env.outer_launcher()
    network.check_interface(config.parallel.interface, own_ranks=outer is None)
    if outer is not None:
        return ()
    several = config.parallel.strategy not in ONE_PROCESS
    # Imports torch beside this process's own import.
    server.start(several_ranks=several or in_sweep)
    return (*network.notes(several_ranks=several), *slurm.unused())


def _with_search(result: RunResult, search: dict[str, Any]) -> RunResult:
    note = (
        f"batch_size=auto: {search['batch_size']} {search['counts']}; cells of a sweep "
        "that search have different batches"
    )
    return replace(result, batch_search=search, notes=[*result.notes, note])


def _provenance(config: Config, user_dir: Path) -> dict[str, Any]:
    return {"host": platform.node(), "code": code_of(to_plain(config), user_dir)}


def _plan(
    config: Config,
    facts: HardwareFacts,
    environment: dict[str, Any],
    user_dir: Path,
    in_sweep: bool,
) -> tuple[RunPlan, dict[str, Any] | None]:
    """The plan, and the record of the search if the batch size had to be searched for."""
    if config.batch_size != "auto":
        return make_plan(config, facts, in_sweep=in_sweep), None
    from dpexp.batch_search import find_batch_size

    found = find_batch_size(config, facts, user_dir, in_sweep=in_sweep)
    if found.failure is not None:
        raise _SearchFailedError(replace(found.failure, environment=environment))
    return found.plan, found.record


def _run(
    plan: RunPlan, environment: dict[str, Any], folder: Path, user_dir: Path
) -> RunResult | None:
    """All ranks to their end, in processes of their own or as one of torchrun's."""
    from dpexp.tutorial import greeting
    from dpexp.worker import RankJob

    outer = env.outer_launcher()
    if plan.config.shapes.print and (outer is None or outer.rank == 0):
        print(greeting(plan), flush=True)
    job = RankJob(plan, environment, folder)
    if outer is not None:
        from dpexp.join import join

        asked = plan.config.parallel.interface
        env.fill_in(network.variables_of(asked, one_host=not outer.several_agents))
        return join(job, outer)
    from dpexp.launch import launch

    return slurm.explained(launch(job, user_dir))


class _SearchFailedError(Exception):
    """A try of the batch size failed for a reason that is not the batch size."""

    def __init__(self, result: RunResult) -> None:
        self.result = result
        super().__init__(result.status)


def _raise_if_refused(result: RunResult, in_sweep: bool) -> None:
    """Outside of a sweep a mistake in the config is a refusal, also when a rank found it.

    Up to the first step: what later steps meet is a failure of a run that has something to show.
    """
    error = result.error
    if error is not None and error.kind == "config" and not in_sweep and not error.step:
        raise RefusedInRankError(error.message, error.traceback or "")


def refused(
    config: Config, environment: dict[str, Any], error: ConfigError, folder: Path
) -> RunResult:
    """Record a cell of a sweep that was not run."""
    skipped = isinstance(error, SkippedCellError)
    strategy = config.parallel.strategy.value
    count = config.num_devices
    result = RunResult(
        status="skipped" if skipped else "failed",
        label=f"{strategy}-n{count}",
        config=to_plain(config),
        environment=environment,
        parallel=strategy,
        num_devices=count if isinstance(count, int) else None,
        scaling=config.scaling.value,
        error=ErrorRecord("config", type(error).__name__, str(error), phase="plan"),
    )
    write_result(result, folder)
    return result


def unreadable(raw: dict[str, Any], error: ConfigError, folder: Path) -> RunResult:
    """Record a cell of a sweep whose config could not even be read."""
    parallel = raw.get("parallel")
    strategy = str(parallel.get("strategy")) if isinstance(parallel, dict) else "unknown"
    result = RunResult(
        status="failed",
        label=f"{strategy}-n{raw.get('num_devices')}",
        config=raw,
        environment={"variables": env.recorded()},
        parallel=strategy,
        error=ErrorRecord("config", type(error).__name__, str(error), phase="plan"),
    )
    write_result(result, folder)
    return result


def claim_folder(folder: Path) -> None:
    """Refuse a folder that already holds a run: no two runs share one.

    Raises:
        ConfigError: it does.
    """
    held = [*folder.glob("run.json"), *folder.glob(STEP_TABLES)]
    if held:
        raise ConfigError(
            "hydra.run.dir",
            str(folder),
            f"already holds a run ({held[0].name})",
            fix="another hydra.run.dir, or none: then each run gets a folder of its own",
        )


def announce(notes: Any) -> None:
    """Tell the user what she may not have expected; of several ranks, the first one does."""
    outer = env.outer_launcher()
    for note in notes if outer is None or outer.rank == 0 else ():
        say(f"note: {note}")


@contextmanager
def _interrupts_recorded(folder: Path, user_dir: Path) -> Iterator[None]:
    """Around all that starts ranks: a signal that ends them is written down.

    Raises:
        InterruptedRunError: it came.
    """
    from dpexp.launch import LaunchInterruptedError

    if any(signal.getsignal(each) is leave_quietly for each in STOP_SIGNALS):
        # From here on there is something to keep.
        listen()
    try:
        yield
    except LaunchInterruptedError as stop:
        result = slurm.explained(stop.result)
        if result.status != "ok":  # else the run had just come to its end
            # The figures are gone with the ranks; what they wrote step by step is there.
            result = replace(result, notes=[*result.notes, STEPS_LEFT])
        try:
            with suppress(KeyboardInterrupt):  # a second one: the sinks are left, not the record
                result = record(result, folder, user_dir)
        except UnwrittenResultError as error:
            announce([f"the result cannot be written: {error}"])
        raise InterruptedRunError(stop.signum, result) from None
