"""How a batch is spread over devices: one file a strategy, comparable side by side."""

from __future__ import annotations

from dpexp.parallel.base import Context, Strategy
from dpexp.parallel.ddp import DistributedDataParallel
from dpexp.parallel.dp import DataParallel
from dpexp.parallel.none import SingleDevice
from dpexp.schema import StrategyName


def make_strategy(name: StrategyName, context: Context) -> Strategy:
    """The strategy of that name."""
    strategies: dict[StrategyName, type[Strategy]] = {
        StrategyName.none: SingleDevice,
        StrategyName.dp: DataParallel,
        StrategyName.ddp: DistributedDataParallel,
    }
    return strategies[name](context)


__all__ = ["Context", "Strategy", "make_strategy"]
