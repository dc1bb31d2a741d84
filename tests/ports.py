"""What a process and all that it starts listen on, seen from outside while it runs."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from collections import defaultdict
from dataclasses import dataclass, field

import psutil

LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
LOOK_S = 0.1


@dataclass
class Seen:
    """Addresses by whose they are: the command's own process (``root``), or one below it."""

    listening: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    ports: set[int] = field(default_factory=set)  # on which somebody waited for TCP connections
    datagrams: set[str] = field(default_factory=set)  # local addresses of UDP sockets
    peers: set[str] = field(default_factory=set)  # to which TCP connections went
    by_ss: set[str] = field(default_factory=set)
    looks: int = 0


def watched(command: subprocess.Popen[str], limit_s: float) -> Seen:
    """Look at all sockets of a command until it ends."""
    seen, deadline = Seen(), time.monotonic() + limit_s
    root = psutil.Process(command.pid)
    while command.poll() is None:
        assert time.monotonic() < deadline, "the command did not end"
        _look(root, seen)
        time.sleep(LOOK_S)
    return seen


def _look(root: psutil.Process, seen: Seen) -> None:
    kinds = {root.pid: "root"}
    try:
        kinds |= dict.fromkeys((child.pid for child in root.children(recursive=True)), "below")
    except psutil.Error:
        return
    for each in psutil.net_connections("inet"):
        kind = kinds.get(each.pid or 0)
        if kind is None:
            continue
        if each.status == psutil.CONN_LISTEN:
            seen.listening[kind].add(each.laddr.ip)
            seen.ports.add(each.laddr.port)
        elif each.type == socket.SOCK_DGRAM:
            seen.datagrams.add(each.laddr.ip)
        elif each.raddr:
            seen.peers.add(each.raddr.ip)
    seen.looks += 1
    if seen.looks % 10 == 1 and shutil.which("ss"):
        told = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
        for line in told.splitlines():
            if kinds.keys() & {int(pid) for pid in re.findall(r"pid=(\d+)", line)}:
                seen.by_ss.add(line.split()[3].rpartition(":")[0].strip("[]"))
