"""The page of :mod:`benchmarks.scale`: text and tables. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.common import ROOT

PAGE = ROOT / "docs" / "scale.md"
A_RANK, RANK_0, PARENT, ALL = "a rank", "rank 0", "the parent", "all ranks"
# The largest exponent allowed: a rank's own cost is not to grow, but figures of CPU time scatter.
LIMITS = {A_RANK: 0.3, RANK_0: 1.1, PARENT: 1.1, ALL: 1.1}


@dataclass(frozen=True)
class Figure:
    """What something costs at one number of ranks.

    Args:
        whose: whose cost it is: of :data:`LIMITS`.
    """

    name: str
    whose: str
    unit: str
    value: float


@dataclass(frozen=True)
class Growth:
    """A figure at several numbers of ranks."""

    name: str
    whose: str
    unit: str
    sizes: tuple[int, ...]
    values: tuple[float, ...]

    @property
    def exponent(self) -> float:
        """Of ranks ** exponent: the slope of the line through the logarithms, least squares."""
        if min(self.values) <= 0:
            return 0.0
        return float(np.polyfit(np.log(self.sizes), np.log(self.values), 1)[0])

    @property
    def is_bounded(self) -> bool:
        """Whether it grows no faster than it may."""
        return self.exponent <= LIMITS[self.whose]


def growths(sizes: Sequence[int], found: Sequence[Sequence[Figure]]) -> list[Growth]:
    """Each figure over the sizes.

    Args:
        found: of each size the same figures in the same order.
    """
    return [
        Growth(
            each[0].name,
            each[0].whose,
            each[0].unit,
            tuple(sizes),
            tuple(figure.value for figure in each),
        )
        for each in zip(*found, strict=True)
    ]


def page(facts: Mapping[str, str], found: Sequence[Growth], settings: Mapping[str, object]) -> str:
    """The whole page, in Markdown.

    Args:
        facts: of the machine and the software, in the order in which they are shown.
        settings: what the text says of the steps that were made up.
    """
    machine = "\n".join(
        ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items())]
    )
    of = {whose: [each for each in found if each.whose == whose] for whose in LIMITS}
    return TEMPLATE.format(
        machine=machine,
        own=_table(of[A_RANK], total=True),
        first=_table(of[RANK_0]),
        parent=_table([*of[PARENT], *of[ALL]]),
        **settings,
    )


def _table(rows: Sequence[Growth], *, total: bool = False) -> str:
    sizes = rows[0].sizes
    heads = ["simulated", "unit", *(f"{size:,} ranks" for size in sizes)]
    heads += [f"all of {sizes[-1]:,} together"] * total + ["exponent", "may be", ""]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [row.name, row.unit, *map(_shown, row.values)]
        cells += [_shown(row.values[-1] * sizes[-1])] * total
        verdict = "met" if row.is_bounded else "MISSED"
        cells += [f"{round(row.exponent, 2) + 0.0:.2f}", f"{LIMITS[row.whose]:g}", verdict]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


TEMPLATE = """# What grows with the number of ranks

How dpexp's own work grows from 64 to 1,024 ranks: **simulated**, and at the end what was tried
with real ranks. Made by `python -m benchmarks.scale --write`, which takes a minute of CPU time.

## How it was done

One rank after the other is played in one process. Its communicator (`comm.py`) is the real one,
over torch's fake process group (`torch.testing._internal.distributed.fake_pg`), whose collectives
return at once and bring nothing. What a rank would hand over and get is counted. Steps are made
up: {steps} steps a flush (one in which rank 0 hears who was late), {buckets} collectives a step,
{layers} modules in `shapes.csv`, {per_host} ranks a host. What rank 0 would get of the others is
made up too. Plan, schedule, recorder, tables, results and report are the real code.

So the figures say what dpexp's own work costs, and how much it would send. They do not say how
long a network takes for that, nor what torch itself does (below).

Milliseconds are CPU time, the least of {turns} turns. Memory is what Python and numpy held at
most meanwhile (`tracemalloc`), without torch's tensors, so what is received comes on top; of the
report it is the process's peak.

The exponent is that of ranks to the power of it: the slope of the line through the logarithms of
the three figures, by least squares. A part that does not grow makes it smaller than that of the
part that does. A rank's own cost is not to grow; CPU times scatter, hence 0.3. That of rank 0, of
the parent and of the number of files may grow as the ranks do, 1; again with a tenth for scatter.
Where 64 ranks still have a file each, a figure falls before it grows.

{machine}

## What each rank does

{own}

All of 1,024 together is a rank's figure times 1,024: in total it grows as the ranks do.

## What rank 0 does besides

{first}

The flush of rank 0 is the one that the others wait for; it is in no step's time (`recording_s`).

## What is made once for all

{parent}

The report is that of a sweep whose cells have 1, 2, 4, … ranks, up to the number on top. Its peak
is mostly Matplotlib's.

## What keeps it so

