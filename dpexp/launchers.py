"""What Hydra's launchers mean for measuring: joblib, submitit and Ray run cells side by side."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf

from dpexp import env
from dpexp.errors import ConfigError

BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
JOBLIB = "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"
LOCAL = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher"
SLURM = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"
RAY = "hydra_plugins.hydra_ray_launcher.ray_launcher.RayLauncher"
NAMES = {JOBLIB: "joblib", LOCAL: "submitit_local", SLURM: "submitit_slurm", RAY: "ray"}
# Each of these runs a cell in a process that is the cell's alone.
ONE_PROCESS_A_CELL = (LOCAL, SLURM)
PINNED = (
    "With pin=true they have cores of their own; caches, memory bandwidth and clocks are shared "
    "all the same. "
)


def target_of(hydra: Any) -> str:
    """The launcher's class, as the config names it.

    Args:
        hydra: the node ``hydra`` of a composed config.
    """
    return str(hydra.launcher.get("_target_"))


def name_of(hydra: Any) -> str:
    """What the user calls the launcher."""
    return NAMES.get(target_of(hydra), target_of(hydra))


def typed(hydra: Any) -> list[str]:
    """The overrides of a sweep, with those that say how it runs, for the command that repeats it.

    Args:
        hydra: the node ``hydra`` of a composed config.
    """
    ways = ("hydra/launcher", "hydra.launcher.", "hydra/sweeper", "hydra.sweeper.")
    # As typed: to resolve "+dataset.rows=${batch_size}" is up to the cells.
    own: Any = OmegaConf.to_container(hydra.overrides, resolve=False)
    chosen = [entry for entry in own["hydra"] if entry.lstrip("+~").startswith(ways)]
    return [*chosen, *own["task"]]


def refuse_launcher(hydra: Any) -> None:
    """Refuse settings under which several runs would share a folder.

    What a job of Slurm asks for is judged with its cell (slurm_requests.py).

    Raises:
        ConfigError: a local job of several tasks, or one of Slurm that would run again.
    """
    launcher, target = hydra.launcher, target_of(hydra)
    if target == SLURM and launcher.get("max_num_timeout", 0) != 0:
        raise ConfigError(
            "hydra.launcher.max_num_timeout",
            launcher.max_num_timeout,
            "a job that runs again would find the folder of its first attempt",
            allowed="0",
            fix="hydra.launcher.max_num_timeout=0, and resume=last for what was not finished",
        )
    for key in ("tasks_per_node", "nodes") if target == LOCAL else ():
        value = launcher.get(key, 1)
        if value != 1:
            raise ConfigError(
                f"hydra.launcher.{key}",
                value,
                "each task would be a run of its own, in the same folder; dpexp starts the ranks",
                allowed="1",
                fix=f"hydra.launcher.{key}=1, and num_devices for the ranks",
            )


def simultaneous(hydra: Any, *, pin: bool = False, in_cell: bool = False) -> str | None:
    """The warning that cells run at the same time; None where each has the machine for itself.

    Args:
        hydra: the node ``hydra`` of the sweep's config, or of a cell's.
        pin: the cells have cores of their own.
        in_cell: it is a cell's: under Ray it says what that one has asked for.
    """
    sweeper = hydra.get("sweeper") or {}
    if sweeper.get("n_jobs", sweeper.get("max_batch_size")) == 1:
        return None  # the launcher is given one cell at a time
    launcher, target = hydra.launcher, target_of(hydra)
    how = {
        BASIC: _never,
        JOBLIB: _under_joblib,
        LOCAL: _under_submitit,
        SLURM: _under_slurm,
        RAY: _in_ray if in_cell else _under_ray,
    }.get(target, _perhaps)(launcher)
    if how is None:
        return None
    hint = not pin and target in (JOBLIB, LOCAL, RAY)
    return (
        f"cells of this sweep {how[0]} and disturb each other's timing: their figures are not "
        f"those of an idle machine. {PINNED if pin else ''}Try: {how[1]}"
        + ("; or pin=true, on a CPU, for cores of their own at least" if hint else "")
    )


def _never(_launcher: Any) -> tuple[str, str] | None:
    return None


def _perhaps(launcher: Any) -> tuple[str, str] | None:
    name = launcher.get("_target_")
    return f"may run at the same time (launcher {name})", "hydra/launcher=basic"


def _under_joblib(launcher: Any) -> tuple[str, str] | None:
    jobs = launcher.get("n_jobs", 1)
    if jobs == 1:
        return None
    return f"run at the same time (joblib, n_jobs={jobs})", "hydra.launcher.n_jobs=1"


def _under_submitit(_launcher: Any) -> tuple[str, str] | None:
    return "all run at the same time (submitit_local)", "hydra.sweeper.max_batch_size=1"


def _under_slurm(launcher: Any) -> tuple[str, str] | None:
    if launcher.get("array_parallelism") == 1 or "exclusive" in (
        launcher.get("additional_parameters") or {}
    ):
        return None
    return (
        "may share a node (submitit_slurm)",
        "+hydra.launcher.additional_parameters.exclusive=true",
    )


# All cores of a machine for each cell.
_RAY_ALONE = "+hydra.launcher.ray.remote.num_cpus=<cores of a machine>"


def _under_ray(launcher: Any) -> tuple[str, str] | None:
    """Whether a machine may have two cells at a time; one asks for a core or more."""
    cores = launcher.ray.init.get("num_cpus") or env.usable_cores()
    each = launcher.ray.remote.get("num_cpus") or 1
    if launcher.ray.init.get("address") is None and cores < 2 * each:
        return None
    return "run at the same time (ray)", _RAY_ALONE


def _in_ray(launcher: Any) -> tuple[str, str] | None:
    """Whether this cell has left room for another one on its machine."""
    cores = launcher.ray.init.get("num_cpus") or env.usable_cores()
    if cores - (launcher.ray.remote.get("num_cpus") or 1) < 1:
        return None
    return "run at the same time (ray)", _RAY_ALONE


def changed_variables(hydra: Any) -> list[str]:
    """Notes on variables that the launcher, and not the user, has set for this cell."""
    chosen = hydra.job.env_set  # the user's own, by Hydra's key for it
    changed = {k: v for k, v in env.changed_by_launcher().items() if k not in chosen}
    notes = []
    if "OMP_NUM_THREADS" in changed:
        value = changed["OMP_NUM_THREADS"]
        notes.append(
            f"OMP_NUM_THREADS={value}: as many threads per process as the cell has asked Ray for"
            if target_of(hydra) == RAY
            else f"OMP_NUM_THREADS={value} was set by the launcher ({name_of(hydra)}): "
            "it, and not dpexp, has chosen the threads per process"
        )
    if "CUDA_VISIBLE_DEVICES" in changed:
        value = changed["CUDA_VISIBLE_DEVICES"]
        notes.append(f"CUDA_VISIBLE_DEVICES={value!r} was set by the launcher ({name_of(hydra)})")
    return notes
