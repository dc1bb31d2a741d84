"""nn.DataParallel's four steps over virtual devices, against one device."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from dpexp.parallel.virtual import VirtualDevices

Pair = namedtuple("Pair", "left right")


@pytest.fixture
def make_devices() -> Iterator[Callable[..., VirtualDevices]]:
    """Virtual devices whose threads end with the test."""
    made: list[VirtualDevices] = []

    def make(count: int, threads_each: int = 1) -> VirtualDevices:
        made.append(VirtualDevices(count, threads_each))
        return made[-1]

    yield make
    for devices in made:
        devices.close()


@pytest.fixture
def two(make_devices: Callable[..., VirtualDevices]) -> VirtualDevices:
    return make_devices(2)


def forward(devices: VirtualDevices, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The four steps one after the other."""
    inputs, keywords = devices.scatter(args, kwargs)
    replicas = devices.replicate(model, len(inputs))
    return devices.gather(devices.parallel_apply(replicas, inputs, keywords))


def numbers(rows: int) -> torch.Tensor:
    return torch.arange(float(rows)).reshape(rows, 1)


# Scatter


@pytest.mark.parametrize(
    ("rows", "devices", "sizes"),
    [
        (5, 4, [2, 2, 1]),
        (9, 4, [3, 3, 3]),
        (6, 4, [2, 2, 2]),
        (10, 4, [3, 3, 3, 1]),
        (10, 8, [2, 2, 2, 2, 2]),
        (17, 8, [3, 3, 3, 3, 3, 2]),
        (3, 4, [1, 1, 1]),
    ],
)
def test_scatter_cuts_into_as_many_chunks_as_there_are_rows_for(
    make_devices: Callable[..., VirtualDevices], rows: int, devices: int, sizes: list[int]
) -> None:
    inputs, keywords = make_devices(devices).scatter((numbers(rows),), {})
    assert [len(call[0]) for call in inputs] == sizes
    assert torch.equal(torch.cat([call[0] for call in inputs]), numbers(rows))
    assert keywords == ({},) * len(sizes)


def test_a_keyword_that_is_no_tensor_gives_every_device_a_call_also_without_rows(
    two: VirtualDevices,
) -> None:
    inputs, keywords = two.scatter((numbers(1),), {"delta": 3})
    assert [len(call) for call in inputs] == [1, 0]
    assert keywords == ({"delta": 3}, {"delta": 3})


def test_tensors_among_the_keywords_are_cut_too(two: VirtualDevices) -> None:
    inputs, keywords = two.scatter((), {"x": numbers(3), "n": 7})
    assert inputs == ((), ())
    assert [keyword["x"].flatten().tolist() for keyword in keywords] == [[0.0, 1.0], [2.0]]
    assert [keyword["n"] for keyword in keywords] == [7, 7]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: (x, "text"),
        lambda x: [x, None],
        lambda x: {"a": x, "n": 3},
        lambda x: OrderedDict(a=x),
        lambda x: Pair(x, {"b": [x]}),
        lambda x: [(x, [x])],
    ],
    ids=["tuple", "list", "dict", "OrderedDict", "namedtuple", "nested"],
)
def test_scatter_keeps_the_structure_of_an_input_on_every_device(
    two: VirtualDevices, wrap: Callable[[Any], Any]
) -> None:
    inputs, _ = two.scatter((wrap(numbers(3)),), {})
    assert [type(call[0]) for call in inputs] == [type(wrap(0))] * 2
    assert str(inputs[0][0]) == str(wrap(torch.tensor([[0.0], [1.0]])))
    assert str(inputs[1][0]) == str(wrap(torch.tensor([[2.0]])))


@pytest.mark.parametrize("value", [3, "text", None, (), [], {}])
def test_what_holds_no_tensor_is_repeated(two: VirtualDevices, value: Any) -> None:
    inputs, _ = two.scatter((value,), {})
    assert inputs == ((value,), (value,))


# Gather


def test_outputs_are_joined_in_the_order_of_the_devices(two: VirtualDevices) -> None:
    assert two.gather([numbers(2), numbers(1)]).flatten().tolist() == [0.0, 1.0, 0.0]


def test_scalars_become_a_vector_with_one_entry_per_device(two: VirtualDevices) -> None:
    gathered = two.gather([torch.tensor(1.0), torch.tensor(3.0)])
    assert gathered.tolist() == [1.0, 3.0]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: (x, None),
        lambda x: [x, [x]],
        lambda x: {"a": x, "b": (x,)},
        lambda x: OrderedDict(a=x),
        lambda x: Pair(x, {"b": [x]}),
    ],
    ids=["tuple", "list", "dict", "OrderedDict", "namedtuple"],
)
def test_gather_keeps_the_structure_of_an_output(
    two: VirtualDevices, wrap: Callable[[Any], Any]
) -> None:
    gathered = two.gather([wrap(torch.tensor([0.0, 1.0])), wrap(torch.tensor([2.0]))])
    assert type(gathered) is type(wrap(0))
    assert str(gathered) == str(wrap(torch.tensor([0.0, 1.0, 2.0])))


