"""A try of a fault: its folder, the commands in it, and what can be done to them from outside."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.reliability.command import Command
from benchmarks.reliability.looking import cell_folder, steps_in_table
from benchmarks.reliability.misbehaving import STRUCK_CELL, mark

DISK_BYTES = 2**20
TWICE_S = 0.6
STEPS_BEFORE = 3


@dataclass(frozen=True)
class Scene:
    """Where a try happens.

    Args:
        place: a scratch folder; the sweep is in `disk/sweep` below it.
        number: of the try.
    """

    place: Path
    number: int

    @property
    def sweep(self) -> Path:
        return self.place / "disk" / "sweep"

    @property
    def struck(self) -> Path | None:
        """The struck cell's folder."""
        return cell_folder(self.sweep, STRUCK_CELL)

    @property
    def fault(self) -> Path:
        """A file whose time is that of the fault."""
        return self.place / "fault"

    def steps(self) -> int:
        """Of the struck cell, by its table."""
        return len(steps_in_table(self.struck))


Strike = Callable[[Scene, Command], None]


def to_first(signum: int) -> Strike:
    """A signal to the command's first process, as `kill` sends it."""

    def strike(scene: Scene, command: Command) -> None:
        mark(str(scene.place))
        os.kill(command.process.pid, signum)

    return strike


def ctrl_c(scene: Scene, command: Command) -> None:
    """SIGINT to all of its processes, as a terminal sends it."""
    mark(str(scene.place))
    os.killpg(command.process.pid, signal.SIGINT)


def ctrl_c_twice(scene: Scene, command: Command) -> None:
    """The second one while the first is still being answered: the rank is stuck in C code."""
    ctrl_c(scene, command)
    time.sleep(TWICE_S)
    os.killpg(command.process.pid, signal.SIGINT)


def ctrl_c_then_terminate(scene: Scene, command: Command) -> None:
    """SIGINT, which must do nothing, and SIGTERM three steps later."""
    os.killpg(command.process.pid, signal.SIGINT)
    before = scene.steps()
    command.wait_until(lambda: scene.steps() >= before + STEPS_BEFORE)
    to_first(signal.SIGTERM)(scene, command)


@contextmanager
def small_disk(scene: Scene) -> Iterator[None]:
    """A file system of its own for the sweep. Needs root."""
    disk = str(scene.place / "disk")
    mounted = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", disk]
    subprocess.run(mounted, check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def remount(scene: Scene, how: str) -> None:
    """The disk, `ro` or `rw`, whatever is open on it."""
    mounted = ["mount", "-o", f"remount,{how},size={DISK_BYTES}", str(scene.place / "disk")]
    for _ in range(200):  # busy for ro while a file is open for writing
        if subprocess.run(mounted, check=False, capture_output=True).returncode == 0:
            return
        time.sleep(0.01)
    raise RuntimeError(f"{scene.place / 'disk'} cannot be remounted")


@contextmanager
def read_only(scene: Scene) -> Iterator[None]:
    """The sweep's folder exists, on a disk that cannot be written."""
    with small_disk(scene):
        remount(scene, "ro")
        try:
            yield
        finally:
            remount(scene, "rw")


@contextmanager
def becoming_read_only(scene: Scene) -> Iterator[None]:
    """A disk of its own for :func:`make_read_only`. Needs root."""
    with small_disk(scene):
        try:
            yield
        finally:
            make_writable(scene)


def make_read_only(scene: Scene, _command: Command) -> None:
    """The folder, while a cell runs: nothing new can be made in it; what is open stays open."""
    mark(str(scene.place))
    disk = str(scene.place / "disk")
    # A mount above the one through which files are open: else there would be none for writing.
    subprocess.run(["mount", "--bind", disk, disk], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", disk], check=True)


def make_writable(scene: Scene) -> None:
    """Undo :func:`make_read_only`."""
    disk = str(scene.place / "disk")
    with Path("/proc/self/mounts").open(encoding="utf-8") as mounts:
        above = sum(line.split()[1] == disk for line in mounts) - 1
    for _ in range(above):
        subprocess.run(["umount", "--lazy", disk], check=True)


def kill_while_run_json_is_written(scene: Scene, command: Command) -> None:
    """SIGKILL to the first process as soon as it has begun with the struck cell's result."""
    assert scene.struck is not None
    while command.process.poll() is None:
        if any("run.json" in path.name for path in scene.struck.iterdir()):
            os.kill(command.process.pid, signal.SIGKILL)
            mark(str(scene.place))
            return


@contextmanager
def ports_taken(scene: Scene) -> Iterator[dict[str, str]]:
    """torch's usual port and that of MASTER_PORT have a listener. Gives the variables."""
    with socket.socket() as usual, socket.socket() as other:
        for taken, port in ((usual, 29500), (other, 0)):
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(("127.0.0.1", port))
            taken.listen()
        port = other.getsockname()[1]
        yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
