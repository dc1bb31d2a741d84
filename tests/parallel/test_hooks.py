"""DDP's communication hooks, on a model that only notes what it is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from builders import make_config
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from dpexp.parallel.hooks import add_comm_hook
from dpexp.schema import CommHook


class Model:
    """Stands in for torch's wrapper."""

    def __init__(self) -> None:
        self.hooks: list[tuple[Any, Any]] = []

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        self.hooks.append((state, hook))


def hooks(name: CommHook, **options: Any) -> list[tuple[Any, Any]]:
    model: Any = Model()
    add_comm_hook(model, make_config("ddp", parallel={"comm_hook": name, **options}).parallel)
    return model.hooks  # type: ignore[no-any-return]


def test_without_a_hook_gradients_travel_as_they_are() -> None:
    assert hooks(CommHook.none) == []


def test_fp16_is_torchs_own_hook() -> None:
    assert hooks(CommHook.fp16) == [(None, default_hooks.fp16_compress_hook)]


def test_powersgd_is_torchs_own_hook_with_the_options_of_the_config() -> None:
    ((state, hook),) = hooks(CommHook.powersgd, powersgd_rank=3, powersgd_start=7)
    assert hook is powerSGD_hook.powerSGD_hook
    assert (state.matrix_approximation_rank, state.start_powerSGD_iter) == (3, 7)


class Bucket:
    """A bucket of gradients."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def buffer(self) -> torch.Tensor:
        return self.values


class Done:
    """A collective that is over."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self.future.set_result([tensor])

    def get_future(self) -> torch.futures.Future[Any]:
        return self.future


def test_bf16_sends_half_the_bytes_and_gives_the_mean_in_the_buckets_format(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[torch.Tensor] = []

    def all_reduce(tensor: torch.Tensor, async_op: bool) -> Done:
        assert async_op
        sent.append(tensor.clone())
        return Done(tensor + tensor)  # a second rank that brings the same

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    ((state, hook),) = hooks(CommHook.bf16)
    bucket = Bucket(torch.tensor([1.0, -3.0, 0.5]))
    result = hook(state, bucket).value()
    assert sent[0].dtype == torch.bfloat16
    assert sent[0].tolist() == [0.5, -1.5, 0.25]
    assert (result.dtype, result.tolist()) == (torch.float32, [1.0, -3.0, 0.5])
    assert result is bucket.values
