"""A Slurm of its own for tests: one controller and four pretend nodes on this machine, as root."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import final

import psutil

NODES = ("n0", "n1", "n2", "n3")
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
START_S = 20.0
_CONF = Path(__file__).parent / "cluster"


def why_not() -> str | None:
    """Why there can be no cluster here; None where there can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"needs Debian's Slurm and munge ({absent[0]} is not installed)"
    if os.geteuid() != 0:
        return "needs root, to start a Slurm of its own"
    return None


@final
class SlurmCluster:
    """Runs commands on a cluster that is up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.conf = folder / "slurm.conf"
        self.variables = {"SLURM_CONF": str(self.conf)}

    def run(
        self, *command: str | Path, timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """One of Slurm's commands, to its end."""
        return subprocess.run(
            [str(part) for part in command],
            env={**os.environ, **self.variables},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def jobs(self) -> dict[str, dict[str, str]]:
        """What the controller knows of its jobs, by their id: ``7``, or ``7_0`` in an array."""
        found = {}
        for line in self.run("scontrol", "--oneliner", "show", "job").stdout.splitlines():
            fields = dict(re.findall(r"(\S+?)=(\S*)", line))
            if "JobId" not in fields:
                continue
            array, task = fields.get("ArrayJobId"), fields.get("ArrayTaskId")
            found[f"{array}_{task}" if array else fields["JobId"]] = fields
        return found

    def active(self) -> list[str]:
        """Ids of jobs that wait or run."""
        return self.run("squeue", "--noheader", "--array", "--format=%i").stdout.split()

    def end_jobs(self) -> None:
        """Leave no job, and wait for it."""
        self.run("scancel", "--user=root", "--signal=KILL", "--full")
        self.run("scancel", "--user=root")
        _until(lambda: not self.active(), "jobs are left")


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """A cluster below `folder` (no long path: a socket lies in it); gone at the end."""
    folder.chmod(0o755)
    for name in ("state", "spool", "run", "log", "dev", "munge"):
        (folder / name).mkdir()
        (folder / name).chmod(0o755)
    host, ports = socket.gethostname().split(".")[0], _free_ports(1 + len(NODES))
    for name in ("slurm.conf", "gres.conf"):
        text = (_CONF / name).read_text()
        text = text.replace("@FOLDER@", str(folder)).replace("@HOST@", host)
        for index, port in enumerate(ports):
            text = text.replace(f"@PORT{index}@", str(port))
        (folder / name).write_text(text)
    for index in range(4):  # pretend GPUs: files to count
        (folder / f"dev/gpu{index}").touch()
    key = folder / "munge/key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    cluster = SlurmCluster(folder)
    try:
        _start(cluster)
        yield cluster
        cluster.end_jobs()
    finally:
        _end(folder)


def _start(cluster: SlurmCluster) -> None:
    folder = cluster.folder
    munge = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log"}
    paths = [f"--{option}={folder}/munge/{name}" for option, name in munge.items()]
    _ok(cluster, "munged", "--force", *paths, f"--seed-file={folder}/munge/seed")
    _ok(cluster, "slurmctld", "-f", cluster.conf, "-c")
    for node in NODES:
        _ok(cluster, "slurmd", "-f", cluster.conf, "-N", node)
    idle = ("sinfo", "--noheader", "--states=idle", "--format=%D")
    _until(lambda: cluster.run(*idle).stdout.strip() == str(len(NODES)), "nodes are not idle")


def _ok(cluster: SlurmCluster, *command: str | Path) -> None:
    # These programs go into the background and keep what they were given as output.
    with (cluster.folder / "log/started").open("a") as out:
        subprocess.run(
            [str(part) for part in command],
            env={**os.environ, **cluster.variables},
            stdout=out, stderr=out, stdin=subprocess.DEVNULL, check=True, timeout=30,
        )  # fmt: skip


def _end(folder: Path) -> None:
    """End each program that has written its process id into the folder, and only these."""
    files = [*sorted(folder.glob("run/slurmd.*.pid")), folder / "run/slurmctld.pid"]
    found = []
    for path in [*files, folder / "munge/pid"]:
        with contextlib.suppress(OSError, ValueError, psutil.NoSuchProcess):
            found.append(psutil.Process(int(path.read_text())))
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    for process in psutil.wait_procs(found, timeout=5)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _until(reached: Callable[[], bool], otherwise: str) -> None:
    deadline_s = time.monotonic() + START_S
    while not reached():
        if time.monotonic() > deadline_s:
            raise TimeoutError(otherwise)
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
