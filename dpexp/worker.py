"""One rank of a run, from nothing to its result."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from dpexp.assembly import Assembly, put_together
from dpexp.beside import Beside
from dpexp.brought import gather_results
from dpexp.check_measuring import not_reached
from dpexp.checkpoint import Checkpoint, attempts_before
from dpexp.checkpointing import Checkpoints, find
from dpexp.comm import Comm
from dpexp.comm_recorder import CommRecorder
from dpexp.compute import compute_of, peak_of
from dpexp.config import to_plain
from dpexp.device import forget_peaks, peak_resident_bytes, prepare
from dpexp.errors import NonFiniteLossError
from dpexp.events.file import code_block
from dpexp.feed import end_notes
from dpexp.lifeline import deaf_once_failed
from dpexp.loop import Progress, Work, run_steps
from dpexp.metrics import Scoring
from dpexp.parallel import Strategy
from dpexp.parity import carried_parity, check_parity
from dpexp.pause import Pause
from dpexp.plan import RunPlan
from dpexp.precision import set_float32
from dpexp.rank_result import rank_result
from dpexp.recorder import Recorder
from dpexp.records import RankResult, RunResult
from dpexp.results import assemble, placed
from dpexp.schema import Config
from dpexp.shapes import ShapeLog, watch_submodules
from dpexp.sinks import (
    ProgressSink,
    Sink,
    TensorBoardSink,
    sink_class,
    step_table,
    write_shapes,
    write_timeline,
)
from dpexp.timing import Clock, make_clock
from dpexp.tracing import take_trace
from dpexp.tutorial import TutorialPrinter
from dpexp.weights import fingerprint, save_weights

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankJob:
    """What a rank is given: plain data only."""

    plan: RunPlan
    environment: dict[str, Any]  # of the run's record, not of the process
    folder: Path
    # Once the ranks of an outer launcher have met:
    hosts: tuple[dict[str, Any], ...] = ()  # see hosts.py


Connect = Callable[[RankJob, int], tuple[Comm, RankJob]]


def run_rank(job: RankJob, rank: int, progress: Progress, connected: Connect) -> RunResult | None:
    """Run this rank's share. Returns the run's result on rank 0, None on the others.

    Writes ``steps.rank<r>.csv``, or into its host's table; on rank 0
    also the event file and ``shapes.csv``.

    Args:
        connected: makes the communicator, and adds to the job what the ranks have told each other.
    """
    if rank == 0:
        # They are made after the run; a name that is wrong is told before it.
        for name, node in job.plan.config.sinks.items():
            sink_class(name, node)
    device = prepare(job.plan, rank)
    comm, job = connected(job, rank)
    board = TensorBoardSink(job.folder) if rank == 0 else None
    if board is not None:
        board.text("config", code_block(_yaml(to_plain(job.plan.config))))
        board.text("environment", code_block(_yaml(job.environment)))
    before_bytes = peak_resident_bytes()
    found = find(job.folder, job.plan, comm)
    if found is None:
        parity, notes = _checked(job.plan, comm, device, progress)
    else:
        parity, notes = carried_parity(found, job.plan) if rank == 0 else (None, ())
    progress.parity = parity
    own = _measure(job, comm, device, board, progress, found)
    own = replace(own, parity=parity, notes=(*notes, *own.notes))
    # A DDP object that is alive when its process group is destroyed makes the rank abort or hang
    # now and then. _measure has dropped it; cycles in the user's model may still hold it.
    gc.collect()
    if job.plan.counts_flops:
        progress.phase, progress.partial = "compute", own
        peak = peak_of(job.plan, comm)
    gathered = gather_results(own, job.plan, comm)
    result = None
    if gathered is not None and board is not None:
        if job.plan.counts_flops:
            compute = compute_of(job.plan, gathered, peak, before_bytes)
            gathered[0] = replace(gathered[0], compute=compute)
        result = assemble(job.plan, job.environment, gathered)
        result = placed(result, job.hosts)
        write_timeline(job.folder / "timeline.json", gathered)
        shapes = [record for each in gathered for record in each.shapes]
        write_shapes(job.folder / "shapes.csv", shapes)
        board.finish(result, shapes)
        board.close()
    comm.close()
    return result


def _checked(
    plan: RunPlan, comm: Comm, device: torch.device, progress: Progress
) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """The parity certificate, on rank 0, and what a reader of the result should know of it."""
    if not plan.parity_steps:
        return None, ()
    set_float32(plan.config.precision, device)
    certificate = check_parity(plan, comm, device, progress)
    notes = []
    if certificate is not None and certificate["verdict"] != "pass":
        notes.append(f"parity: {certificate['verdict']}: {certificate['reason']}")
    if certificate is not None and certificate["rows_identical"] is False:
        notes.append(f"parity: {certificate['rows_reason']}")
    if not forget_peaks(plan, comm.rank):
        notes.append("the peak of resident memory includes the parity check")
    return certificate, tuple(notes)


def _measure(
    job: RankJob,
    comm: Comm,
    device: torch.device,
    board: Sink | None,
    progress: Progress,
    found: Checkpoint | None,
) -> RankResult:
    plan, config, rank = job.plan, job.plan.config, comm.rank
    set_float32(config.precision, device)
    clock = make_clock(device)
    shapes = ShapeLog(first_replica=rank)
    first = 0 if found is None else found.step
    again = found is not None or attempts_before(job.folder) > 0
    built = put_together(plan, comm, device, clock, shapes, first, again=again)
    model, strategy, training, facts = built.model, built.strategy, built.training, built.facts

    if config.shapes.print:
        TutorialPrinter(plan, comm.rank).attach(shapes)
    beside = Beside(plan, comm)
    with _sinks(job, comm, board, built.feed.steps) as sinks:
        collectives = None if strategy.log is None else CommRecorder(comm, clock)
        recorder = Recorder(plan, comm, clock, sinks, strategy.loss_divisor, collectives, first)
        saved = Checkpoints(job.folder, plan, comm, device, training, recorder, progress, found)
        work = _work(built, clock, recorder, shapes, progress)
        pause = Pause(work, built, plan, comm, beside)
        report = partial(
            rank_result, plan, recorder, shapes, rank, str(device), built.notes, facts, saved
        )
        with (
            watch_submodules(model, config.shapes.depth, shapes),
            torch.set_grad_enabled(training is not None),
            _flushed(recorder, progress, report),
            deaf_once_failed(),  # the launcher ends all ranks once it sees that one has failed
        ):
            gone_on = saved.begin()
            progress.begin()
            work = replace(work, first=first, due=saved.due, between=saved.between)
            run_steps(
                built.transfer.ahead(built.feed.batches),
                replace(work, pause_after=first + config.warmup_steps - 1, pause=pause),
            )
            recorder.finish()
    progress.phase = "finish"
    with_surroundings = beside.end(recorder.measured_global_rows)
    saved.end()
    late = (*gone_on, *saved.notes(), *_late_notes(config, built, recorder, first))
    done = with_surroundings(report())

    def trace() -> None:
        progress.phase, progress.partial = "trace", done  # the figures are there, come what may
        take_trace(job.folder, plan, comm, work, built)

    done = _finished(job, strategy, model, done, facts, built.scoring, trace)
    comm_summary = None if done.comm is None else {**done.comm, "calibration": pause.calibration}
    return replace(done, notes=(*done.notes, *late), comm=comm_summary)


def _work(
    built: Assembly, clock: Clock[Any], recorder: Recorder, shapes: ShapeLog, progress: Progress
) -> Work:
    return Work(
        built.strategy,
        built.transfer,
        clock,
        recorder,
        shapes,
        progress,
        built.split,
        built.autocast,
        built.training,
        built.scoring,
    )


def _late_notes(config: Config, built: Assembly, recorder: Recorder, first: int) -> tuple[str, ...]:
    """What is known after the last step only."""
    steps = first + recorder.steps
    return (
        *end_notes(config, built.feed, steps, recorder.epochs),
        *recorder.end_notes(),
        *not_reached(config, steps),
        *built.strategy.notes,
        *_made_late(built.model, built.facts["parameter_tensors"]),
        *(() if built.training is None else built.training.notes()),
    )


def _made_late(model: torch.nn.Module, before: int) -> tuple[str, ...]:
    more = len(list(model.parameters())) - before
    if not more:
        return ()
    return (
        f"the model had {more} parameters more after its steps than before: what forward makes is "
        "neither trained nor the same on all ranks",
    )


def _finished(
    job: RankJob,
    strategy: Strategy,
    model: torch.nn.Module,
    done: RankResult,
    facts: dict[str, Any],
    scoring: Scoring | None,
    trace: Callable[[], None],
) -> RankResult:
    """What there is to say after the last step. All ranks meet here."""
    metric = None if scoring is None else scoring.result()
    state = strategy.state_dict(model)
    if done.rank == 0:
        facts["final_sha256"] = fingerprint(state)
        if job.plan.config.save_weights:
            save_weights(state, job.folder / "weights.pt")
    del state  # under some strategies it is the model's own memory
    if job.plan.config.trace:
        trace()
    strategy.close()
    return replace(done, metric=metric, model=facts)


@contextmanager
def _sinks(job: RankJob, comm: Comm, board: Sink | None, steps: int | None) -> Iterator[list[Sink]]:
    """This rank's sinks. The event file stays open: the run's summary goes there at the end."""
    table = step_table(job.folder, job.plan, comm.rank)
    sinks: list[Sink] = (
        [table] if board is None else [table, board, ProgressSink(job.plan.label, steps)]
    )
    try:
        yield sinks
    finally:
        for sink in sinks:
            if sink is not board:
                sink.close()


@contextmanager
def _flushed(
    recorder: Recorder, progress: Progress, report: Callable[[], RankResult]
) -> Iterator[None]:
    """When the steps end early, write what they left. The other ranks may be gone by then."""
    try:
        yield
    except BaseException:
        try:
            recorder.flush(together=False)
        except NonFiniteLossError as found:
            log.warning("%s, before the run ended for another reason", found)
        except Exception:
            log.exception("the last steps could not be written")
        progress.partial = report()
        raise  # the reason why the steps ended, not what writing them met


def _yaml(plain: dict[str, Any]) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(plain))
