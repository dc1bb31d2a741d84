"""A run as a row of TensorBoard's HParams tab: its columns, and the figures it is compared by.

TensorBoard takes the columns and metrics of all rows from the first run that lists some. So the
columns are the same for every run, and a run without figures lists nothing: its row has those of
the others, with blanks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

from dpexp.records import RunResult

Value = bool | float | str

# TensorBoard shows the first five columns until the user chooses others. It sorts those that differ
# between runs before the rest, and a single run cannot know which do: these are said to.
FIRST = ("batch_size_global", "num_devices", "overrides", "parallel", "status")
# Of the config. All of it is in the Text tab, and what the user typed in the column `overrides`.
CONFIG_COLUMNS = (
    "task",
    "scaling",
    "optimizer.lr",
    "lr_scheduler",
    "loss",
    "precision",
    "accumulate",
    "epochs",
    "steps",
    "warmup_steps",
    "seed",
    "loader.workers",
    "prepare.compile",
)
OWN_COLUMN = ("parallel", "num_devices", "repeat")  # so not among `overrides`
METRIC_NAMES = {
    "summary/samples_per_s": "samples/s",
    "summary/step_p50_ms": "median step (ms)",
    "summary/step_p95_ms": "95 % of steps within (ms)",
}
_STATUS = {"ok": api_pb2.STATUS_SUCCESS, "failed": api_pb2.STATUS_FAILURE}


def hyperparameters(result: RunResult, overrides: list[str]) -> dict[str, Value]:
    """A run's row, with the same columns for every strategy.

    What is not known of a run that was refused is left out; a key that is not set is ``null``.

    Args:
        overrides: what the user typed for this run.
    """
    batch = result.batch or {}
    facts: dict[str, Value | None] = {
        "status": result.status,
        "overrides": " ".join(text for text in overrides if text.split("=")[0] not in OWN_COLUMN),
        "parallel": result.parallel,
        "num_devices": result.num_devices,
        "batch_size_global": batch.get("global"),
        "batch_size_per_device": batch.get("per_device"),
        "num_processes": result.num_processes,
        "threads_per_process": result.threads_per_process,
        "cores": result.environment.get("cores"),
        "device": result.device,
        "emulated": result.emulated,
        "repeat": result.repeat,
    }
    row = {key: value for key, value in facts.items() if value is not None}
    for group in ("dataset", "model", "optimizer"):
        row[group] = _component(result.config.get(group))
    for key in CONFIG_COLUMNS:
        row[key] = _plain(_at(result.config, key))
    return row


def summary_scalars(result: RunResult) -> dict[str, float]:
    """The run's figures over the measured steps, by tag."""
    throughput = result.throughput or {}
    step = (result.timing or {}).get("step")
    values = {
        "summary/samples_per_s": throughput.get("samples_per_s"),
        "summary/step_p50_ms": None if step is None or step.p50_s is None else step.p50_s * 1e3,
        "summary/step_p95_ms": None if step is None or step.p95_s is None else step.p95_s * 1e3,
    }
    if result.metric is not None:
        values[f"metric/{result.metric['name']}"] = result.metric["value"]
    return {tag: value for tag, value in values.items() if value is not None}


def hparams_row(row: dict[str, Value], status: str, metrics: list[str]) -> list[Summary]:
    """The records that make a run a row of the HParams tab.

    Args:
        metrics: tags of scalars that this run has; [] = the run lists no columns.
    """
    start = plugin_data_pb2.SessionStartInfo()
    for name, value in row.items():
        held = start.hparams[name]
        if isinstance(value, bool):
            held.bool_value = value
        elif isinstance(value, str):
            held.string_value = value
        else:
            held.number_value = value
    end = plugin_data_pb2.SessionEndInfo(status=_STATUS.get(status, api_pb2.STATUS_UNKNOWN))
    data = plugin_data_pb2.HParamsPluginData
    parts = [
        (metadata.SESSION_START_INFO_TAG, data(session_start_info=start)),
        (metadata.SESSION_END_INFO_TAG, data(session_end_info=end)),
    ]
    if metrics:
        parts.insert(0, (metadata.EXPERIMENT_TAG, data(experiment=_experiment(row, metrics))))
    return [_summary(tag, content) for tag, content in parts]


def overrides_of(folder: Path) -> list[str]:
    """What the user typed for the run in `folder`, as Hydra keeps it; [] where it keeps nothing.

    In a sweep what varies comes first: TensorBoard's cells have room for a few words.
    """
    own = _read(folder / ".hydra" / "overrides.yaml") or []
    sweep = _read(folder.parent / "multirun.yaml") or {}
    same = _at(sweep, "hydra.overrides.task") or []
    return sorted(map(str, own), key=lambda text: text in same)


def _read(path: Path) -> Any:
    """A YAML file, None if there is none. A sweep's is long, and the parser in C is quick."""
    if not path.exists():
        return None
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(path.read_text(encoding="utf-8"), Loader=loader)


def _experiment(row: dict[str, Value], metrics: list[str]) -> api_pb2.Experiment:
    return api_pb2.Experiment(
        hparam_infos=[
            api_pb2.HParamInfo(name=name, type=_type(value), differs=name in FIRST)
            for name, value in row.items()
        ],
        metric_infos=[
            api_pb2.MetricInfo(
                name=api_pb2.MetricName(tag=tag), display_name=METRIC_NAMES.get(tag, tag)
            )
            for tag in metrics
        ],
    )


def _type(value: Value) -> int:
    if isinstance(value, bool):
        return int(api_pb2.DATA_TYPE_BOOL)
    return int(api_pb2.DATA_TYPE_STRING if isinstance(value, str) else api_pb2.DATA_TYPE_FLOAT64)


def _summary(tag: str, content: plugin_data_pb2.HParamsPluginData) -> Summary:
    described = metadata.create_summary_metadata(content)
    value = Summary.Value(tag=tag, metadata=described, tensor=metadata.NULL_TENSOR)
    return Summary(value=[value])


def _component(node: Any) -> str:
    """A dataset, model or optimizer in one line: ``mlp widths=[64, 10]``."""
    if not isinstance(node, dict):
        return str(_plain(node))
    name = str(node.get("_target_")).rpartition(".")[2]
    return " ".join([name, *(f"{k}={_plain(v)}" for k, v in node.items() if k != "_target_")])


def _plain(value: Any) -> Value:
    """A number, truth value or text as it is; the rest as JSON."""
    return value if isinstance(value, (bool, int, float, str)) else json.dumps(value, default=str)


def _at(config: dict[str, Any], key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node
