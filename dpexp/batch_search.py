"""`batch_size=auto`: the largest batch that fits, found by trying.

Each try is a short run in processes of its own, so that one that runs out of memory, or is killed
for it, leaves nothing behind and no rank waits for another. All ranks of a try have to get
through. Nothing of it is timed.
"""

from __future__ import annotations

import csv
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

from dpexp import env
from dpexp.console import say
from dpexp.errors import ConfigError
from dpexp.launch import LaunchInterruptedError, launch
from dpexp.plan import HardwareFacts, RunPlan, make_plan
from dpexp.records import STEP_TABLES, ErrorRecord, RunResult
from dpexp.schema import Config, Scaling
from dpexp.timing import now_s
from dpexp.worker import RankJob

# A full batch, then the short rest of a small dataset, then a full one that also finds the
# optimizer's state in memory.
STEPS = 3
# The answer is exact to this part of itself, and to one row per device.
RESOLUTION = 64
# The run that follows is longer than a try, and ends when it comes to use more than the limit.
SPARE = 0.95


@dataclass(frozen=True)
class Try:
    """One batch size that was tried."""

    batch_size: int  # as in the config: global, or per device under weak scaling
    fits: bool
    peak_bytes: int | None  # resident memory of the largest rank; None when it ended early
    reason: str | None  # why it does not fit
    rows_in_dataset: int | None = None  # once a batch held all of it


@dataclass(frozen=True)
class Found:
    """The end of a search: a plan, or the failure of a try that has nothing to do with memory."""

    plan: RunPlan
    record: dict[str, Any]  # for run.json
    failure: RunResult | None = None


def find_batch_size(
    config: Config, facts: HardwareFacts, user_dir: Path, *, in_sweep: bool = False
) -> Found:
    """Search for the largest batch of this strategy on so many devices.

    Returns:
        A plan with the batch size that was found; its config still says auto.

    Raises:
        ConfigError: there is no limit on a CPU, not even the smallest batch fits, or the ranks
            are torchrun's.
    """
    smallest = _planned(config, facts, 1, in_sweep, least=True)
    limit = _limit_bytes(config, smallest)
    if facts.outer_world_size is not None:
        raise ConfigError(
            "batch_size",
            "auto",
            f"the search starts processes of its own, and {facts.outer_name} has started those of "
            "one run",
            fix=f"python -m dpexp without {facts.outer_name}, then batch_size=<what it found>",
        )
    search = _Search(config, facts, limit, user_dir, in_sweep=in_sweep)
    began_s = now_s()
    best = search.largest(_least(config, smallest))
    if search.failure is not None:
        return Found(smallest, {}, search.failure)
    record = {
        "batch_size": best,
        "counts": "rows per device" if config.scaling is Scaling.weak else "rows over all devices",
        "limit_bytes_per_process": limit,
        "tries": [asdict(each) for each in search.tries],
        "search_s": now_s() - began_s,
    }
    plan = make_plan(replace(config, batch_size=best), facts, in_sweep=in_sweep)
    return Found(replace(plan, config=config), record)


