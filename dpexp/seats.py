"""What of the machine a run has for itself: the devices of CUDA and, with `pin=true`, cores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpexp import env
from dpexp.claims import Wanted, wait_for
from dpexp.console import say
from dpexp.errors import ConfigError
from dpexp.pinning import cores_needed, whole_first
from dpexp.plan import HardwareFacts, RunPlan, make_plan
from dpexp.records import ErrorRecord
from dpexp.results import ended_early
from dpexp.schema import Config
from dpexp.stopping import Stop, StopAtOnceError, listening


@contextmanager
def seated(
    config: Config,
    facts: HardwareFacts,
    environment: dict[str, Any],
    folder: Path,
    in_sweep: bool,
) -> Iterator[HardwareFacts]:
    """The facts with what is this run's alone until the block ends; waits until there is enough.

    Raises:
        ConfigError: the config is refused, or there can never be enough.
        LaunchInterruptedError: a signal came meanwhile.
    """
    # The sizes of its batches change neither devices nor processes; they may be searched for later.
    plan = make_plan(replace(config, batch_size=1, accumulate=1), facts, in_sweep=in_sweep)
    wanted = wanted_by(plan, facts)
    if wanted is None:
        yield facts
        return
    try:
        with listening():
            claim = wait_for(wanted, folder, lambda line: say(f"note: {line}"))
    except StopAtOnceError:
        raise
    except Stop as stop:
        from dpexp.launch import LaunchInterruptedError

        text = f"{stop}, while it waited for {wanted}"
        error = ErrorRecord("interrupted", "Signal", text, phase="launch")
        ended = ended_early(plan, environment, "interrupted", error, [])
        raise LaunchInterruptedError(stop.signum, ended) from None
    try:
        if wanted.kind == "core":
            yield replace(facts, claimed_cores=tuple(int(name) for name in claim.names))
        else:
            yield replace(facts, claimed_devices=claim.names)
    finally:
        claim.release()


def wanted_by(plan: RunPlan, facts: HardwareFacts) -> Wanted | None:
    """What a run has to claim; None where there is nothing, or others give it out."""
    if plan.config.pin:
        needed = cores_needed(plan.threads_per_process, plan.num_devices, plan.num_processes)
        return Wanted("core", tuple(str(cpu) for cpu in whole_first(facts.cpus)), needed)
    if plan.device_type != "cuda" or env.devices_given_out():
        return None
    from dpexp.device import visible_devices

    return devices_wanted(plan, visible_devices())


def devices_wanted(plan: RunPlan, visible: tuple[str, ...]) -> Wanted | None:
    """Which devices will do: any that are free, or just those from ``cuda:<i>`` on.

    Args:
        visible: a name for each device that torch sees, in its order; () where they have none.

    Raises:
        ConfigError: there are fewer than the run needs.
    """
    if not visible:
        return None
    first, count = plan.first_index, plan.num_devices
    if first + count > len(visible):
        raise ConfigError(
            "num_devices",
            count,
            f"{len(visible)} devices can be told apart by their UUID",
            allowed=f"1 to {len(visible) - first}",
            fix="num_devices=1",
        )
    exact = ":" in plan.config.device
    return Wanted("cuda", visible[first : first + count] if exact else visible, count)