def test_nothing_from_every_device_is_nothing(two: VirtualDevices) -> None:
    assert two.gather([None, None]) is None


def test_dicts_with_other_numbers_of_keys_cannot_be_gathered(two: VirtualDevices) -> None:
    x = torch.zeros(1)
    with pytest.raises(ValueError, match="same number of keys"):
        two.gather([{"a": x}, {"a": x, "b": x}])


def test_dicts_with_other_keys_cannot_be_gathered(two: VirtualDevices) -> None:
    x = torch.zeros(1)
    with pytest.raises(KeyError, match="a"):
        two.gather([{"a": x}, {"b": x}])


# Replicate


class Counter(nn.Module):
    """Counts its calls in a plain attribute and in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("buf", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.buf += 1
        return x


class Tied(nn.Module):
    """Uses one weight twice, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.nothing = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Recurrent(nn.Module):
    """A GRU, which keeps its weights in a list of its own besides."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 4, num_layers=2, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(x.unsqueeze(1))[0][:, -1])


class Keyword(nn.Module):
    """Takes a tensor and a number as keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor, scale: float) -> torch.Tensor:
        return self.layer(x * mask) * scale


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 2)))


def test_replicas_list_no_parameters_and_the_model_keeps_its_own(two: VirtualDevices) -> None:
    model = mlp()
    before = list(model.parameters())
    replicas = two.replicate(model, 2)
    assert [list(replica.parameters()) for replica in replicas] == [[], []]
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert len(before) == 4


def test_without_gradients_the_replicas_list_no_parameters_but_for_the_first_as_in_torch(
    two: VirtualDevices,
) -> None:
    with torch.no_grad():
        replicas = two.replicate(mlp(), 2)
    assert list(replicas[1].parameters()) == []


def test_a_replicas_parameters_are_tensors_that_lead_back_to_the_model(two: VirtualDevices) -> None:
    model = nn.Linear(3, 2)
    for replica in two.replicate(model, 2):
        weight = replica.weight
        assert not isinstance(weight, nn.Parameter)
        assert (weight.is_leaf, weight.requires_grad) == (False, True)
        assert torch.equal(weight, model.weight)


def test_a_frozen_parameter_stays_frozen_in_every_replica(two: VirtualDevices) -> None:
    model = nn.Linear(3, 2)
    model.weight.requires_grad_(False)
    assert [
        (replica.weight.requires_grad, replica.bias.requires_grad)
        for replica in two.replicate(model, 2)
    ] == [(False, True)] * 2


def test_only_the_first_replica_shares_storage_with_the_model(two: VirtualDevices) -> None:
    model = nn.BatchNorm1d(3)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            first, second = two.replicate(model, 2)
        for name in ("weight", "running_mean", "num_batches_tracked"):
            own = getattr(model, name).data_ptr()
            assert getattr(first, name).data_ptr() == own
            assert getattr(second, name).data_ptr() != own


def test_replicas_have_submodules_of_their_own(two: VirtualDevices) -> None:
    model = mlp()
    modules = [set(map(id, net.modules())) for net in (model, *two.replicate(model, 2))]
    assert [len(each) for each in modules] == [5, 5, 5]
    assert len(set.union(*modules)) == 15


def test_a_weight_used_twice_is_one_tensor_in_a_replica(two: VirtualDevices) -> None:
    for replica in two.replicate(Tied(), 2):
        assert replica.first.weight is replica.second.weight


def test_absent_parameters_buffers_and_children_stay_absent(two: VirtualDevices) -> None:
    model = nn.Sequential(nn.Linear(3, 2, bias=False))
    model.add_module("gap", None)
    model.register_buffer("hole", None)
    for replica in two.replicate(model, 2):
        assert replica[0].bias is None
        assert replica.gap is None
        assert replica.hole is None


def test_of_what_forward_changes_only_buffers_of_the_first_replica_survive(
    two: VirtualDevices,
) -> None:
    model = Counter()
    for _ in range(10):
        forward(two, model, numbers(4))
    assert (model.calls, model.buf.item()) == (0, 10.0)


def test_the_models_mode_is_the_replicas_mode(two: VirtualDevices) -> None:
    for training in (True, False):
        replicas = two.replicate(mlp().train(training), 2)
        assert {module.training for net in replicas for module in net.modules()} == {training}


# Parallel apply


def call_all(devices: VirtualDevices, calls: list[Callable[[], Any]]) -> list[Any]:
    return devices.parallel_apply(calls, [()] * len(calls), [{}] * len(calls))


def test_each_replica_runs_in_a_thread_of_its_own(
    make_devices: Callable[..., VirtualDevices],
) -> None:
    barrier = threading.Barrier(3, timeout=30)  # breaks unless three threads come together

    def call() -> int:
        barrier.wait()
        return threading.get_ident()

    threads = call_all(make_devices(3), [call] * 3)
    assert len({*threads, threading.get_ident()}) == 4


