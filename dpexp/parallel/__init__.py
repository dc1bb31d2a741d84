"""How a batch is spread over devices: one file a strategy, comparable side by side."""

from __future__ import annotations

from dpexp.parallel.base import Context, Strategy
from dpexp.parallel.ddp import DistributedDataParallel
from dpexp.parallel.dp import DataParallel
from dpexp.parallel.none import SingleDevice
from dpexp.schema import StrategyName


def make_strategy(name: StrategyName, context: Context) -> Strategy:
    """The strategy of that name."""
    if name is StrategyName.fsdp:
        # Its imports take a second, which the other strategies need not wait for.
        from dpexp.parallel.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(context)
    strategies: dict[StrategyName, type[Strategy]] = {
        StrategyName.none: SingleDevice,
        StrategyName.dp: DataParallel,
        StrategyName.ddp: DistributedDataParallel,
    }
    return strategies[name](context)


__all__ = ["Context", "Strategy", "make_strategy"]