@final
class _Search:
    """The tries so far, and the next ones."""

    def __init__(
        self,
        config: Config,
        facts: HardwareFacts,
        limit: int | None,
        user_dir: Path,
        *,
        in_sweep: bool = False,
    ) -> None:
        self._config, self._facts, self._limit, self._user_dir = config, facts, limit, user_dir
        self._in_sweep = in_sweep
        smallest = _planned(config, facts, 1, in_sweep, least=True)
        self._label, self._devices = smallest.label, smallest.num_devices
        self.tries: list[Try] = []
        self.failure: RunResult | None = None

    def largest(self, least: int) -> int:
        """Doubling, then halving the gap; multiples of `least`'s rows per device."""
        unit = self._unit()
        low = self._attempt(least)
        if self.failure is None and not low.fits:
            raise ConfigError(
                "batch_size",
                "auto",
                f"not even {least} rows fit: {low.reason}",
                fix="a smaller model, or a larger process_memory_mib",
            )
        best, too_large = least, None
        while self.failure is None:
            if self.tries[-1].rows_in_dataset is not None and self.tries[-1].fits:
                return self._capped(self.tries[-1].rows_in_dataset)
            gap = None if too_large is None else too_large - best
            if gap is not None and gap <= max(unit, best // RESOLUTION):
                return best
            size = best * 2 if gap is None else best + max(unit, gap // 2 // unit * unit)
            if self._attempt(size).fits:
                best = size
            else:
                too_large = size
        return best

    def _unit(self) -> int:
        """The step between sizes: one row per device."""
        return 1 if self._config.scaling is Scaling.weak else self._devices

    def _capped(self, rows: int) -> int:
        """The size at which a batch is the whole dataset, in rows as `batch_size` counts them."""
        if self._config.scaling is Scaling.weak:
            return -(-rows // self._devices)
        return rows

    def _attempt(self, size: int) -> Try:
        tried = self._run(size)
        self.tries.append(tried)
        if self.failure is None:
            peak = "" if tried.peak_bytes is None else f" (peak {tried.peak_bytes / 2**20:.0f} MiB)"
            verdict = "fits" if tried.fits else f"does not fit: {tried.reason}"
            if tried.fits and tried.rows_in_dataset is not None:
                verdict = f"holds all {tried.rows_in_dataset} rows of the dataset, and fits"
            say(f"{self._label}: batch_size=auto: {size} {verdict}{peak}")
        return tried

    def _run(self, size: int) -> Try:
        short = replace(
            self._config,
            epochs=None,
            steps=STEPS,
            warmup_steps=0,
            drop_last=False,
            save_weights=False,
            shapes=replace(self._config.shapes, print=False, depth=0),
            until=replace(self._config.until, ci=None),
            measure=replace(self._config.measure, calibration_pairs=0, flops=False),
            trace=False,
            inject=replace(self._config.inject, die_rank=None, hang_rank=None),
            checkpoint=replace(self._config.checkpoint, every_s=None, every_steps=None),
            parallel=replace(self._config.parallel, max_restarts=0),
        )
        plan = _planned(short, self._facts, size, self._in_sweep)
        with tempfile.TemporaryDirectory(prefix="dpexp-try-") as name:
            folder = Path(name)
            job = RankJob(plan, {"variables": env.recorded()}, folder)
            try:
                result = launch(job, self._user_dir)
            except LaunchInterruptedError as stop:  # a try that has just ended well is no result
                why = stop.result.error or ErrorRecord("interrupted", "Signal", "stopped")
                stop.result = replace(stop.result, status="interrupted", error=why)
                raise
            seen = _most_rows(folder)
        if result.status == "ok":
            peak = max((result.memory or {}).get("peak_bytes", [0]))
            fits = self._limit is None or peak <= self._limit * SPARE
            reason = None if fits else f"its peak is above {SPARE:.0%} of process_memory_mib"
            return Try(size, fits, peak, reason, seen if seen < plan.batch_rows else None)
        error = result.error
        if error is not None and (error.kind == "oom" or error.type == "SIGKILL"):
            return Try(size, False, None, error.message.splitlines()[0])
        self.failure = result
        return Try(size, False, None, "failed for another reason")


def _planned(
    config: Config, facts: HardwareFacts, size: int, in_sweep: bool, *, least: bool = False
) -> RunPlan:
    """The plan with a batch size put in; its config still says auto.

    Args:
        least: take the smallest batch that gives every device a row per micro-batch instead.
    """
    plan = make_plan(replace(config, batch_size=size, accumulate=1), facts, in_sweep=in_sweep)
    if least:
        size = _least(config, plan)
    plan = make_plan(replace(config, batch_size=size), facts, in_sweep=in_sweep)
    return replace(plan, config=config)


def _least(config: Config, plan: RunPlan) -> int:
    devices = 1 if config.scaling is Scaling.weak else plan.num_devices
    return devices * config.accumulate


def _limit_bytes(config: Config, plan: RunPlan) -> int | None:
    limit = config.process_memory_mib
    if limit is None:
        if plan.device_type == "cuda":
            return None
        raise ConfigError(
            "batch_size",
            "auto",
            f"on {plan.device_type} the memory that a process may use must be given",
            fix="process_memory_mib=2000",
        )
    return int(limit * 2**20)


def _most_rows(folder: Path) -> int:
    """The largest global batch in the tables of steps, which all have it; 0 if there is none."""
    table = next(folder.glob(STEP_TABLES), None)
    if table is None:
        return 0
    with table.open(encoding="utf-8", newline="") as file:
        return max((int(row["global_rows"]) for row in csv.DictReader(file)), default=0)