def test_a_device_keeps_its_thread_also_where_the_calls_are_short(two: VirtualDevices) -> None:
    # An executor with two threads gives both calls to one where the first call ends in time.
    seen = {tuple(call_all(two, [threading.get_ident] * 2)) for _ in range(200)}
    assert len(seen) == 1
    assert len(set(seen.pop())) == 2


def test_a_device_uses_its_share_of_threads_and_leaves_this_threads_alone(
    make_devices: Callable[..., VirtualDevices],
) -> None:
    before = torch.get_num_threads()
    threads = call_all(make_devices(2, threads_each=before + 1), [torch.get_num_threads] * 2)
    assert threads == [before + 1, before + 1]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("count", [1, 3])
def test_grad_mode_and_autocast_are_carried_into_the_threads(
    make_devices: Callable[..., VirtualDevices], count: int
) -> None:
    def modes() -> tuple[bool, bool]:
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

    devices = make_devices(3)
    assert call_all(devices, [modes] * count) == [(True, False)] * count
    with torch.no_grad(), torch.autocast("cpu"):
        assert call_all(devices, [modes] * count) == [(False, True)] * count
    assert call_all(devices, [modes] * count) == [(True, False)] * count


def test_the_first_failed_replicas_error_is_raised_after_all_have_ended(
    make_devices: Callable[..., VirtualDevices],
) -> None:
    failed, ended = threading.Event(), []

    def slow() -> None:
        failed.wait(30)
        ended.append("slow")

    def fail_late() -> None:
        failed.wait(30)
        raise ValueError("the second replica")

    def fail_early() -> None:
        failed.set()
        raise ValueError("the third replica")

    with pytest.raises(ValueError, match="the second replica"):
        call_all(make_devices(3), [slow, fail_late, fail_early])
    assert ended == ["slow"]


def test_devices_can_be_used_again_after_an_error(two: VirtualDevices) -> None:
    def fail() -> None:
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        call_all(two, [fail, fail])
    assert call_all(two, [lambda: 1, lambda: 2]) == [1, 2]


def test_fewer_calls_than_devices_call_nobody_else(
    make_devices: Callable[..., VirtualDevices],
) -> None:
    called: list[int] = []
    calls: list[Callable[[], Any]] = [lambda i=i: called.append(i) for i in range(2)]
    call_all(make_devices(4), calls)
    assert sorted(called) == [0, 1]


# Against one device

CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "mlp": (mlp, {}),
    "tied": (Tied, {}),
    "gru": (Recurrent, {}),
    "keyword": (Keyword, {"mask": None, "scale": 3.0}),
}


def gradients(model: nn.Module, output: torch.Tensor) -> list[torch.Tensor]:
    target = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)
    loss = ((output - target) ** 2).mean()
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("rows", "count"), [(8, 2), (5, 2), (9, 4), (5, 4), (3, 4), (1, 2)])
def test_outputs_and_gradients_equal_those_of_one_device(
    make_devices: Callable[..., VirtualDevices], case: str, rows: int, count: int
) -> None:
    torch.manual_seed(1)
    make_model, kwargs = CASES[case]
    model, x = make_model(), torch.randn(rows, 3)
    if "mask" in kwargs:
        kwargs = {**kwargs, "mask": torch.rand(rows, 3)}
    alone = copy.deepcopy(model)
    expected = alone(x, **kwargs)

    # A keyword that is no tensor makes calls without rows; dropping those is not done here.
    devices = make_devices(min(count, rows) if kwargs else count)
    output = forward(devices, model, x, **kwargs)

    torch.testing.assert_close(output, expected, rtol=0, atol=1e-6)
    for got, wanted in zip(gradients(model, output), gradients(alone, expected), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)


def test_the_gradient_of_the_inputs_comes_back_too(two: VirtualDevices) -> None:
    x = numbers(3).requires_grad_()
    (forward(two, nn.Identity(), x) ** 2).sum().backward()
    assert x.grad is not None
    assert x.grad.flatten().tolist() == [0.0, 2.0, 4.0]


def test_a_parameter_that_only_one_replica_uses_gets_that_replicas_gradient(
    two: VirtualDevices,
) -> None:
    class Choosy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Parameter(torch.ones(()))
            self.high = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (self.high if x.max() > 1 else self.low)

    model = Choosy()
    forward(two, model, numbers(4)).sum().backward()  # rows 0, 1 and rows 2, 3
    assert (model.low.grad, model.high.grad) == (torch.tensor(1.0), torch.tensor(5.0))


def test_without_gradients_the_output_is_the_same_and_has_no_history(two: VirtualDevices) -> None:
    model, x = mlp(), torch.ones(3, 3)
    with torch.no_grad():
        output = forward(two, model, x)
        torch.testing.assert_close(output, model(x), rtol=0, atol=1e-6)
    assert not output.requires_grad
