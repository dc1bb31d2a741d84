"""The strategies dp and none, driven as the step loop drives them."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from builders import make_context
from torch import nn
from usercode import Lin1, Lin1WithLoss, ramp5

from dpexp.batches import Inputs
from dpexp.errors import ConfigError
from dpexp.parallel import Strategy, make_strategy
from dpexp.parallel.dp import DataParallel
from dpexp.parallel.none import SingleDevice
from dpexp.parallel.replicas import ReplicaError
from dpexp.schema import StrategyName
from dpexp.shapes import watch_submodules

Pair = namedtuple("Pair", "left right")
Wrapped = Callable[..., Strategy]


@dataclass
class Output:
    first: torch.Tensor
    second: torch.Tensor


@pytest.fixture
def wrapped() -> Iterator[Wrapped]:
    """A strategy around a model; its threads end with the test."""
    made: list[Strategy] = []

    def wrap(model: nn.Module, num_devices: int, name: str = "dp") -> Strategy:
        strategy = make_strategy(StrategyName(name), make_context(name, num_devices))
        strategy.wrap(model)
        made.append(strategy)
        return strategy

    yield wrap
    for strategy in made:
        strategy.close()


def call(strategy: Strategy, *args: Any, **kwargs: Any) -> Any:
    rows = len(next(value for value in (*args, *kwargs.values()) if torch.is_tensor(value)))
    return strategy.forward(Inputs(args, kwargs, None), strategy.own_rows(rows))


def numbers(rows: int) -> torch.Tensor:
    return torch.arange(float(rows)).reshape(rows, 1)


class Returning(nn.Module):
    """Returns what `make` makes of its input."""

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(x)


class Shifted(nn.Module):
    def forward(self, x: torch.Tensor, *, delta: int) -> torch.Tensor:
        return x + delta


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("buf", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.buf += 1
        return x


def test_a_strategy_is_made_by_its_name() -> None:
    assert type(make_strategy(StrategyName.dp, make_context("dp", 2))) is DataParallel
    assert type(make_strategy(StrategyName.none, make_context("none", 1))) is SingleDevice


@pytest.mark.parametrize(("name", "count"), [("none", 1), ("dp", 3)])
def test_one_process_loads_all_rows_of_the_batch(wrapped: Wrapped, name: str, count: int) -> None:
    strategy = wrapped(nn.Identity(), count, name)
    rows = np.array([4, 2, 7])
    assert strategy.choose_rows(rows).tolist() == [4, 2, 7]
    assert strategy.own_rows(3) == 3


@pytest.mark.parametrize(
    ("rows", "sizes"), [(9, [3, 3, 3]), (5, [2, 2, 1]), (3, [1, 1, 1]), (10, [3, 3, 3, 1])]
)
def test_a_batch_is_cut_for_four_devices_and_comes_back_in_its_order(
    wrapped: Wrapped, rows: int, sizes: list[int]
) -> None:
    strategy = wrapped(nn.Identity(), 4)
    assert call(strategy, numbers(rows)).flatten().tolist() == list(range(rows))
    seen = [(row.replica, row.input_shape) for row in strategy.shapes.records()]
    assert seen == [(replica, f"[{size}, 1]") for replica, size in enumerate(sizes)]


def test_an_idle_replica_is_not_noted_again_from_the_step_before(wrapped: Wrapped) -> None:
    strategy = wrapped(nn.Identity(), 4)
    for step, rows in enumerate((10, 9)):
        strategy.shapes.step = step
        call(strategy, numbers(rows))
    last = [(row.replica, row.count, row.last_step) for row in strategy.shapes.records()]
    assert last == [(0, 2, 1), (1, 2, 1), (2, 2, 1), (3, 1, 0)]


def test_three_replicas_are_called_under_numbers_of_their_own(wrapped: Wrapped) -> None:
    model = nn.Sequential(nn.Linear(1, 2), nn.ReLU())
    strategy = wrapped(model, 3)
    with watch_submodules(model, 1, strategy.shapes):
        call(strategy, numbers(6))
    assert [(row.module, row.replica) for row in strategy.shapes.records()] == [
        (module, replica) for module in ("", "0", "1") for replica in (0, 1, 2)
    ]


def test_a_keyword_with_a_single_row_calls_one_replica_and_equals_one_device(
    wrapped: Wrapped,
) -> None:
    alone = call(wrapped(Shifted(), 1, "none"), numbers(1), delta=3)
    strategy = wrapped(Shifted(), 2)
    assert torch.equal(call(strategy, numbers(1), delta=3), alone)
    assert len(strategy.shapes.records()) == 1


def test_inputs_may_come_as_keywords_only(wrapped: Wrapped) -> None:
    output = call(wrapped(Shifted(), 4), x=numbers(5), delta=1)
    assert output.flatten().tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_each_forward_adds_the_marks_of_its_own_four_steps(wrapped: Wrapped) -> None:
    strategy = wrapped(nn.Identity(), 2)
    for forwards in (1, 2):
        call(strategy, numbers(4))
        assert len(strategy.parts) == 4 * forwards
    assert strategy.parts[4:] == [(9, 10), (11, 12), (13, 14), (15, 16)]  # the second forward's


def test_one_device_is_called_without_copies_and_has_no_four_steps(wrapped: Wrapped) -> None:
    model = Counter()
    strategy = wrapped(model, 1)
    assert torch.equal(call(strategy, numbers(3)), numbers(3))
    assert strategy.parts == []
    assert (model.calls, model.buf.item()) == (1, 1.0)
    assert [row.input_shape for row in strategy.shapes.records()] == ["[3, 1]"]


def test_a_counter_changed_in_forward_stays_under_dp_and_a_buffer_does_not(
    wrapped: Wrapped,
) -> None:
    model, alone = Counter(), Counter()
    spread, single = wrapped(model, 2), wrapped(alone, 1, "none")
    for _ in range(10):
        call(spread, numbers(4))
        call(single, numbers(4))
    assert (model.calls, model.buf.item()) == (0, 10.0)
    assert (alone.calls, alone.buf.item()) == (10, 10.0)


@pytest.mark.parametrize(
    ("name", "count", "mean", "variance"), [("dp", 2, 0.1, 1.1), ("none", 1, 0.65, 5.26667)]
)
def test_batch_norm_statistics_come_from_the_first_devices_rows(
    wrapped: Wrapped, name: str, count: int, mean: float, variance: float
) -> None:
    model = nn.BatchNorm1d(1, momentum=0.1)
    call(wrapped(model, count, name), torch.tensor([[0.0], [2.0], [10.0], [14.0]]))
    assert model.running_mean is not None
    assert model.running_var is not None
    assert model.running_mean.item() == pytest.approx(mean, abs=1e-6)
    assert model.running_var.item() == pytest.approx(variance, abs=1e-5)
    assert model.num_batches_tracked is not None
    assert model.num_batches_tracked.item() == 1


def test_a_single_row_on_a_replica_that_batch_norm_refuses_is_named(wrapped: Wrapped) -> None:
    x = torch.randn(5, 3)
    call(wrapped(nn.BatchNorm1d(3), 1, "none"), x)
    with pytest.raises(ReplicaError, match="Expected more than 1 value per channel") as caught:
        call(wrapped(nn.BatchNorm1d(3), 4), x)
    assert caught.value.replica == 2
    assert "in replica 2 with input [1, 3]" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_model_that_asks_a_replica_for_its_first_parameter_is_told_why_it_has_none(
    wrapped: Wrapped,
) -> None:
    class Asking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.to(next(self.parameters()).device))

    for enabled in (True, False):
        with (
            torch.set_grad_enabled(enabled),
            pytest.raises(ReplicaError, match=r"parameters\(\) is empty in a replica"),
        ):
            call(wrapped(Asking(1, 1), 2), numbers(4))


def test_a_hidden_state_whose_batch_is_its_second_dimension_is_refused(wrapped: Wrapped) -> None:
    strategy = wrapped(nn.GRU(3, 8, num_layers=2, batch_first=True), 2)
    with pytest.raises(ConfigError, match=r"shape \[2, 4, 8\] in a batch of 4 rows"):
        strategy.forward(Inputs((torch.zeros(4, 6, 3), torch.zeros(2, 4, 8)), {}, None), 4)


def test_a_list_of_images_is_not_cut_along_their_channels(wrapped: Wrapped) -> None:
    images = [torch.zeros(4, 8, 8), torch.zeros(6, 8, 8)]
    with pytest.raises(ConfigError, match=r"shape \[4, 8, 8\] in a batch of 2 rows"):
        wrapped(Returning(lambda x: x[0]), 2).forward(Inputs((images,), {}, None), 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: {"loss": x, "aux": None, "parts": [x + 1, [x + 2]]},
        lambda x: (x, (x, None)),
        lambda x: Pair(x, {"a": x}),
        lambda x: [x],
    ],
    ids=["dict", "tuple", "namedtuple", "list"],
)
def test_a_nested_output_keeps_its_structure_and_equals_one_devices(
    wrapped: Wrapped, make: Callable[[torch.Tensor], Any]
) -> None:
    spread = call(wrapped(Returning(make), 2), numbers(5))
    alone = call(wrapped(Returning(make), 1, "none"), numbers(5))
    assert type(spread) is type(alone)
    assert str(spread) == str(alone)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda x: {"loss": x, "k": 3}, r"output\['k'\], which is of type int"),
        (lambda x: Output(x, x), "output, which is of type Output"),
    ],
    ids=["number", "dataclass"],
)
def test_an_output_that_torch_cannot_gather_is_refused_by_name_and_type(
    wrapped: Wrapped, make: Callable[[torch.Tensor], Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        call(wrapped(Returning(make), 2), numbers(4))


@pytest.mark.parametrize(("rows", "entries"), [(4, 4), (3, 3), (5, 3), (1, 1)])
def test_a_models_own_losses_are_one_entry_per_active_replica(
    wrapped: Wrapped, rows: int, entries: int
) -> None:
    strategy = wrapped(Returning(torch.mean), 4)
    losses = call(strategy, numbers(rows))
    assert losses.shape == (entries,)
    loss = strategy.weigh(losses, rows, rows)
    assert loss.dim() == 0
    assert loss.item() == pytest.approx((rows - 1) / 2)  # the mean of 0 .. rows - 1


def test_torchs_warning_about_gathered_scalars_is_not_repeated_at_each_step(
    wrapped: Wrapped,
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped(nn.Identity(), 2)
        for _ in range(20):
            warnings.warn(
                "Was asked to gather along dimension 0, but all input tensors were scalars; "
                "will instead unsqueeze and return a vector.",
                stacklevel=1,
            )
    assert len(caught) <= 1


@pytest.mark.parametrize(("name", "count"), [("none", 1), ("dp", 2), ("dp", 4), ("dp", 8)])
def test_the_weighted_mean_of_the_replicas_means_is_the_mean_over_the_rows(
    wrapped: Wrapped, name: str, count: int
) -> None:
    strategy = wrapped(Returning(torch.mean), count, name)
    loss = strategy.weigh(call(strategy, numbers(5)), 5, 5)
    assert loss.item() == pytest.approx(2.0, abs=1e-6)  # the plain mean of the pieces is 2.3333


@pytest.mark.parametrize(("name", "count"), [("none", 1), ("dp", 2), ("dp", 4), ("dp", 8)])
@pytest.mark.parametrize("inside", [True, False], ids=["loss in the model", "loss outside"])
def test_the_gradient_of_five_uneven_rows_is_twelve_on_any_number_of_devices(
    wrapped: Wrapped, name: str, count: int, inside: bool
) -> None:
    model = Lin1WithLoss() if inside else Lin1()
    strategy = wrapped(model, count, name)
    x = ramp5().__getitems__(range(5))[0]
    output = call(strategy, x)
    loss = strategy.weigh(output if inside else (output**2).mean(), 5, 5)
    loss.backward()
    assert loss.item() == pytest.approx(6.0, abs=1e-5)
    assert model.layer.weight.grad is not None
    assert model.layer.weight.grad.item() == pytest.approx(12.0, abs=1e-5)


@pytest.mark.parametrize("count", [2, 3, 4, 16])
def test_training_over_uneven_batches_gives_the_weights_of_one_device(
    wrapped: Wrapped, count: int
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    alone = copy.deepcopy(model)
    x, y = torch.randn(23, 3), torch.randn(23, 2)
    strategy = wrapped(model, count)
    for start in range(0, 23, 10):  # batches of 10, 10 and 3
        batch, target = x[start : start + 10], y[start : start + 10]
        output = call(strategy, batch)
        loss = strategy.weigh(((output - target) ** 2).mean(), len(batch), len(batch))
        step(model, loss)
        step(alone, ((alone(batch) - target) ** 2).mean())
    for got, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)


def step(model: nn.Module, loss: torch.Tensor) -> None:
    """One step of gradient descent."""
    parameters = list(model.parameters())
    with torch.no_grad():
        for parameter, gradient in zip(
            parameters, torch.autograd.grad(loss, parameters), strict=True
        ):
            parameter.sub_(gradient, alpha=0.1)


def test_the_models_own_state_has_no_prefix_while_it_is_wrapped(wrapped: Wrapped) -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    call(wrapped(model, 2), numbers(2))
    assert list(model.state_dict()) == ["0.weight", "0.bias"]


class WithExtra(nn.Linear):
    """A model with a method of its own."""

    def extra_loss(self) -> torch.Tensor:
        return self.weight.sum()


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda wrapped: pickle.loads(pickle.dumps(wrapped))],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_of_the_wrapped_model_has_its_parameters_and_methods(
    wrapped: Wrapped, copied: Callable[[nn.Module], Any]
) -> None:
    strategy = wrapped(WithExtra(3, 2), 2)
    assert isinstance(strategy, DataParallel)
    model = strategy._model
    twin = copied(model)
    assert torch.equal(twin.module.weight, model.module.weight)
    assert twin.module.extra_loss().item() == model.module.extra_loss().item()


def test_after_closing_the_strategy_holds_no_model_and_no_threads(wrapped: Wrapped) -> None:
    strategy = make_strategy(StrategyName.dp, make_context("dp", 3))
    strategy.wrap(nn.Identity())
    call(strategy, numbers(6))
    strategy.close()  # threads left behind fail every test
    assert not hasattr(strategy, "_model")
