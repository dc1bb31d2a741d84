"""DDP's communication hooks, on a model that only notes what it is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from builders import TickClock, make_config
from fakeevents import Event, waits
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from dpexp import timing
from dpexp.parallel.collectives import CollectiveLog
from dpexp.parallel.hooks import add_comm_hook
from dpexp.schema import CommHook
from dpexp.timing import Clock, EventClock


class Model:
    """Stands in for torch's wrapper."""

    process_group: Any = None

    def __init__(self) -> None:
        self.hooks: list[tuple[Any, Any]] = []

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        self.hooks.append((state, hook))


class Bucket:
    """A bucket of gradients."""

    def __init__(self, *gradients: torch.Tensor) -> None:
        self._gradients = list(gradients)
        self.flat = torch.cat([gradient.flatten() for gradient in gradients])

    def buffer(self) -> torch.Tensor:
        return self.flat

    def gradients(self) -> list[torch.Tensor]:
        return self._gradients


class SparseBucket(Bucket):
    """Its buffer is the gradient of an embedding."""

    def __init__(self, gradient: torch.Tensor) -> None:
        self.flat = gradient


class Done:
    """A collective that is over."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self.future.set_result([tensor])

    def get_future(self) -> torch.futures.Future[Any]:
        return self.future


Reduced = list[torch.Tensor]


@pytest.fixture
def reduced(monkeypatch: pytest.MonkeyPatch) -> Reduced:
    """What two ranks that bring the same have all-reduced, as it was sent."""
    sent: Reduced = []

    def all_reduce(tensor: torch.Tensor, async_op: bool) -> Done:
        assert async_op
        sent.append(tensor.clone())
        return Done(tensor + tensor)

    def allreduce(tensors: list[torch.Tensor], options: Any) -> Done:
        (tensor,) = tensors
        return all_reduce(tensor, options.asyncOp)

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(Model, "process_group", SimpleNamespace(allreduce=allreduce))
    return sent


def hooks(
    name: CommHook, log: CollectiveLog | None = None, **options: Any
) -> tuple[list[tuple[Any, Any]], bool]:
    """What is registered, and whether gradients are added up."""
    model: Any = Model()
    options = {"comm_hook": name, **options}
    added_up = add_comm_hook(model, make_config("ddp", parallel=options).parallel, log)
    return model.hooks, added_up


def hook_of(name: CommHook, log: CollectiveLog | None = None, **options: Any) -> Any:
    ((_state, hook),), _ = hooks(name, log, **options)
    return lambda bucket: hook(None, bucket).value()


def timed(clock: Clock[Any] | None = None, **options: Any) -> CollectiveLog:
    return CollectiveLog(clock or TickClock(), 2, blocking=False, **options)


def test_without_a_hook_and_without_times_gradients_travel_as_they_are() -> None:
    assert hooks(CommHook.none) == ([], False)


@pytest.mark.parametrize("log", [None, timed()], ids=["not timed", "timed"])
def test_fp16_is_torchs_own_hook(
    log: CollectiveLog | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def torchs_own(group: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        given.append((group, bucket))
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer() * 3)
        return done

    monkeypatch.setattr(default_hooks, "fp16_compress_hook", torchs_own)
    bucket = Bucket(torch.ones(2))
    assert hook_of(CommHook.fp16, log)(bucket).tolist() == [3, 3]
    assert given == [(None, bucket)]


def test_powersgd_is_torchs_own_hook_with_the_options_of_the_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[tuple[Any, Any]] = []
    monkeypatch.setattr(powerSGD_hook, "powerSGD_hook", lambda *both: given.append(both))
    ((_, hook),), _ = hooks(CommHook.powersgd, powersgd_rank=3, powersgd_start=7)
    hook(None, "bucket")
    ((state, bucket),) = given
    assert (state.matrix_approximation_rank, state.start_powerSGD_iter) == (3, 7)
    assert bucket == "bucket"


@pytest.mark.parametrize("log", [None, timed()], ids=["not timed", "timed"])
def test_bf16_sends_half_the_bytes_and_gives_the_mean_in_the_buckets_format(
    log: CollectiveLog | None, reduced: Reduced
) -> None:
    bucket = Bucket(torch.tensor([1.0, -3.0, 0.5]))
    result = hook_of(CommHook.bf16, log)(bucket)
    assert reduced[0].dtype == torch.bfloat16
    assert reduced[0].tolist() == [0.5, -1.5, 0.25]
    assert (result.dtype, result.tolist()) == (torch.float32, [1.0, -3.0, 0.5])
    assert result is bucket.flat


def test_timed_without_compression_gradients_are_added_up_and_not_averaged(
    reduced: Reduced,
) -> None:
    log = timed()
    registered, added_up = hooks(CommHook.none, log)
    ((_state, hook),) = registered
    assert added_up
    assert hook(None, Bucket(torch.tensor([1.0, -3.0]))).value().tolist() == [2, -6]


@pytest.mark.parametrize("name", [CommHook.fp16, CommHook.bf16, CommHook.powersgd])
def test_a_hook_that_averages_says_so(name: CommHook) -> None:
    options = {"powersgd_rank": 1, "powersgd_start": 2} if name is CommHook.powersgd else {}
    assert not hooks(name, timed(), **options)[1]


def test_each_bucket_is_noted_when_it_is_ready_and_when_it_is_done(reduced: Reduced) -> None:
    clock = TickClock()
    log = timed(clock)
    hook = hook_of(CommHook.none, log)
    hook(Bucket(torch.ones(3)))
    clock.ticks = 10
    hook(Bucket(torch.ones(5), torch.ones(2, 2)))
    assert [(each.kind, each.num_bytes) for each in log.noted] == [
        ("all_reduce", 12),
        ("all_reduce", 36),
    ]
    assert [(each.ready, each.end) for each in log.noted] == [(1, 2), (11, 12)]
    assert [each.bus_bytes for each in log.noted] == [12, 36]  # 2 (n - 1) / n = 1 on two ranks


def test_a_bucket_is_not_done_before_its_collective_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pending: torch.futures.Future[Any] = torch.futures.Future()

    class Work:
        def get_future(self) -> torch.futures.Future[Any]:
            return pending

    group = SimpleNamespace(allreduce=lambda _tensors, _options: Work())
    monkeypatch.setattr(Model, "process_group", group)
    log = timed()
    ((_state, hook),), _ = hooks(CommHook.none, log)
    future = hook(None, Bucket(torch.ones(1)))
    assert (log.noted[0].ready, log.noted[0].end) == (1, None)
    pending.set_result([torch.tensor([4.0])])
    assert future.wait().tolist() == [4]
    assert log.noted[0].end == 2


def test_an_injected_delay_lies_between_ready_and_done(reduced: Reduced) -> None:
    clock = TickClock()

    def pause() -> None:
        clock.ticks += 100

    log = timed(clock, pause=pause)
    hook_of(CommHook.none, log)(Bucket(torch.ones(1)))
    assert (log.noted[0].ready, log.noted[0].end) == (1, 102)


@pytest.mark.parametrize(("name", "num_bytes"), [(CommHook.none, 20), (CommHook.bf16, 10)])
def test_compression_halves_the_noted_bytes(
    name: CommHook, num_bytes: int, reduced: Reduced
) -> None:
    log = timed()
    hook_of(name, log)(Bucket(torch.ones(5)))
    assert [each.num_bytes for each in log.noted] == [num_bytes]


def test_two_bytes_a_number_whatever_the_gradients_format(reduced: Reduced) -> None:
    log = timed()
    hook_of(CommHook.bf16, log)(Bucket(torch.ones(5, dtype=torch.float64)))
    assert log.noted[0].num_bytes == 10


def test_of_sparse_gradients_indices_and_values_are_sent(reduced: Reduced) -> None:
    rows = torch.tensor([[3, 0, 7]])
    gradient = torch.sparse_coo_tensor(rows, torch.ones(3, 2), (1000, 2), check_invariants=True)
    log = timed()
    hook_of(CommHook.none, log)(SparseBucket(gradient))
    assert log.noted[0].num_bytes == 3 * 8 + 6 * 4


def test_powersgd_sends_all_at_first_and_then_thin_factors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def torchs_own(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        state.iter += 1
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    monkeypatch.setattr(powerSGD_hook, "powerSGD_hook", torchs_own)
    log = timed()
    hook = hook_of(CommHook.powersgd, log, powersgd_rank=2, powersgd_start=2)
    for _ in range(3):
        # A matrix of 10 x 20, whose factors are (10 + 20) x 2 = 60 numbers; one of 4 x 4, whose
        # factors would be 16 and are no gain; a bias, which is no matrix.
        hook(Bucket(torch.ones(10, 20), torch.ones(4, 4), torch.ones(10)))
    assert [each.num_bytes for each in log.noted] == [226 * 4, 226 * 4, (60 + 16 + 10) * 4]


def test_on_a_device_a_bucket_leaves_two_events_and_nobody_waits_for_them(
    reduced: Reduced, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "host_s", lambda: 100.0)
    clock = EventClock(torch.device("meta"))
    log = timed(clock)
    hook = hook_of(CommHook.none, log)
    hook(Bucket(torch.ones(3)))  # from 5 to 10 ms of the device
    hook(Bucket(torch.ones(5)))  # from 15 to 20 ms
    assert (len(events), waits(events)) == (4, 0)
    clock.settle()  # at 25 ms, which are the host's 100 s
    times = [clock.seconds([each.ready, each.end]) for each in log.noted]
    np.testing.assert_allclose(times, [[99.980, 99.985], [99.990, 99.995]], rtol=0, atol=1e-9)
