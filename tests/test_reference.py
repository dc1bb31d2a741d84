"""The single device inside a run."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import userparity
from builders import make_plan_for
from torch import nn

from dpexp.batches import Inputs
from dpexp.reference import Reference, alone, aside, switch_off, undisturbed
from dpexp.schema import StrategyName, Task

CPU = torch.device("cpu")


def reference(target: str = "torch.nn.Linear", **config: object) -> Reference:
    node: dict[str, object] = {"_target_": target}
    if target == "torch.nn.Linear":
        node |= {"in_features": 5, "out_features": 2}
    plan = make_plan_for("ddp", 2, **{"task": Task.train, "model": node, **config})
    return Reference(plan, CPU, batch_norm=True)


def batch(rows: int = 10) -> Inputs:
    source = torch.Generator().manual_seed(0)
    inputs = torch.randn(rows, 5, generator=source)
    return Inputs((inputs,), {}, torch.randn(rows, 2, generator=source))


# Plans


def test_the_replayed_run_is_neither_compiled_nor_disturbed_nor_saved() -> None:
    plan = make_plan_for(
        "ddp",
        1,
        task=Task.train,
        save_weights=True,
        prepare={"compile": True},
        shapes={"print": True, "depth": 2},
        inject={"collective_delay_s": 1.0, "die_rank": 0, "noisy_rank": 0, "data_delay_s": 1.0},
    )
    config = undisturbed(plan).config
    assert (config.prepare.compile, config.shapes.print, config.shapes.depth) == (False, False, 0)
    assert config.save_weights is False
    inject = config.inject
    assert (inject.collective_delay_s, inject.data_delay_s) == (0.0, 0.0)
    off = (inject.slow_rank, inject.noisy_rank, inject.die_rank, inject.hang_rank)
    assert off == (None, None, None, None)


def test_one_device_takes_the_whole_batch_at_once() -> None:
    plan = make_plan_for("ddp", 2, task=Task.train, accumulate=3, loader={"workers": 2})
    single = alone(plan)
    assert (single.strategy, single.num_devices, single.num_processes) == (StrategyName.none, 1, 1)
    assert (single.batch_rows, single.batch_rows_per_device) == (30, 30)
    assert (single.config.accumulate, single.config.loader.workers) == (1, 0)
    assert single.config.parallel.strategy is StrategyName.none
    assert single.config.parallel.comm_hook is None


# What is switched off


def test_dropout_and_batch_norm_are_switched_off_and_named() -> None:
    model = nn.Sequential(
        nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5), nn.BatchNorm1d(2), nn.Dropout(0.0)
    )
    assert switch_off(model) == ["BatchNorm1d x2", "Dropout x1"]
    assert [module.training for module in model] == [True, False, False, False, False]
    assert model[2].p == 0.0
    assert switch_off(model) == []


def test_batch_norm_over_all_ranks_stays_on() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5))
    assert switch_off(model, batch_norm=False) == ["Dropout x1"]
    assert model[0].training


def test_the_dropout_of_attention_and_recurrent_layers_is_switched_off_too() -> None:
    model = nn.ModuleList(
        [nn.MultiheadAttention(4, 2, dropout=0.1), nn.LSTM(3, 3, 2, dropout=0.2), nn.GRU(3, 3)]
    )
    assert switch_off(model) == ["dropout of LSTM x1", "dropout of MultiheadAttention x1"]
    assert all(module.dropout == 0.0 and module.training for module in model)


def test_layers_in_eval_mode_already_are_not_named() -> None:
    assert switch_off(nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5)).eval()) == []


# Random numbers


def test_random_numbers_drawn_aside_are_not_missing() -> None:
    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), float(np.random.rand()), random.random()

    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    expected = draw()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    with aside(CPU):
        draw()
    assert draw() == expected


# Steps


def test_a_step_gives_the_loss_and_gradients_of_the_whole_batch() -> None:
    single, inputs = reference(), batch()
    layer = nn.Linear(5, 2)
    layer.load_state_dict({name: p.detach() for name, p in single.parameters.items()})
    loss = nn.functional.mse_loss(layer(inputs.args[0]), inputs.target)
    loss.backward()
    made = single.step(inputs, 10)
    assert made.loss == pytest.approx(loss.item(), rel=1e-6)
    torch.testing.assert_close(single.parameters["weight"].grad, layer.weight.grad)


def test_rows_in_another_order_change_a_gradient_by_rounding_only() -> None:
    made = reference().step(batch(), 10)
    assert made.other_loss == pytest.approx(made.loss, rel=1e-6)
    assert made.noise is not None
    assert set(made.noise) == {"weight", "bias"}
    assert max(made.noise.values()) < 1e-6


def test_a_batch_of_one_row_has_only_one_order() -> None:
    made = reference().step(batch(1), 1)
    assert made.noise == {"weight": 0.0, "bias": 0.0}


def test_a_model_that_looks_at_the_order_is_seen_but_does_not_draw() -> None:
    single, inputs = reference("userparity.RowNumber"), batch()
    made = single.step(inputs, 10)
    assert made.other_loss != pytest.approx(made.loss, rel=1e-3)
    assert not single.draws(inputs)


def test_a_model_that_draws_random_numbers_is_seen() -> None:
    plan = make_plan_for(task=Task.train, model={"_target_": "userparity.Dropping", "hidden": True})
    single = Reference(plan, CPU, batch_norm=True)
    assert single.draws(batch())


def test_looking_for_noise_leaves_the_model_as_one_call_does() -> None:
    single, inputs = reference("userparity.Remembering"), batch()
    single.step(inputs, 10)
    single.draws(inputs)
    model = single._built.model
    assert isinstance(model, userparity.Remembering)
    assert (model.calls, model.count.item()) == (1, 1.0)


def test_a_model_that_cannot_be_copied_has_no_known_noise() -> None:
    single, inputs = reference("userparity.Overwriting"), batch()
    before = inputs.args[0].clone()
    made = single.step(inputs, 10)
    assert (made.other_loss, made.noise) == (None, None)
    assert torch.equal(inputs.args[0], before)  # it writes into its own copy of the rows


def test_the_update_is_the_optimizers() -> None:
    single, inputs = reference(), batch()
    single.step(inputs, 10)
    weight = single.parameters["weight"]
    assert weight.grad is not None
    expected = weight.detach() - 0.01 * weight.grad
    single.update()
    torch.testing.assert_close(weight.detach(), expected)
    assert weight.grad is None


def test_it_is_not_compiled_even_if_the_run_is() -> None:
    single = reference(prepare={"compile": True})
    assert single._built.model._compiled_call_impl is None


def test_it_tells_whether_it_would_get_the_same_rows_itself() -> None:
    first, second = reference(), reference()
    _, fetched = next(second._built.feed.batches)
    assert first.reads_by_index
    assert first.gets(second._built.split(fetched))
    assert not first.gets(second._built.split(fetched))  # its next batch is another one
