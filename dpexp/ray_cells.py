"""What each cell of a sweep on Ray asks for: Ray runs it where that is free.

The plugin gives all cells the same options, so its function that hands a cell to Ray is replaced
while a sweep runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, OmegaConf, open_dict

from dpexp import env
from dpexp.cell import refused
from dpexp.config import load, without_hydra
from dpexp.console import show_cell
from dpexp.errors import ConfigError
from dpexp.pinning import cores_needed, threads_of
from dpexp.plan import HardwareFacts, first_index_of, resolve_num_devices
from dpexp.schema import ONE_PROCESS, Config, StrategyName

REMOTE = "hydra.launcher.ray.remote"


@dataclass(frozen=True)
class Node:
    """What one machine of the cluster has in all."""

    num_cpus: float
    num_gpus: float


@dataclass(frozen=True)
class Asked:
    """What a cell asks Ray for, and the threads that each of its ranks then has."""

    num_cpus: float
    num_gpus: float
    threads: int


def asked_by(
    config: Config,
    nodes: Sequence[Node],
    own: dict[str, Any],
    requested_threads: int | None,
    cores: int | None,
) -> Asked:
    """A core for each device, or what OMP_NUM_THREADS says, and a GPU for each device on CUDA.

    Args:
        own: the user's options for all cells, which win.
        requested_threads: OMP_NUM_THREADS where the command was typed.
        cores: that a cell may use for ``num_devices=auto``; None = those of the largest node.
    """
    most_cpus = max((node.num_cpus for node in nodes), default=1)
    most_gpus = int(max((node.num_gpus for node in nodes), default=0))
    facts = HardwareFacts(
        cores=cores or max(1, int(most_cpus)),
        accelerator="cuda" if most_gpus else None,
        num_accelerators=most_gpus,
    )
    kind, first = config.device.partition(":")[0], first_index_of(config.device)
    on_cuda = kind == "cuda" or (kind == "auto" and most_gpus > 0)
    strategy = config.parallel.strategy
    devices = 1
    if strategy is not StrategyName.none:  # several for it: the cell refuses that itself
        where = "cuda" if on_cuda else "cpu"
        devices = resolve_num_devices(config.num_devices, strategy, where, first, facts)
    processes = 1 if strategy in ONE_PROCESS else devices
    chosen = own.get("num_cpus")
    share = devices if chosen is None else int(chosen)
    threads = threads_of(requested_threads, share, devices, processes, core_each=chosen is None)
    return Asked(
        num_cpus=cores_needed(threads, devices, processes) if chosen is None else chosen,
        num_gpus=own.get("num_gpus", first + devices if on_cuda else 0),
        threads=threads,
    )


def refuse_too_much(
    config: Config, asked: Asked, nodes: Sequence[Node], own: dict[str, Any]
) -> None:
    """Refuse what no machine of the cluster has: Ray would wait for one that does.

    Raises:
        ConfigError: see the message.
    """
    if any(asked.num_cpus <= n.num_cpus and asked.num_gpus <= n.num_gpus for n in nodes):
        return
    for name in ("num_gpus", "num_cpus"):
        wanted, most = getattr(asked, name), max((getattr(n, name) for n in nodes), default=0)
        if wanted > most:
            problem = f"no machine of the cluster has {name}={wanted:g}; the most is {most:g}"
            break
    else:
        problem = (
            f"no machine of the cluster has num_cpus={asked.num_cpus:g} and "
            f"num_gpus={asked.num_gpus:g} together"
        )
    key, value = "num_devices", config.num_devices
    fix = f"fewer num_devices, or +{REMOTE}.num_cpus=<n> or .num_gpus=<n> to ask for less"
    if name in own:
        key, value, fix = f"{REMOTE}.{name}", own[name], "a smaller one"
    raise ConfigError(key, value, f"the cell asks Ray for what is not there: {problem}", fix=fix)


@contextmanager
def own_resources() -> Iterator[None]:
    """While the block runs, the plugin hands each cell over with what that cell asks for."""
    from hydra_plugins.hydra_ray_launcher import _core

    hand_over = _core.launch_job_on_ray

    def hand_over_with_its_own(
        hydra_context: Any, ray_remote: Any, sweep_config: DictConfig, task: Any, state: Any
    ) -> Any:
        remote = _options(sweep_config, ray_remote)
        if remote is None:
            import ray

            done = JobReturn(status=JobStatus.COMPLETED)
            done.return_value = None
            return ray.put(done)
        return hand_over(hydra_context, remote, sweep_config, task, state)

    _core.launch_job_on_ray = hand_over_with_its_own
    try:
        yield
    finally:
        _core.launch_job_on_ray = hand_over


def _options(sweep_config: DictConfig, common: DictConfig) -> DictConfig | None:
    """The options of Ray for one cell, which are put into the cell's own record, too.

    Returns:
        None: the cluster does not have what it asks for, and its result is written.
    """
    remote: Any = OmegaConf.to_container(common, resolve=True)
    hydra = sweep_config.hydra
    with open_dict(sweep_config):
        # Where a machine of the cluster starts its processes is its own business.
        hydra.sweep.dir = str(Path(hydra.sweep.dir).absolute())
    try:
        config = load(without_hydra(sweep_config))
    except ConfigError:
        return common  # the cell refuses it itself, and needs little for that
    nodes = _nodes()
    here = hydra.launcher.ray.init.get("address") is None
    cores = env.usable_cores() if here else None
    asked = asked_by(config, nodes, remote, env.requested_threads(), cores)
    try:
        refuse_too_much(config, asked, nodes, remote)
    except ConfigError as error:
        folder = Path(hydra.sweep.dir) / str(OmegaConf.select(sweep_config, "hydra.sweep.subdir"))
        folder.mkdir(parents=True, exist_ok=True)
        show_cell(refused(config, {"variables": env.recorded()}, error, folder), folder)
        return None
    # Ray itself would give each rank as many threads as the whole cell has cores.
    runtime = dict(remote.get("runtime_env") or {})
    variables = env.of_the_sweep() | env.with_threads(asked.threads)
    runtime["env_vars"] = variables | (runtime.get("env_vars") or {})
    amounts = {"num_cpus": asked.num_cpus, "num_gpus": asked.num_gpus}
    with open_dict(sweep_config):
        hydra.launcher.ray.remote = {**remote, **amounts}
    return OmegaConf.create({**remote, **amounts, "runtime_env": runtime})


def _nodes() -> list[Node]:
    import ray

    return [
        Node(node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0))
        for node in ray.nodes()
        if node["Alive"]
    ]
