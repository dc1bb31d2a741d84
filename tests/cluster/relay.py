"""A cable with a delay, for kernels without netem: packets pass through this process.

Run as ``python relay.py <namespace> <card> <namespace> <card>``. Makes a tun device in each
namespace and hands on what one gets to the other. A number on standard input is the delay from then
on, in milliseconds; the end of the input is the end.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import os
import struct
import sys
import threading
import time

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
delay_s = 0.0


def tun(namespace: str, name: str) -> int:
    """A new tun device in a network namespace; a read from it is one packet."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}", "rb") as place:
        if libc.setns(place.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return device


def hand_on(source: int, sink: int) -> None:
    """Read packets, and write each when its time has come; their order stays."""
    waiting: collections.deque[tuple[float, bytes]] = collections.deque()
    more = threading.Condition()

    def write() -> None:
        while True:
            with more:
                while not waiting:
                    more.wait()
                due_s, packet = waiting.popleft()
            time.sleep(max(0.0, due_s - time.monotonic()))
            with contextlib.suppress(OSError):  # that end is not up (yet): it is lost
                os.write(sink, packet)

    threading.Thread(target=write, daemon=True).start()
    while True:
        packet = os.read(source, 65536)
        with more:
            waiting.append((time.monotonic() + delay_s, packet))
            more.notify()


def main() -> None:
    global delay_s  # noqa: PLW0603  # one process is one cable
    ends = tun(*sys.argv[1:3]), tun(*sys.argv[3:5])
    for source, sink in (ends, ends[::-1]):
        threading.Thread(target=hand_on, args=(source, sink), daemon=True).start()
    print("ready", flush=True)
    for line in sys.stdin:
        delay_s = float(line) / 1e3
    os._exit(0)


if __name__ == "__main__":
    main()
