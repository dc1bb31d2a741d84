"""TensorBoard as a server of this process, on loopback only."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import Any, final

import psutil
from tensorboard import program
from tensorboard.data import server_ingester

from dpexp import env
from dpexp.errors import ConfigError
from dpexp.network import LOOPBACK

# The tab that opens, and no smoothing in it nor in Time Series: a smoothed speed-up is a wrong one.
VIEW = "?smoothing=0#custom_scalars&_smoothingWeight=0"
MOST_POINTS = 100_000  # of a curve; event files hold the first 1,000 steps and four a second
END_S = 5  # for TensorBoard's data server to end


def serve(folder: Path, port: int | None) -> None:
    """Run TensorBoard until a signal ends it. Prints the link once it answers.

    Raises:
        ConfigError: the port cannot be had.
    """
    options: dict[str, Any] = {
        # Else it draws 1,000 points of a curve. 0 would be "all" to its reader, "none" to a chart.
        "samples_per_plugin": {"scalars": MOST_POINTS},
        # "auto" would take it too, and print a paragraph on that.
        "load_fast": "true" if _has_fast_reader() else "false",
    }
    if port is not None:
        options["port"] = _checked(port)
    env.spare_loopback_from_proxies()  # TensorBoard asks its data server by gRPC
    board = program.TensorBoard(server_class=_listening)
    board.configure(["", "--logdir", str(folder), "--host", LOOPBACK], **options)
    # Until now Ctrl-C ended this process at once; TensorBoard's server ends by it too, and cleanly.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        board.main()
    except KeyboardInterrupt:
        pass  # it came before the server listened
    finally:
        _end_children()


def _listening(wsgi_app: Any, flags: argparse.Namespace) -> _Server:
    """The server on its port.

    Raises:
        ConfigError: the port cannot be had.
    """
    try:
        server: _Server = program.with_port_scanning(_Server)(wsgi_app, flags)
    except program.TensorBoardServerException as error:
        raise ConfigError(
            "port", flags.port, f"cannot be used: {error.msg}", fix="another --port, or none"
        ) from error
    return server


def _checked(port: int) -> int:
    if not 0 <= port < 2**16:
        raise ConfigError("port", port, "is not a port", allowed="0 (any that is free) to 65535")
    return port


def _has_fast_reader() -> bool:
    try:
        server_ingester.get_server_binary()
    except server_ingester.NoDataServerError:
        return False
    return True


def _end_children() -> None:
    """End TensorBoard's data server now; by itself it would notice a moment after we are gone."""
    children = psutil.Process().children()
    for child in children:
        child.terminate()
    psutil.wait_procs(children, timeout=END_S)


@final
class _Server(program.WerkzeugServer):  # type: ignore[misc]
    """TensorBoard's server, which tells its link in our words when it listens."""

    def print_serving_message(self) -> None:
        print(f"TensorBoard: {self.get_url()}{VIEW} (Ctrl-C ends it)", flush=True)
