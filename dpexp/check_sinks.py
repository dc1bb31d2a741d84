"""What is wrong with the sinks of a config. Pure; no torch."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from dpexp.builtin import BUILTIN_ARGUMENTS
from dpexp.errors import ConfigError
from dpexp.extras import refuse_missing

WANDB_MODES = ("offline", "online")


def check_sinks(sinks: dict[str, Any]) -> None:
    """Refuse sinks that could not be written.

    Raises:
        ConfigError: see the message.
    """
    for name, node in sinks.items():
        key, target = f"sinks.{name}", node["_target_"]
        refuse_missing(key, node)
        if not target.startswith("dpexp."):
            continue
        if target not in BUILTIN_ARGUMENTS:
            brought = [each for each in BUILTIN_ARGUMENTS if each.startswith("dpexp.sinks.")]
            allowed = f"{', '.join(brought)}, or a subclass of dpexp.sinks.Sink"
            problem = "is not a sink of the group"
            raise ConfigError(f"{key}._target_", target, problem, allowed=allowed)
        _check_arguments(key, node, list(BUILTIN_ARGUMENTS[target]))
        if target == "dpexp.sinks.MlflowSink":
            _check_uri(f"{key}.tracking_uri", node["tracking_uri"])
        if target == "dpexp.sinks.WandbSink" and node["mode"] not in WANDB_MODES:
            raise ConfigError(
                f"{key}.mode",
                node["mode"],
                "is not a mode of this sink",
                allowed=", ".join(WANDB_MODES),
                fix=f"{key}.mode=offline",
            )


def _check_arguments(key: str, node: dict[str, Any], known: list[str]) -> None:
    for name, value in node.items():
        if name != "_target_" and name not in known:
            raise ConfigError(
                f"{key}.{name}",
                value,
                "the sink has no such argument",
                allowed=", ".join(known),
                fix=f"leave out {key}.{name}",
            )
        if value == "":
            raise ConfigError(f"{key}.{name}", "", "is empty", fix=f"leave out {key}.{name}")
    for name in known:
        if name not in node:
            fix = f"do not remove {key}.{name}"
            raise ConfigError(f"{key}.{name}", None, "the key is missing", fix=fix)


def _check_uri(key: str, uri: str | None) -> None:
    if uri is None:
        return
    parts = urlsplit(uri)
    if parts.password is not None:
        # It would be in run.json and in the config that is saved with the run.
        raise ConfigError(
            key,
            uri.replace(parts.password, "***"),
            "has a password, and the config is recorded",
            fix=f"{key}=null, and the address in the environment variable MLFLOW_TRACKING_URI",
        )
    if parts.scheme in ("", "file") and uri != "databricks":
        raise ConfigError(
            key,
            uri,
            "is a folder, which MLflow no longer writes to",
            allowed="a database (sqlite:///<file>), a server (http://…), or null",
            fix=f"{key}=sqlite:///outputs/mlflow.db",
        )
