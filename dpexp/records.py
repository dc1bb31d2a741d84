"""The plain data that travels between the layers. No torch, no behaviour beyond conversion.

Times are in seconds, sizes in bytes; every name carries its unit. Frozen throughout.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, final

from dpexp.files import write_whole
from dpexp.identity import config_hash, strict_json
from dpexp.soundness import fault

SCHEMA = 1
# The parts that add up to a step, in the order in which they happen.
PHASES = ("data", "transfer", "forward", "backward", "optimizer", "other")
# What dp's forward is made of; torch's names for the four steps of nn.DataParallel.
DP_PARTS = ("scatter", "replicate", "parallel_apply", "gather")
# What of a step's time is communication; exposed and waiting lie in forward and backward.
COMM_PARTS = ("comm_exposed", "comm_overlapped", "straggler_wait")

# The tables of steps in a run's folder: of a rank, or of a host (see plan.MOST_RANK_FILES).
STEP_TABLES = "steps.*.csv"
STEPS_LEFT = f"the steps that it made are in {STEP_TABLES}"

STATUSES = ("ok", "failed", "skipped", "interrupted")
KINDS = (
    "config",
    "user_error",
    "oom",
    "crash",
    "hang",
    "nonfinite",
    "interrupted",
    "time_limit",
)
# Kinds of ends that came from outside: such a cell may go on where it was.
FROM_OUTSIDE = ("crash", "hang", "interrupted", "time_limit")


class StepRecord(NamedTuple):
    """One step as one rank saw it: a row of ``steps.rank<r>.csv`` or ``steps.host<h>.csv``.

    `step_s` = `data_s` + `transfer_s` + `forward_s` + `backward_s` + `optimizer_s` + `other_s`.
    """

    step: int
    epoch: int
    warmup: bool
    global_rows: int
    rows: int  # this rank's own; 0 for a rank that had none but took part
    step_s: float
    data_s: float
    transfer_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    other_s: float
    scatter_s: float | None  # dp only, like the next three: the parts of forward_s
    replicate_s: float | None
    parallel_apply_s: float | None
    gather_s: float | None
    # What the step's collectives cost this rank; None where there are none, or they are not timed.
    comm_exposed_s: float | None  # waited for transport, part of forward_s and backward_s
    comm_overlapped_s: float | None  # under way while this rank computed
    straggler_wait_s: float | None  # waited for other ranks, part of forward_s and backward_s
    comm_arrival_s: float | None  # from the step's begin to its first collective
    comm_bytes: int | None  # that this rank handed to collectives, or dp copied between devices
    bus_bytes_per_s: float | None  # over each rank's link, while all ranks were there
    loss: float | None  # mean over the global batch's rows once known, else over this rank's
    learning_rate: float | None  # of the step's update; training only
    peak_bytes: int
    # Rows of each device of the whole run; 0 = idle. Empty where there is a table per host: there
    # each rank has a row of its own, and as many numbers in each would grow with their square.
    replica_rows: tuple[int, ...]


@dataclass(frozen=True)
class ShapeRecord:
    """How often one call site saw one pair of shapes. A shape is text: it may be nested."""

    module: str  # "" for the model itself, else the submodule's dotted name
    replica: int  # index of the device over the whole run
    input_shape: str
    output_shape: str
    count: int
    first_step: int
    last_step: int


@dataclass(frozen=True)
class PhaseSummary:
    """Statistics of one phase over the measured steps; null where there were none."""

    mean_s: float | None
    p50_s: float | None
    p95_s: float | None
    min_s: float | None
    max_s: float | None
    count: int


@dataclass(frozen=True)
class ErrorRecord:
    """Why a run did not end well."""

    kind: str  # one of KINDS
    type: str  # the exception's class name, or a signal's or exit code's text
    message: str
    rank: int | None = None
    step: int | None = None
    traceback: str | None = None
    user_frames: str | None = None  # the frames of the user's own code, for the console
    # One of beacon.PHASES, "plan" before there are processes; None in files of earlier versions.
    phase: str | None = None
    during: str | None = None  # what it was part of when not the run's own steps
    stacks: dict[str, str] | None = None  # of a hang: of each rank, by its number
    host: str | None = None  # of the rank, where ranks are on several hosts


@dataclass(frozen=True)
class RankResult:
    """What one rank has to say when its steps are done."""

    rank: int
    steps: int
    measured_steps: int
    rows_seen: int
    measured_global_rows: int
    wall_s: float  # sum of the measured steps
    recording_s: float  # spent between steps on writing records; in no step's time
    timing: dict[str, PhaseSummary]
    peak_bytes: int
    peak_device_bytes: dict[str, int]
    losses: tuple[float | None, float | None]
    threads: int
    device: str
    pid: int
    shapes: tuple[ShapeRecord, ...]
    notes: tuple[str, ...]
    model: dict[str, Any]
    metric: dict[str, Any] | None = None  # evaluate: name, value, samples; on rank 0
    # The next ones are on rank 0 only, but for `comm`; None where not asked for.
    comm: dict[str, Any] | None = None  # see comm_recorder.py
    checkpoint: dict[str, Any] | None = None  # of all ranks; see checkpointing.py
    parity: dict[str, Any] | None = None  # see parity.py
    compute: dict[str, Any] | None = None  # see compute.py
    machine: dict[str, Any] | None = None  # see machine.py
    energy: dict[str, Any] | None = None  # see energy.py
    uncertainty: dict[str, Any] | None = None  # see uncertainty.py


def rank_result_from(plain: dict[str, Any]) -> RankResult:
    """The RankResult that `asdict` and JSON have turned into plain data."""
    timing = {phase: PhaseSummary(**summary) for phase, summary in plain["timing"].items()}
    shapes = tuple(ShapeRecord(**record) for record in plain["shapes"])
    rest = {"losses": tuple(plain["losses"]), "notes": tuple(plain["notes"])}
    return RankResult(**{**plain, **rest, "timing": timing, "shapes": shapes})


@dataclass(frozen=True)
class RunResult:
    """``run.json``, schema 1: everything that is known about one run."""

    status: str  # ok | failed | skipped | interrupted
    label: str
    config: dict[str, Any]
    environment: dict[str, Any]
    parallel: str
    error: ErrorRecord | None = None
    device: str | None = None
    emulated: bool | None = None
    num_devices: int | None = None
    num_processes: int | None = None
    threads_per_process: int | None = None
    pinned: list[list[int]] | None = None  # cores of each rank
    claimed_devices: list[str] | None = None  # cuda:0 and so on, as CUDA_VISIBLE_DEVICES names them
    batch: dict[str, int] | None = None
    scaling: str | None = None
    steps: dict[str, int] | None = None
    samples_seen: int | None = None
    timing: dict[str, PhaseSummary] | None = None
    timing_rank: int | None = None
    throughput: dict[str, float | None] | None = None
    memory: dict[str, Any] | None = None
    loss: dict[str, float | None] | None = None
    metric: dict[str, Any] | None = None
    batch_search: dict[str, Any] | None = None
    model: dict[str, Any] | None = None
    repeat: int = 0
    uncertainty: dict[str, Any] | None = None
    comm: dict[str, Any] | None = None
    stragglers: dict[str, Any] | None = None
    parity: dict[str, Any] | None = None
    compute: dict[str, Any] | None = None
    energy: dict[str, Any] | None = None
    machine: dict[str, Any] | None = None
    checkpoint: dict[str, Any] | None = None
    restarts: dict[str, Any] | None = None  # see restarting.py
    injected: list[str] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    hosts: list[dict[str, Any]] = field(default_factory=list)  # see hosts.py; under torchrun
    notes: list[str] = field(default_factory=list)
    schema: int = SCHEMA

    @property
    def config_hash(self) -> str:
        """By which a sweep that is resumed knows its cells; see :func:`identity.config_hash`."""
        return config_hash(self.config)

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON types, `schema` first and NaN turned into null."""
        plain = asdict(self)
        first = {"schema": plain.pop("schema"), "status": plain.pop("status")}
        return {**first, "config_hash": self.config_hash, **strict_json(plain)}

    def to_json(self) -> str:
        """The result as strict JSON text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    def write(self, path: Path) -> None:
        """Write ``run.json`` whole or not at all."""
        write_whole(path, self.to_json())


def run_result_from(plain: dict[str, Any]) -> RunResult:
    """The RunResult of :func:`read_run`'s data; what this version does not know is left out."""
    known = {spec.name for spec in fields(RunResult)}
    kept = {key: value for key, value in plain.items() if key in known}
    error, timing = plain.get("error"), plain.get("timing")
    names = {spec.name for spec in fields(ErrorRecord)}
    if error is not None:
        kept["error"] = ErrorRecord(**{key: error[key] for key in names & set(error)})
    if timing is not None:
        kept["timing"] = {phase: PhaseSummary(**each) for phase, each in timing.items()}
    return RunResult(**kept)


