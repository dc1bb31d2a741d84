"""The page of :mod:`benchmarks.overhead`: text and tables. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.common import DRAWS, ROUNDS_FOR_AN_INTERVAL, Pair
from benchmarks.turns import SIDES, STRETCH, Paired

INSTALL = 'pip install -c constraints.txt -e ".[compare]"'
BRACKETS = f"""In brackets is the 95 % interval: a percentile bootstrap that
draws whole rounds, {DRAWS:,} times."""
NO_BRACKETS = f"""They have no intervals and nothing is decided: 95 % needs
{ROUNDS_FOR_AN_INTERVAL} rounds at least."""


@dataclass(frozen=True)
class Cost:
    """Everything on against everything off, for one model and strategy.

    Args:
        step: per measured step.
        once: seconds of the whole command beside its measured steps.
    """

    step: Paired
    once: Pair


@dataclass(frozen=True)
class Loop:
    """One way to write the training loop.

    Args:
        fed_as: the loop by hand that gets its batches in the same way.
        script: the file in `references/`; None for dpexp.
        package: what has to be installed for it.
    """

    name: str
    fed_as: str
    script: str | None = None
    package: str | None = None


@dataclass(frozen=True)
class Comparison:
    """The same loop, written in several ways.

    Args:
        loops: in the order of the table; the first is the loop by hand that all are compared with.
        step_us: microseconds per step, one figure a round; without the loops that are not
            installed.
    """

    name: str
    batches_per_epoch: int
    loops: tuple[Loop, ...]
    step_us: Mapping[str, list[float]]


def verdict(step: Paired) -> str:
    """Whether the limit is kept, as far as the interval can tell."""
    low, high = step.interval
    if high <= step.limit:
        return "met"
    return "missed" if low > step.limit else "undecided: the interval holds the limit"


def page(
    facts: Mapping[str, str], rounds: int, costs: list[Cost], comparisons: list[Comparison]
) -> str:
    """The whole page, in Markdown.

    Args:
        facts: of the machine and the software, in the order in which they are shown.
    """
    machine = [[name, value] for name, value in facts.items()]
    return TEMPLATE.format(
        rounds=rounds,
        steps=STRETCH,
        brackets=BRACKETS if rounds >= ROUNDS_FOR_AN_INTERVAL else NO_BRACKETS,
        install=INSTALL,
        machine=_table(["", ""], machine),
        costs=_costs(costs),
        comparisons="\n\n".join(_comparison(each) for each in comparisons),
    )


def _costs(costs: list[Cost]) -> str:
    heads = [
        "what", "on, µs", "off, µs", "on against off", "limit", "", "off against off",
        "once a run, s",
    ]  # fmt: skip
    rows = []
    for cost in costs:
        step = cost.step
        form, unit = ("{:+,.1f}", " µs") if step.difference else ("{:.3f}", "×")
        limit = f"{step.limit:+g} µs" if step.difference else f"{step.limit:g}×"
        on, off = (f"{step.median_us(side):,.1f}" for side in SIDES[:2])
        ends, noise = (
            " to ".join(form.format(end) for end in each) for each in (step.interval, step.noise)
        )
        change = f"{form.format(step.outcome)}{unit} ({ends})"
        rows.append(
            [step.name, on, off, change, limit, verdict(step), noise,
             _signed(cost.once, "s", digits=2)]
        )  # fmt: skip
    return _table(heads, rows)


def _comparison(comparison: Comparison) -> str:
    first = comparison.loops[0].name
    rows = []
    for loop in comparison.loops:
        found = comparison.step_us.get(loop.name)
        if found is None:
            rows.append([loop.name, f"not installed: `{INSTALL}`", "", ""])
            continue
        above = [
            "" if loop.name == base else _signed(_above(comparison, loop.name, base), "µs")
            for base in (first, loop.fed_as)
        ]
        rows.append([loop.name, _median(found), *above])
    heads = ["loop", "µs per step", "above the loop by hand", "above the one fed in the same way"]
    title = f"### {comparison.name}, {comparison.batches_per_epoch:,} batches an epoch"
    return f"{title}\n\n{_table(heads, rows)}"


def _above(comparison: Comparison, name: str, base: str) -> Pair:
    figures = comparison.step_us
    return Pair(name, "us/step", figures[name], figures[base], float("inf"), difference=True)


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _median(values: list[float]) -> str:
    return f"{statistics.median(values):,.1f}"


def _signed(pair: Pair, unit: str, digits: int = 1) -> str:
    return _between(pair, f"{{:+,.{digits}f}}", f" {unit}")


def _between(pair: Pair, form: str, unit: str) -> str:
    """The outcome, and its interval if there is one."""
    shown = f"{form.format(pair.outcome)}{unit}"
    if pair.interval is None:
        return shown
    low, high = pair.interval
    return f"{shown} ({form.format(low)} to {form.format(high)})"


TEMPLATE = """\
# What dpexp costs a step

Written by `python -m benchmarks.overhead --write`; do not edit it. Where whole commands are
compared, there are {rounds} rounds: in each round every side is measured once, in processes of its
own, and each round begins with another side. Figures are medians over the rounds. {brackets} Other
work on the machine changes all of them.

{machine}

## Everything on against everything off

On: `measure.comm=true measure.calibration_pairs=8 measure.flops=true check.parity=true`. Off: the
same keys `false`, and 0. Both record every step, as every run does. A step's time counts the
writing of records (`wall_s` + `recording_s` of the slowest rank).

Processes differ from each other by more than what is looked for, and so do two models of one
process (where their memory lies) and two seconds of one machine. So a launch of fresh processes has
several turns. For each turn everything is made anew three times: with everything on, with
everything off, and with everything off again. Then dpexp's own loop, recorder and sinks make
{steps} steps of one, {steps} of another and {steps} of the third, in an order drawn anew each time,
for some seconds; the first of each {steps} does not count. A side's figure in a turn is the median
over these stretches, and the seconds that it took to write a step's record. "on against off" is the
median over all turns of on against the mean of both off, with the 95 % interval of a bootstrap that
draws launches, and turns within them. "off against off" is the same interval of the two off sides:
the noise of the method. Each rank keeps to cores of its own, as with `pin=true`: when one changes
cores has nothing to do with either side.

The parity check, the calibration and the count of FLOPs work outside the measured steps: no step's
time holds them, and "once a run" says how much longer the whole command takes beside its measured
steps.

{costs}

"met" and "missed": the whole interval lies on that side of the limit.

## The same loop in other tools

One process, one device, the CPU; the same model, loss, batch size and SGD in all, a new random
order in each epoch; 10 steps of warm-up are left out. Where OMP_NUM_THREADS is not set, dpexp takes
a thread for each core it may use and the others torch's default. The first loop by hand and dpexp
read a batch from memory with one gather. The second loop by hand and the other tools use
`DataLoader(TensorDataset(...), shuffle=True, drop_last=True)` without loader processes, as their
users do; the last column says what they cost beyond that loader.

- dpexp: everything on, as above, and every step recorded.
- Accelerate: `Accelerator(cpu=True)`, `prepare`, `backward`; no tracker.
- Lightning Fabric: `Fabric(accelerator="cpu", devices=1)`, `setup`, `setup_dataloaders`,
  `backward`; no logger.
- Lightning Trainer: `barebones=True`, Lightning's mode without logger, checkpoints, progress bar,
  summary and sanity check; automatic optimization.

So the other tools record nothing here, and dpexp does. The loops are in `benchmarks/references/`;
`{install}` brings the tools.

{comparisons}
"""
