"""Two hosts on one machine: network namespaces that a cable joins, each with a name of its own."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).parent.parent
HOSTS = ("a", "b")
ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}
CARDS = {"a": "fa0", "b": "fb0"}


def lacking() -> str | None:
    """Why there can be no such hosts here; None if there can."""
    missing = [name for name in ("ip", "tc", "unshare", "hostname") if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"dpexp-{os.getpid()}-try"
    tried = subprocess.run(
        ["ip", "netns", "add", name], capture_output=True, text=True, check=False
    )
    if tried.returncode != 0:
        return f"no network namespaces here: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return None


@dataclass
class Started:
    """A command on one of the hosts."""

    host: str
    process: subprocess.Popen[bytes]
    log: Path
    ended_s: float | None = None

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


@dataclass
class Cable:
    """Two hosts and what runs on them."""

    folder: Path
    names: dict[str, str]
    relay: subprocess.Popen[str] | None = None  # what the cable is made of, if not of veth
    started: list[Started] = field(default_factory=list)

    def start(
        self,
        host: str,
        command: Sequence[str],
        *,
        cwd: Path,
        before: str = "",
        clock_ahead_s: int = 0,
        **variables: str,
    ) -> Started:
        """Run a command on a host.

        Args:
            before: shell commands that run before it, with mounts that only it sees.
            clock_ahead_s: of the other host's clock, the monotonic one.
        """
        log = self.folder / f"{len(self.started)}.{host}.log"
        clock = ["--time", "--monotonic", str(clock_ahead_s), "--fork"] if clock_ahead_s else []
        script = f'hostname {host}; {before or ":"}; exec "$@"'
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.names[host], "unshare", "--uts", "--mount", *clock,
                 "sh", "-ec", script, "sh", *command],
                cwd=cwd, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": str(TESTS), **variables},
            )  # fmt: skip
        self.started.append(Started(host, process, log))
        return self.started[-1]

    def cut(self) -> None:
        """Pull the cable."""
        _do("ip", "-n", self.names["b"], "link", "set", CARDS["b"], "down")

    def delay(self, milliseconds: float) -> None:
        """Let all that is sent over the cable, either way, take so long to arrive."""
        if self.relay is not None and self.relay.stdin is not None:
            self.relay.stdin.write(f"{milliseconds}\n")
            self.relay.stdin.flush()
            return
        for host in HOSTS:
            place = ("-n", self.names[host], "qdisc", "replace", "dev", CARDS[host], "root")
            _do("tc", *place, "netem", "delay", f"{milliseconds}ms", "limit", "100000")

    def pids(self, host: str) -> list[int]:
        """Of all processes on a host."""
        listed = _do("ip", "netns", "pids", self.names[host])
        return [int(pid) for pid in listed.split()]

    def wait(self, timeout_s: float) -> list[int]:
        """The exit statuses of all that was started since the last wait; notes when each ended."""
        begun_s = time.monotonic()
        while any(each.ended_s is None for each in self.started):
            for each in self.started:
                if each.ended_s is None and each.process.poll() is not None:
                    each.ended_s = time.monotonic() - begun_s
            if time.monotonic() - begun_s > timeout_s:
                told = "\n".join(f"--- {s.host}\n{s.text()[-3000:]}" for s in self.started)
                raise TimeoutError(f"still running after {timeout_s:g} s\n{told}")
            time.sleep(0.05)
        return [each.process.returncode for each in self.started]

    def clear(self) -> None:
        """End what still runs, and forget what has ended."""
        for host in HOSTS:
            for pid in self.pids(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for each in self.started:
            each.process.kill()
            each.process.wait()
        self.started.clear()


@contextlib.contextmanager
def cable(folder: Path, *, delays: bool = False) -> Iterator[Cable]:
    """Two hosts; whatever happens, nothing of them stays.

    Args:
        delays: the cable can have a delay: by the kernel's netem, or else by relay.py.
    """
    _clear_stale()
    names = {host: f"dpexp-{os.getpid()}-{host}" for host in HOSTS}
    lab = Cable(folder, names)
    try:
        for host in HOSTS:
            _do("ip", "netns", "add", names[host])
        if delays and not _netem(names["a"]):
            lab.relay = _relay(names)
        else:
            _do("ip", "link", "add", CARDS["a"], "netns", names["a"], "type", "veth",
                "peer", "name", CARDS["b"], "netns", names["b"])  # fmt: skip
        for host in HOSTS:
            _do("ip", "-n", names[host], "link", "set", "lo", "up")
            _do("ip", "-n", names[host], "addr", "add", f"{ADDRESSES[host]}/24", "dev", CARDS[host])
            _do("ip", "-n", names[host], "link", "set", CARDS[host], "up")
        yield lab
    finally:
        for host in HOSTS:
            if Path("/run/netns", names[host]).exists():
                with contextlib.suppress(subprocess.CalledProcessError):
                    lab.clear()
                subprocess.run(["ip", "netns", "delete", names[host]], check=False)
        if lab.relay is not None:
            lab.relay.kill()
            lab.relay.communicate()


def _clear_stale() -> None:
    """Remove what a test run that was killed has left."""
    for place in Path("/run/netns").glob("dpexp-*-*"):
        owner = place.name.split("-")[1]
        if owner.isdigit() and not Path("/proc", owner).exists():
            for pid in _do("ip", "netns", "pids", place.name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _do("ip", "netns", "delete", place.name)


def _netem(namespace: str) -> bool:
    """Whether this kernel can delay packets by itself."""
    tried = ("tc", "-n", namespace, "qdisc", "replace", "dev", "lo", "root", "netem", "delay", "0")
    possible = subprocess.run(tried, capture_output=True, check=False).returncode == 0
    if possible:
        _do("tc", "-n", namespace, "qdisc", "delete", "dev", "lo", "root")
    return possible


def _relay(names: dict[str, str]) -> subprocess.Popen[str]:
    ends = [names["a"], CARDS["a"], names["b"], CARDS["b"]]
    relay = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("relay.py")), *ends],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert relay.stdout is not None
    assert relay.stdout.readline() == "ready\n"
    return relay


def shown(section: str, number: int) -> dict[str, list[str]]:
    """A block of docs/clusters.md with the command of each host, for these hosts.

    Args:
        section: its heading.
        number: of the block in the section, from 0.
    """
    page = (TESTS.parent / "docs" / "clusters.md").read_text(encoding="utf-8")
    told = page.split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = re.findall(r"```bash\n(.*?)```", told, re.DOTALL)[number].splitlines()
    commands = {}
    for host, line in zip(HOSTS, lines, strict=True):
        own = line.replace("10.0.0.", "10.77.0.").replace("eth0", CARDS[host])
        first, *rest = shlex.split(own)
        assert first == "torchrun"
        commands[host] = [sys.executable, "-m", "torch.distributed.run", *rest]
    return commands


def _do(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
