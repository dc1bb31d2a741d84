"""One rank of a run, from nothing to its result."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from dpexp.batches import fetch_all, rows_in, seed_all, seed_of_rank
from dpexp.build import build, build_model, build_optimizer
from dpexp.comm import Comm, connect
from dpexp.config import to_plain
from dpexp.device import peak_device_bytes, peak_resident_bytes, prepare
from dpexp.errors import ConfigError, NonFiniteLossError
from dpexp.loop import Progress, Training, Work, run_steps
from dpexp.losses import make_loss
from dpexp.parallel import Context, make_strategy
from dpexp.plan import RunPlan
from dpexp.recorder import Recorder
from dpexp.records import RankResult, RunResult
from dpexp.results import assemble
from dpexp.schedule import Schedule
from dpexp.schema import Task
from dpexp.shapes import ShapeLog, watch_submodules
from dpexp.sinks import CsvSink, ProgressSink, Sink, TensorBoardSink, write_shapes
from dpexp.sinks.tensorboard import code_block
from dpexp.timing import make_clock
from dpexp.tutorial import TutorialPrinter

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankJob:
    """What a rank is given: plain data only."""

    plan: RunPlan
    environment: dict[str, Any]  # of the run's record, not of the process
    folder: Path


def run_rank(job: RankJob, rank: int, progress: Progress) -> RunResult | None:
    """Run this rank's share. Returns the run's result on rank 0, None on the others.

    Writes ``steps.rank<r>.csv``; on rank 0 also the event file and ``shapes.csv``.
    """
    device = prepare(job.plan, rank)
    comm = connect(job.plan, rank)
    board = TensorBoardSink(job.folder) if rank == 0 else None
    if board is not None:
        board.text("config", code_block(_yaml(to_plain(job.plan.config))))
        board.text("environment", code_block(_yaml(job.environment)))
    own = _measure(job, comm, device, board, progress)
    # A DDP object that is alive when its process group is destroyed makes the rank abort or hang
    # now and then. _measure has dropped it; cycles in the user's model may still hold it.
    gc.collect()
    gathered = comm.gather(own)
    result = None
    if gathered is not None and board is not None:
        result = assemble(job.plan, job.environment, gathered)
        shapes = [record for each in gathered for record in each.shapes]
        write_shapes(job.folder / "shapes.csv", shapes)
        board.finish(result, shapes)
        board.close()
    comm.close()
    return result


def _measure(
    job: RankJob, comm: Comm, device: torch.device, board: Sink | None, progress: Progress
) -> RankResult:
    plan, config, rank = job.plan, job.plan.config, comm.rank
    clock = make_clock(device)
    shapes = ShapeLog(first_replica=rank)
    strategy = make_strategy(plan.strategy, Context(plan, comm, device, clock, shapes))

    seed_all(config.seed)
    dataset = build("dataset", config.dataset)
    schedule = make_schedule(plan, rows_in(dataset))
    notes = _schedule_notes(plan, schedule)
    batches = fetch_all(
        dataset,
        schedule,
        strategy.choose_rows,
        config.loader.workers,
        seed_of_rank(config.seed, rank),
    )

    seed_all(config.seed)  # again, so that the weights do not depend on the dataset's draws
    model = build_model(config.model, device)
    facts = _model_facts(model, rank)
    strategy.wrap(model)
    training = _training(job, model)
    seed_all(seed_of_rank(config.seed, rank))

    if config.shapes.print:
        TutorialPrinter(plan, comm.rank).attach(shapes)
    with _sinks(job, comm, board, len(schedule)) as sinks:
        recorder = Recorder(plan, comm, clock, sinks)
        report = partial(
            _rank_result, plan, recorder, shapes, rank, str(device), tuple(notes), facts
        )
        with (
            watch_submodules(model, config.shapes.depth, shapes),
            torch.set_grad_enabled(training is not None),
            _flushed(recorder, progress, report),
        ):
            work = Work(
                strategy, clock, recorder, shapes, progress, training, config.forward_kwargs
            )
            run_steps(batches, work)
        del work  # it holds the DDP object; see run_rank
    progress.phase = "finish"
    if rank == 0:
        facts["final_sha256"] = fingerprint(model)
        if config.save_weights:
            save_weights(model, job.folder / "weights.pt")
    strategy.close()
    return report()


def make_schedule(plan: RunPlan, num_rows: int) -> Schedule:
    """The run's schedule.

    Raises:
        ConfigError: not a single batch is left; the message names the counts.
    """
    config = plan.config
    schedule = Schedule(
        num_rows,
        plan.batch_rows,
        config.epochs,
        config.steps,
        config.drop_last,
        config.shuffle,
        config.seed,
    )
    if len(schedule) == 0:
        raise ConfigError(
            "drop_last",
            config.drop_last,
            f"nothing is left to do: the {num_rows} rows make no whole batch of {plan.batch_rows}",
            fix=f"drop_last=false, or batch_size={num_rows}",
        )
    return schedule


def fingerprint(model: torch.nn.Module) -> str:
    """SHA-256 over the names, shapes and bytes of the state_dict."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
            plain = tensor.detach().to("cpu").contiguous().flatten()
            digest.update(plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    return digest.hexdigest()


def save_weights(model: torch.nn.Module, path: Path) -> None:
    """Write the model's own state_dict (no wrapper's prefix), whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        torch.save(model.state_dict(), temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _sinks(job: RankJob, comm: Comm, board: Sink | None, steps: int) -> Iterator[list[Sink]]:
    """This rank's sinks. The event file stays open: the run's summary goes there at the end."""
    table = CsvSink(job.folder / f"steps.rank{comm.rank}.csv", job.plan.num_devices)
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


def _training(job: RankJob, model: torch.nn.Module) -> Training | None:
    config = job.plan.config
    if config.task is not Task.train:
        return None
    custom = build("loss", config.loss) if isinstance(config.loss, dict) else None
    return Training(make_loss(config.loss, custom), build_optimizer(config.optimizer, model))


def _schedule_notes(plan: RunPlan, schedule: Schedule) -> list[str]:
    config, notes = plan.config, []
    if config.steps is not None and len(schedule) < config.steps:
        notes.append(
            f"steps={config.steps} were asked for, but {config.epochs} epoch(s) of "
            f"{schedule.num_rows} rows have {len(schedule)}; epochs=null repeats the data"
        )
    if len(schedule) <= config.warmup_steps:
        notes.append(
            f"all {len(schedule)} steps are warm-up steps (warmup_steps={config.warmup_steps}), "
            "so there is no timing; more steps, or warmup_steps=0"
        )
    return notes


def _model_facts(model: torch.nn.Module, rank: int) -> dict[str, Any]:
    parameters = list(model.parameters())
    facts = {
        "parameters": sum(p.numel() for p in parameters),
        "trainable_parameters": sum(p.numel() for p in parameters if p.requires_grad),
    }
    return {**facts, "initial_sha256": fingerprint(model)} if rank == 0 else dict(facts)


def _rank_result(
    plan: RunPlan,
    recorder: Recorder,
    shapes: ShapeLog,
    rank: int,
    device: str,
    notes: tuple[str, ...],
    facts: dict[str, Any],
) -> RankResult:
    return RankResult(
        rank=rank,
        steps=recorder.steps,
        measured_steps=recorder.measured_steps,
        rows_seen=recorder.rows_seen,
        measured_global_rows=recorder.measured_global_rows,
        wall_s=recorder.wall_s,
        recording_s=recorder.recording_s,
        timing=recorder.timing(),
        peak_bytes=peak_resident_bytes(),
        peak_device_bytes=peak_device_bytes(plan, rank),
        losses=(recorder.first_loss, recorder.last_loss),
        threads=torch.get_num_threads(),
        device=device,
        pid=os.getpid(),
        shapes=shapes.records(),
        notes=notes,
        model=facts,
    )


def _yaml(plain: dict[str, Any]) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(plain))
