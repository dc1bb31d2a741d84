"""What a cell's job asks Slurm for, and what its tasks cannot do. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dpexp.errors import ConfigError
from dpexp.plan import first_index_of
from dpexp.schema import ONE_PROCESS, Config, StrategyName
from dpexp.schema_measuring import RanksFrom

# Keys by which a user asks for GPUs herself.
_GPU_KEYS = ("gpus", "gpus_per_node", "gpus_per_socket", "gpus_per_task", "gres", "tres_per_task")


@dataclass(frozen=True)
class Request:
    """What a cell's job asks Slurm for, besides what the user's own keys say."""

    nodes: int = 1
    tasks_per_node: int = 1
    gpus_per_node: int | None = None


def check_ranks_from(config: Config) -> None:
    """Refuse what the tasks of an srun cannot do.

    Raises:
        ConfigError: restarts; srun starts no task again.
    """
    if config.parallel.ranks_from is RanksFrom.slurm and config.parallel.max_restarts:
        raise ConfigError(
            "parallel.max_restarts",
            config.parallel.max_restarts,
            "srun starts no task again",
            allowed="0 with parallel.ranks_from=slurm",
            fix="parallel.max_restarts=0, and resume=true after a rank was lost",
        )


def request_of(config: Config, launcher: Any, has_gpus: Callable[[], bool]) -> Request:
    """What a cell needs: GPUs, and with ``parallel.ranks_from=slurm`` tasks, as `num_devices` says.

    Args:
        launcher: the node ``hydra.launcher``.
        has_gpus: whether the cluster has some; called for ``device=auto``, which is what is there.

    Raises:
        ConfigError: the number of nodes, tasks or GPUs cannot be told.
    """
    strategy, count = config.parallel.strategy, config.num_devices
    if strategy is StrategyName.none:
        if count not in ("auto", 1):
            return Request()  # the cell is skipped, and needs nothing
        count = 1
    nodes, tasks = _places(config, launcher)
    if not _wants_gpus(config.device, launcher, has_gpus):
        return Request(nodes, tasks)
    if not isinstance(count, int):
        raise ConfigError(
            "num_devices",
            count,
            "a job of Slurm has as many GPUs as num_devices says",
            fix="num_devices=4, or hydra.launcher.gpus_per_node=4",
        )
    here = count if nodes * tasks == 1 else tasks
    return Request(nodes, tasks, first_index_of(config.device) + here)


def _places(config: Config, launcher: Any) -> tuple[int, int]:
    """Nodes, and tasks on each."""
    per_node, count = launcher.get("tasks_per_node", 1), config.num_devices
    if launcher.get("nodes", 1) != 1:
        raise ConfigError(
            "hydra.launcher.nodes",
            launcher.nodes,
            "the number of nodes follows num_devices",
            allowed="1",
            fix="parallel.ranks_from=slurm hydra.launcher.tasks_per_node=<ranks on a node>",
        )
    if config.parallel.ranks_from is not RanksFrom.slurm:
        if per_node == 1:
            return 1, 1
        raise ConfigError(
            "hydra.launcher.tasks_per_node",
            per_node,
            "each task would be a run of its own, in the same folder; dpexp starts the ranks",
            allowed="1",
            fix="hydra.launcher.tasks_per_node=1, or parallel.ranks_from=slurm",
        )
    if config.parallel.strategy in ONE_PROCESS:
        return 1, 1
    if not isinstance(count, int):
        raise ConfigError(
            "num_devices",
            count,
            "with parallel.ranks_from=slurm the number of tasks follows it",
            fix="num_devices=4",
        )
    tasks = min(count, per_node)
    if count % tasks:
        raise ConfigError(
            "num_devices",
            count,
            f"cannot be spread evenly over nodes of {tasks} tasks (hydra.launcher.tasks_per_node)",
            allowed=f"up to {tasks}, or a multiple of it",
            fix=f"num_devices={count // tasks * tasks}",
        )
    return count // tasks, tasks


def _wants_gpus(device: str, launcher: Any, has_gpus: Callable[[], bool]) -> bool:
    own = {**launcher, **(launcher.get("additional_parameters") or {})}
    if any(value is not None and key.replace("-", "_") in _GPU_KEYS for key, value in own.items()):
        return False  # the user's word stands
    if device == "auto":
        return has_gpus()
    return device not in ("cpu", "mps")