@final
class LaterSchemaError(ValueError):
    """A result was written by a later dpexp."""


def read_run(path: Path) -> dict[str, Any]:
    """Read a ``run.json`` of this or of an earlier version.

    Fields that the version which wrote it did not have are there as if nothing were known of them.
    Those of `config` and `environment` are as they were written.

    Raises:
        OSError: it cannot be read.
        LaterSchemaError: it is of a later schema than this version knows.
        ValueError: it is no result, or not a whole one.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not whole, or no JSON: {error}") from error
    schema = data.get("schema") if isinstance(data, dict) else None
    if not isinstance(schema, int) or isinstance(schema, bool) or "status" not in data:
        raise ValueError(f"{path} is not a dpexp result")
    if schema > SCHEMA:
        raise LaterSchemaError(f"{path} has schema {schema}; this dpexp reads up to {SCHEMA}")
    lacking = [name for name in _needed() if data.get(name) is None]
    if lacking:
        raise ValueError(f"{path} is not a dpexp result: it has no {', '.join(lacking)}")
    if not isinstance(data["config"], dict) or not isinstance(data["environment"], dict):
        raise ValueError(f"{path} is not a dpexp result: config and environment have no keys")
    if data["status"] not in STATUSES:
        raise ValueError(f"{path} is not a dpexp result: its status is {data['status']!r}")
    wrong = fault(data)
    if wrong is not None:
        raise ValueError(f"{path} is not a dpexp result: {wrong}")
    return {**_unknown(), **data}


def _needed() -> list[str]:
    """What every version has written."""
    return [
        spec.name
        for spec in fields(RunResult)
        if spec.default is MISSING and spec.default_factory is MISSING
    ]


def _unknown() -> dict[str, Any]:
    """The fields of a result of which nothing is known."""
    return {
        spec.name: spec.default_factory() if spec.default_factory is not MISSING else spec.default
        for spec in fields(RunResult)
        if spec.name not in _needed()
    }
