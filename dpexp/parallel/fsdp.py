"""One process per device, each with a part of the model: torch's fully_shard (FSDP2)."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast, final

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from dpexp.batches import Inputs
from dpexp.errors import ConfigError
from dpexp.parallel.base import Strategy
from dpexp.parallel.chunks import own_or_borrowed, weighted
from dpexp.parallel.gathers import lacking, time_collectives
from dpexp.schedule import Indices, chunk_sizes


@final
class FullyShardedDataParallel(Strategy):
    """Rank r takes chunk r of the global batch; parameters are gathered when they are needed.

    As under ddp, gradients are averaged over the ranks, and a rank without rows borrows chunk 0's.
    """

    def wrap(self, model: nn.Module) -> None:
        options = self.plan.config.parallel
        if self.comm.rank:  # a caution of torch's, once a run
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        # Every rank keeps its part of what must be one model: that of rank 0.
        self.comm.spread([*model.parameters(), *model.buffers()])
        mesh = init_device_mesh(self.device.type, (self.comm.world_size,))
        sharded = [*units(model, options.wrap), model]
        for unit in sharded:
            try:
                reshard = bool(options.reshard_after_forward)
                fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
            except (ValueError, AssertionError, NotImplementedError) as error:
                problem = f"torch cannot shard {type(unit).__name__}: {error}"
                raise ConfigError("parallel", "fsdp", problem, fix="parallel=ddp") from error
        self._model = cast(FSDPModule, model)
        self._time(sharded)
        self._unused = 0  # a checksum over the steps of which parameters got no gradient

    def choose_rows(self, rows: Indices) -> Indices:
        return own_or_borrowed(rows, self.comm)

    def own_rows(self, global_rows: int) -> int:
        return chunk_sizes(global_rows, self.comm.world_size)[self.comm.rank]

    def forward(self, inputs: Inputs, rows: int) -> Any:
        self.shapes.muted = rows == 0
        return self._noted(cast(nn.Module, self._model), inputs)

    def weigh(self, loss: torch.Tensor, rows: int, global_rows: int) -> torch.Tensor:
        return weighted(self._scalar(loss), rows, global_rows, self.loss_divisor)

    def synchronised(self, last: bool) -> AbstractContextManager[Any]:
        return super().synchronised(last) if last else self._unsynchronised()

    def check_gradients(self, parameters: list[nn.Parameter]) -> None:
        unused = [index for index, each in enumerate(parameters) if each.grad is None]
        if unused:
            self._unused = zlib.crc32(repr((self._unused, unused)).encode())

    def agree(self) -> None:
        low, high = self.comm.extent([float(self._unused)])
        if low != high:
            # FSDP reduces the gradients that a rank has, one after the other: those of different
            # parameters would be added up.
            raise ConfigError(
                "parallel",
                "fsdp",
                "the ranks used different parameters of the model in a step, and FSDP would mix up "
                "their gradients",
                fix="parallel=ddp parallel.find_unused_parameters=true",
            )

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(model, options=whole)

    def close(self) -> None:
        del self._model

    def _time(self, sharded: list[nn.Module]) -> None:
        """Time the collectives, or note why not."""
        streams = self.device.type != "cpu"
        log = self._timed_collectives(blocking=not streams)
        if log is None:
            return
        problem = ""
        if streams and self.plan.backend == "gloo":
            # The host stands still, at a point that no event on a stream can tell.
            problem = "those of gloo on a GPU hold up the host, whose waits no event shows"
        elif streams and (missing := lacking(sharded)):
            problem = f"this version of torch has no {', '.join(missing)} in FSDP"
        if problem:
            self.notes = (f"measure.comm: the collectives of fsdp are not timed: {problem}",)
            return
        self.log = log
        time_collectives(sharded, log, streams=streams)

    @contextmanager
    def _unsynchronised(self) -> Iterator[None]:
        self._model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._model.set_requires_gradient_sync(True)


def units(model: nn.Module, wrap: Any) -> list[nn.Module]:
    """The submodules that are sharded as units of their own, inner ones first.

    Args:
        wrap: ``parallel.wrap``. blocks: what a model repeats; model: none; a list: modules of
            these classes; a number: every smallest module with at least so many parameters.

    Raises:
        ConfigError: a named class is not in the model.
    """
    modules = [module for name, module in model.named_modules() if name]
    if wrap == "model":
        return []
    if wrap == "blocks":
        chosen = [block for module in model.modules() for block in _blocks(module)]
    elif isinstance(wrap, int):
        chosen = [m for m in modules if _parameters(m) >= wrap and not _divisible(m, wrap)]
    else:
        chosen = [module for module in modules if type(module).__name__ in wrap]
        lacking = set(wrap) - {type(module).__name__ for module in modules}
        if lacking:
            raise ConfigError(
                "parallel.wrap",
                wrap,
                f"the model has no module of class {', '.join(sorted(lacking))}",
                allowed=", ".join(sorted({type(module).__name__ for module in modules})[:12]),
                fix="parallel.wrap=blocks",
            )
    inner_first = [module for module in reversed(modules) if any(module is m for m in chosen)]
    return [m for m in inner_first if not isinstance(m, (nn.ModuleList, nn.ModuleDict))]


def _blocks(container: nn.Module) -> list[nn.Module]:
    """The repeated parts of a list of modules: those with parts of their own and a like beside."""
    if not isinstance(container, (nn.ModuleList, nn.Sequential)):
        return []
    kinds = [type(entry) for entry in container]
    return [m for m in container if any(m.children()) and kinds.count(type(m)) > 1]


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _divisible(module: nn.Module, least: int) -> bool:
    return any(_parameters(child) >= least for child in module.children())
