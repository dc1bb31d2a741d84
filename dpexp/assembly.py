"""Puts the parts of a rank together: dataset, model, strategy, optimizer."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dpexp.batches import Split, make_split, seed_all, seed_of_rank
from dpexp.build import build, build_callable, build_model
from dpexp.comm import Comm
from dpexp.disturb import disturb_forward, disturbed
from dpexp.feed import Feed, make_feed, pins
from dpexp.losses import make_loss
from dpexp.masking import MaskedTargets
from dpexp.metrics import Scoring, make_scoring
from dpexp.optimizers import build_lr_scheduler, build_optimizer
from dpexp.parallel import Context, Strategy, make_strategy
from dpexp.plan import RunPlan
from dpexp.precision import autocast, make_scaler
from dpexp.prepare import compile_model, prepare_model
from dpexp.schema import Task
from dpexp.shapes import ShapeLog
from dpexp.timing import Clock
from dpexp.training import Training
from dpexp.transfer import Transfer, make_transfer
from dpexp.weights import fingerprint


@dataclass(frozen=True)
class Assembly:
    """All that the steps of a rank need.

    It holds the DDP object: whoever has one lets go of it before the process group is destroyed,
    after `strategy.close()` (see worker.py).
    """

    model: nn.Module  # not wrapped
    strategy: Strategy
    feed: Feed
    transfer: Transfer
    split: Split
    autocast: AbstractContextManager[Any]
    training: Training | None  # of task=train
    scoring: Scoring | None  # of task=evaluate
    facts: dict[str, Any]  # of the model before its first step
    notes: tuple[str, ...]


def put_together(
    plan: RunPlan,
    comm: Comm,
    device: torch.device,
    clock: Clock[Any],
    shapes: ShapeLog,
    first: int = 0,
    *,
    again: bool = False,
) -> Assembly:
    """Build everything, with the seeds of the config: twice the same.

    Seeds torch, numpy and random; at the end with this rank's own seed. A point where the ranks
    meet, under ddp and fsdp.

    Args:
        first: the step that the batches begin with.
        again: this is not the run's first attempt, in which alone a rank is lost on purpose.

    Raises:
        ConfigError: something does not fit together.
    """
    config = plan.config
    inject = config.inject
    if again:
        inject = replace(inject, die_rank=None, hang_rank=None)
    strategy = make_strategy(plan.strategy, Context(plan, comm, device, clock, shapes))

    seed_all(config.seed)
    dataset = build("dataset", config.dataset)
    feed = make_feed(dataset, plan, strategy.choose_rows, comm, device, first)
    feed = replace(feed, batches=disturbed(feed.batches, inject, comm.rank))
    transfer = make_transfer(device, channels_last=config.prepare.channels_last, pin=pins(plan))

    seed_all(config.seed)  # again, so that the weights do not depend on the dataset's draws
    model, notes = prepare_model(build_model(config.model, device), plan)
    training_here = config.task is Task.train
    disturb_forward(model, config.inject, comm.rank, config.seed, training=training_here)
    facts = _model_facts(model, comm.rank)
    strategy.wrap(model)
    compile_model(model, config.prepare)
    model.train(config.task is not Task.evaluate)
    training = _training(plan, comm, model, device, feed.steps)
    scoring = _scoring(plan, comm)
    seed_all(seed_of_rank(config.seed, comm.rank))
    return Assembly(
        model,
        strategy,
        feed,
        transfer,
        make_split(config.batch, config.forward_kwargs),
        autocast(config.precision, device),
        training,
        scoring,
        facts,
        (*feed.notes, *notes),
    )


def _training(
    plan: RunPlan, comm: Comm, model: torch.nn.Module, device: torch.device, steps: int | None
) -> Training | None:
    config = plan.config
    if config.task is not Task.train:
        return None
    custom = build_callable("loss", config.loss) if isinstance(config.loss, dict) else None
    optimizer = build_optimizer(config.optimizer, model, zero=bool(config.parallel.zero))
    if steps is None:
        steps = config.steps
    return Training(
        make_loss(config.loss, custom),
        model,
        optimizer,
        make_scaler(config.precision, device),
        config.clip_grad_norm,
        build_lr_scheduler(config.lr_scheduler, optimizer, steps),
        MaskedTargets(
            comm,
            applies=config.loss in ("auto", "cross_entropy")
            and (comm.world_size > 1 or config.accumulate > 1),
        ),
        own_loss_first=config.loss == "auto",
    )


def _scoring(plan: RunPlan, comm: Comm) -> Scoring | None:
    config = plan.config
    if config.task is not Task.evaluate:
        return None
    custom = build_callable("metric", config.metric) if isinstance(config.metric, dict) else None
    replicas = plan.num_devices if plan.num_processes == 1 else 1
    return make_scoring(config.metric, custom, comm, replicas)


def _model_facts(model: torch.nn.Module, rank: int) -> dict[str, Any]:
    parameters = list(model.parameters())
    facts = {
        "parameters": sum(p.numel() for p in parameters),
        "parameter_tensors": len(parameters),
        "trainable_parameters": sum(p.numel() for p in parameters if p.requires_grad),
    }
    return (
        {**facts, "initial_sha256": fingerprint(model.state_dict())} if rank == 0 else dict(facts)
    )
