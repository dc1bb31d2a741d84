"""Where step records go. A sink gets every record once, in order."""

from dpexp.sinks.base import Sink
from dpexp.sinks.console import ProgressSink
from dpexp.sinks.csv import CsvSink, write_shapes
from dpexp.sinks.tensorboard import TensorBoardSink
from dpexp.sinks.timeline import write_timeline

__all__ = ["CsvSink", "ProgressSink", "Sink", "TensorBoardSink", "write_shapes", "write_timeline"]