- **Flushes.** Of each collective a rank has to know when the last rank was ready, and rank 0 by
  how much each rank came late. Both are reduced on the way: a maximum over ranks for all, and a
  number per step of each rank for rank 0. Would every rank get everybody's rows, it would be
  {everybody_mb:,.1f} MB a flush for each of 1,024 ranks, and {everybody_gb:,.1f} GB for all of
  them.
- **Stragglers.** Rank 0 keeps how late each rank came in at most 1,024 groups of steps, however
  long the run is.
- **Results.** What ranks send to one of them is padded to the longest. Rank 0's own result, the
  longest since it knows of every rank, is not sent: with it, it would be {padded_mb:,.0f} MB at
  1,024 ranks.
- **Clocks.** One rank of each host is asked for its clock: {asked_hosts:,} questions with 1,024
  ranks on {hosts} hosts, and not {asked_ranks:,}.
- **Tables.** More than 64 ranks share a table per host. It has no column for each replica, since
  each rank has a row of its own: with 1,024 columns in the rows of 1,024 ranks a step would take
  {columns_mb:.1f} MB. TensorBoard's tags `shape/replica_<i>_rows` are left out for the same
  reason.
- **The timeline.** Of more than 64 ranks, 64 at equal distances and the slowest one are in
  `timeline.json`. Stacks of a hang are those of the 64 ranks furthest behind.
- **Shapes.** TensorBoard's table of them has the first 1,000; `shapes.csv` has all.
- **Scratch.** What ranks that end early leave for the launcher, and their stacks, are in one file
  each, in a folder for temporary files.
- **Results on one machine.** The ranks of a machine give their results through one queue
  (`one_queue.py`). torch would hand each rank a queue for each of all, and could not start more
  than some 120.

What is per rank in `run.json` (`ranks`, `comm.ranks`, `stragglers.ranks`, `memory`) stays: it is
what a reader looks a slow rank up in.

## What is torch's

- gloo connects every rank with every other one: 1,023 sockets in each of 1,024 ranks. All are
  made at the start, and each rank reads the addresses of all others from rank 0's store.
- gloo's all-reduce goes round a ring: 2 × (ranks - 1) messages of each rank, one after the other.
  There is about one flush a second, with {calls} collectives, one of which is to rank 0
  alone.
- Each rank that dpexp starts itself gets the environment variables that torch has for all ranks
  of that machine: about 0.6 KB each, which is 10 MB for 128 ranks of one machine. Under torchrun
  there is none of that.

## What grows faster, once a run

- Ranks of several hosts meet in torchrun's store before they begin (`meeting.py`), and each reads
  what all have said: host, address, process, some hundred bytes of each rank. So the store gives
  out as many entries as ranks times ranks. This is not in the figures.

## What grows with other things

- A rank draws the order of the whole dataset for each epoch; that does not depend on the ranks.
- An iterable dataset is read as a whole by every rank, and `check.parity` brings the rows of
  whole batches to rank 0: under `scaling=weak` a batch grows with the ranks.
- Checkpoints are torch's: each rank that has something to write makes a file of its own.
- `task=evaluate` brings two numbers of each row to rank 0.

## Tried with real ranks

Measured by hand on 2026-11-30 on one machine with 2 cores (AMD EPYC, Linux, 24 GB), torch 2.13.0
(CPU), while other programs kept it busy: gloo over loopback, `linear` 5-2, one row per rank,
three steps.

| measured | 70 ranks | 128 ranks |
|---|---|---|
| the whole command | 24 s | 39 s |
| by which the machine's available memory fell | 3.4 GB | 3.8 GB |
| the mean step (two of them; 35 and 64 ranks share a core) | 153 ms | 239 ms |
| tables of steps | 1 (`steps.host0.csv`), 210 rows | 1, 384 rows |
| `run.json` | 98 KB | 172 KB |
| `timeline.json` | 146 KB, 64 ranks | 147 KB, 64 ranks |

    python -m dpexp parallel=ddp num_devices=128 task=train batch_size=128 dataset.rows=1024 \\
        epochs=null steps=3 warmup_steps=1 measure.flops=false measure.calibration_pairs=0 \\
        check.parity=false parallel.timeout_s=250

With the limit of 64 lowered to 2, two of torchrun's agents on that machine with two ranks each
made a table each (`tests/test_many_ranks.py`).

## Not tried

- More than 128 real ranks, and many ranks on real hosts: no network, no shared file system and no
  GPU has seen this. On two hosts at most four ranks have run ([From one machine to
  many](clusters.md)).
- NCCL at any number of ranks. What dpexp exchanges itself goes over gloo there too, so a second
  mesh of sockets is made.
- `num_devices` takes at most 1,024, since nothing was looked at beyond; `auto` under torchrun
  takes what there is.
- Appending to a table on a file system without locks has been tested with a stand-in only (there
  the half row of a killed rank stays, and readers leave it out).
"""
