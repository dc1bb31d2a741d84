"""Where step records go. A sink gets every record once, in order.

Those of the config group `sinks` get them after the run; see :mod:`dpexp.publish`.
"""

from dpexp.sinks.base import FinishedRun, Sink
from dpexp.sinks.console import ProgressSink
from dpexp.sinks.csv import CsvSink, HostCsvSink, read_steps, step_table, steps_of, write_shapes
from dpexp.sinks.mlflow import MlflowSink
from dpexp.sinks.opening import open_sink, sink_class
from dpexp.sinks.tensorboard import TensorBoardSink
from dpexp.sinks.timeline import write_timeline
from dpexp.sinks.wandb import WandbSink

__all__ = [
    "CsvSink",
    "FinishedRun",
    "HostCsvSink",
    "MlflowSink",
    "ProgressSink",
    "Sink",
    "TensorBoardSink",
    "WandbSink",
    "open_sink",
    "read_steps",
    "sink_class",
    "step_table",
    "steps_of",
    "write_shapes",
    "write_timeline",
]
