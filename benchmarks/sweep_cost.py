"""What a further cell of a sweep costs besides its processes: under 30 ms.

Own cost: wall time of the command without that of the rank's process, which is from the request to
the fork server until its result can be read, and from when it is told that this was read to its
end. What the agent needs to notice the result lies between the two, and is own cost. Measured in
the process of the sweep, which wraps the functions that are named in the table; the cost of one
cell is the difference between a sweep of 21 and one of 1, divided by 20. The CPU time of the parent
is shown beside it: it says more on a machine that is busy.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.common import ROOT, Pair, rounds, show

CELLS = 20
LIMIT_MS = 30.0
TYPED = ("parallel=none", "num_devices=1", "epochs=null", "steps=1")
WHOSE = {
    "compose": "composing (the sweeper's check and the launcher)",
    "files": "Hydra: the files in .hydra/",
    "job": "Hydra: copies of the config, log, callbacks",
    "plan": "config, checks, plan, environment, console",
    "launch": "starting the agent, its store, the scratch folder, and their end",
    "notice": "until the agent sees that the rank has a result",
    "result": "writing run.json",
    "report": "the sweep's report",
    "rest": "the rest",
}


class Clock:
    """Seconds in wrapped functions by name, and the times at which ranks lived."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self.cpu: dict[str, float] = {}  # of the main thread
        self._asked: list[float] = []  # when each rank's process was asked for
        self._ready: dict[int, float] = {}  # by rank: when its result could be read
        self._ended: dict[int, float] = {}
        self._read: list[float] = []  # when a poll began that found the result
        self._waiting: list[threading.Thread] = []

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        """Add up the time in a function."""
        inner = owner[attribute] if isinstance(owner, dict) else getattr(owner, attribute)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            began, cpu = time.perf_counter(), time.thread_time()
            try:
                return inner(*arguments, **keywords)
            finally:
                self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - began
                self.cpu[name] = self.cpu.get(name, 0.0) + time.thread_time() - cpu

        if isinstance(owner, dict):
            owner[attribute] = timed
        else:
            setattr(owner, attribute, timed)

    def watch_ranks(self, context: Any) -> None:
        """Note when each process is asked for, has a result, is told that it was read, and ends.

        Args:
            context: torch's MultiprocessContext; of one rank, all here have one.
        """
        connect, start, poll = forkserver.connect_to_new_process, context._start, context._poll

        def connecting(fds: Any) -> Any:
            self._asked.append(time.perf_counter())
            return connect(fds)

        def starting(ranks: Any) -> None:
            start(ranks)
            ends = (ranks._ret_vals[0].reader, ranks._pc.processes[0].sentinel)
            thread = threading.Thread(target=self._wait, args=(len(self._asked) - 1, *ends))
            thread.start()
            self._waiting.append(thread)

        def polling(ranks: Any) -> Any:
            began = time.perf_counter()
            found = poll(ranks)
            if found is not None:
                self._read.append(began)
            return found

        forkserver.connect_to_new_process = connecting
        context._start, context._poll = starting, polling

    def _wait(self, number: int, result: Any, sentinel: int) -> None:
        connection.wait([result, sentinel])
        self._ready[number] = time.perf_counter()
        connection.wait([sentinel])  # its pipe is readable when the process ends
        self._ended[number] = time.perf_counter()

    def figures(self, wall_s: float, cpu_s: float) -> dict[str, dict[str, float]]:
        """Seconds of wall time and of CPU time by the names of :data:`WHOSE`, and of the whole."""
        for thread in self._waiting:
            thread.join()
        life_s = notice_s = 0.0
        for number, (asked, read) in enumerate(zip(self._asked, self._read, strict=True)):
            ready = min(self._ready[number], read)  # the thread may be told later than the agent
            notice_s += read - ready
            life_s += ready - asked + self._ended[number] - read
        wall, cpu = _parts(self.spent), _parts(self.cpu)
        wall["launch"] -= life_s + notice_s
        wall["notice"], cpu["notice"] = notice_s, 0.0  # CPU time of the polls is in "launch"
        wall["rest"] = wall_s - life_s - sum(wall.values())
        cpu["rest"] = cpu_s - sum(cpu.values())
        return {
            "wall": {**wall, "own": wall_s - life_s, "life": life_s},
            "cpu": {**cpu, "own": cpu_s, "life": 0.0},
        }


def _parts(spent: dict[str, float]) -> dict[str, float]:
    return {
        "compose": spent["compose"],
        "files": spent["files"],
        "job": spent["job"] - spent["task"] - spent["files"],
        "plan": spent["task"] - spent["launch"] - spent["result"],
        "launch": spent["launch"],
        "result": spent["result"],
        "report": spent["report"],
    }


def inner(cells: int) -> None:
    """A sweep of so many cells in this process; prints its figures."""
    gc.disable()
    from hydra.core.plugins import Plugins
    from torch.distributed.elastic.multiprocessing.api import MultiprocessContext

    import dpexp.__main__ as command
    import dpexp.launch
    import dpexp.report.build
    from dpexp import job_config, sweep
    from dpexp.composing import SweepLoader
    from dpexp.records import RunResult

    # Imports take too long to be part of a difference. A sweep's first cell makes them, and keeps
    # them from garbage collections in the same way.
    gc.freeze()
    gc.enable()
    clock = Clock()
    name = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
    launcher: Any = Plugins.instance().class_name_to_class[name]
    clock.wrap(SweepLoader, "load_sweep_config", "compose")
    clock.wrap(job_config, "_save", "files")
    clock.wrap(launcher.launch.__globals__, "run_job", "job")
    clock.wrap(dpexp.launch, "launch", "launch")
    clock.watch_ranks(MultiprocessContext)
    clock.wrap(RunResult, "write", "result")
    clock.wrap(sweep, "finish", "report")
    clock.wrap(command, "run_job", "task")
    seeds = ",".join(str(seed) for seed in range(cells))
    sys.argv[1:] = ["-m", *TYPED, f"seed={seeds}"]
    began, cpu = time.perf_counter(), time.process_time()
    command.main()
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    print("\n" + json.dumps(clock.figures(wall_s, cpu_s)))


def measure(cells: int) -> dict[str, dict[str, float]]:
    """The figures of a sweep in a process and a folder of its own."""
    code = f"from benchmarks.sweep_cost import inner; inner({cells})"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"],
            cwd=Path(folder), capture_output=True, text=True, check=True,
        )  # fmt: skip
    return dict(json.loads(done.stdout.splitlines()[-1]))


def further_cell() -> dict[str, dict[str, float]]:
    """Milliseconds that each of 20 further cells adds, of wall and CPU time, by part."""
    one, many = measure(1), measure(1 + CELLS)
    return {
        kind: {name: 1000 * (many[kind][name] - one[kind][name]) / CELLS for name in one[kind]}
        for kind in one
    }


def main() -> None:
    """Print the result and where it goes."""
    found = [further_cell() for _ in range(rounds(5))]
    own = [each["wall"]["own"] for each in found]
    show([Pair("own cost of a further cell", "ms", own, [LIMIT_MS], 1)])
    table = Table("where it goes", "wall ms", "CPU ms (medians)", box=box.SIMPLE_HEAD)
    for name, text in {**WHOSE, "own": "all of it", "life": "besides: life of the rank"}.items():
        middle = [statistics.median(each[kind][name] for each in found) for kind in ("wall", "cpu")]
        table.add_row(text, *(f"{value:.1f}" for value in middle))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
