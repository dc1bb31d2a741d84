"""``--help``, ``--cfg job`` and a config error end in under 0.8 s and do not import torch."""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks.common import Pair, rounds, show

LIMIT_S = 0.8


def measure(*arguments: str) -> float:
    """Seconds of one `python -m dpexp <arguments>`."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "dpexp", *arguments], capture_output=True, check=False)
    return time.perf_counter() - began


def imports_torch(*arguments: str) -> bool:
    """Whether the command imports torch."""
    command = [sys.executable, "-X", "importtime", "-m", "dpexp", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    names = [line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()]
    return "torch" in names


def main() -> None:
    """Print the table."""
    count = rounds(5)
    pairs = []
    for arguments in (("--help",), ("--cfg", "job"), ("batch_size=abc",), ("parallel=dpp",)):
        name = " ".join(arguments) + (" (imports torch!)" if imports_torch(*arguments) else "")
        pairs.append(Pair(name, "s", [measure(*arguments) for _ in range(count)], [LIMIT_S], 1.0))
    show(pairs)


if __name__ == "__main__":
    main()
