"""The sinks of the config group `sinks`, from their nodes in the config."""

from __future__ import annotations

from typing import Any

from dpexp.build import build, explain_call
from dpexp.errors import ConfigError
from dpexp.sinks.base import FinishedRun, Sink


def sink_class(name: str, node: dict[str, Any]) -> type[Sink]:
    """The class that a node names; nothing is made.

    Args:
        name: the node's name in the config's `sinks`.

    Raises:
        ConfigError: it cannot be imported, or is no subclass of Sink.
    """
    key, target = f"sinks.{name}", node["_target_"]
    found = build(key, {"_target_": target}, partial=True).func
    if not (isinstance(found, type) and issubclass(found, Sink)):
        raise ConfigError(
            f"{key}._target_",
            target,
            "is not a sink",
            allowed="a subclass of dpexp.sinks.Sink",
            fix=f"class {target.rpartition('.')[2]}(dpexp.sinks.Sink)",
        )
    return found


def open_sink(name: str, node: dict[str, Any], run: FinishedRun) -> Sink:
    """Make the sink that a node describes.

    Raises:
        ConfigError: as :func:`sink_class`; or it does not take these arguments.
        UserCodeError: its constructor raised.
    """
    sink_class(name, node)
    make = build(f"sinks.{name}", node, partial=True)
    try:
        sink: Sink = make(run=run)
    except Exception as error:
        raise explain_call(f"sinks.{name}", node["_target_"], error) from error
    return sink
