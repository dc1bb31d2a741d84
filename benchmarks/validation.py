"""Injected disturbances against what dpexp says of them: ``python -m benchmarks.validation``.

Each scenario disturbs a model whose computation is a pause of known length (paced.py), on 2 and 4
gloo ranks, so that the truth is known. The tests run the same scenarios (tests/test_validation.py).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import psutil

import dpexp
from benchmarks.common import ROOT
from benchmarks.overhead import describe
from benchmarks.scenarios import SCENARIOS, Drawn, Scenario
from dpexp.files import write_whole
from dpexp.report.waterfall import waterfall

PAGE = ROOT / "docs" / "validation.md"
COMMON = (
    "task=train", "model=custom", "model._target_=benchmarks.paced.Paced", "dataset.rows=320",
    "dataset.features=64", "dataset.targets=64", "batch_size=32", "epochs=null", "steps=15",
    "warmup_steps=3",
)  # fmt: skip
RANKS = (2, 4)
# Of a calibration. Four ranks share two cores, so each of their steps is less certain.
PAIRS = {2: 8, 4: 20}
HEAD = (
    "| disturbance | strategy | devices | must be found | found | what was found |",
    "|---|---|---|---|---|---|",
)


def draw(scenario: Scenario, ranks: int, seed: int) -> Drawn:
    """Run a scenario on so many ranks, and what its claims compare with."""
    calibrated = scenario.calm and scenario.strategy != "dp"  # which has no step without exchange
    pairs = f"measure.calibration_pairs={PAIRS[ranks] if calibrated else 0}"
    overrides = (*COMMON, *scenario.overrides, f"seed={seed}")
    quiet = tuple(o for o in overrides if not o.startswith("inject."))
    spread = (f"parallel={scenario.strategy}", f"num_devices={ranks}", pairs)
    run = _run(*overrides, *spread)
    calm = _run(*quiet, *spread) if scenario.calm else None
    if not scenario.alone:
        return Drawn(run, calm, None)
    base = _run(*(overrides if scenario.both else quiet), "parallel=none")
    return Drawn(run, calm, waterfall([run], [base]))


def _run(*overrides: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = dpexp.run(list(overrides), folder=Path(folder) / "run").result
    if result.status != "ok":
        raise RuntimeError(f"{overrides}: {result.error}")
    return result.to_dict()


def rows(scenario: Scenario, ranks: int, draws: Sequence[Drawn]) -> list[str]:
    """The table's lines: one for each claim."""
    lines = []
    for claim in scenario.claims:
        held = sum(claim.holds(drawn) for drawn in draws)
        lines.append(
            f"{_place(scenario, ranks)} {claim.text} | {held} of {len(draws)} "
            f"| {_seen([claim.shown(drawn) for drawn in draws])} |"
        )
    return lines


def _place(scenario: Scenario, ranks: int) -> str:
    """What the scenario's lines begin with."""
    return f"| {scenario.name} | {scenario.strategy} | {ranks} |"


def _seen(shown: Sequence[str | float]) -> str:
    numbers = [each for each in shown if not isinstance(each, str)]
    if numbers:
        return f"{statistics.median(numbers):.2f} ({min(numbers):.2f} to {max(numbers):.2f}) ms"
    counts = {each: shown.count(each) for each in dict.fromkeys(shown)}
    return "; ".join(f"{each}: {count}" for each, count in counts.items())


def main() -> None:
    """Run the scenarios and print the table; with ``--write`` into docs/validation.md."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.validation")
    parser.add_argument("--draws", type=int, default=20, help="runs of each scenario")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="WORD",
        help="lines that have one of these in their first columns; the page keeps its others",
    )  # fmt: skip
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    options = parser.parse_args()
    load = psutil.cpu_percent(1.0) / 100
    found: dict[str, list[str]] = {}
    for scenario, ranks in product(SCENARIOS, RANKS):
        place = _place(scenario, ranks)
        if not options.only or any(word in place for word in options.only):
            draws = [draw(scenario, ranks, seed) for seed in range(options.draws)]
            found[place] = rows(scenario, ranks, draws)
            print("\n".join(found[place]), flush=True)
    if options.write:
        write_whole(PAGE, _page(_with_those_of_page(found), load))


def _with_those_of_page(found: dict[str, list[str]]) -> list[str]:
    """All lines of the table, those that were not made anew as the page has them."""
    before = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else []
    lines = []
    for scenario, ranks in product(SCENARIOS, RANKS):
        place = _place(scenario, ranks)
        lines += found.get(place) or [line for line in before if line.startswith(place)]
    return lines


def _page(lines: Sequence[str], load: float) -> str:
    facts = "; ".join(f"{name}: {fact}" for name, fact in describe(load).items())
    table = "\n".join([*HEAD, *lines])
    return f"""# Injected truth against what dpexp says

Made by `python -m benchmarks.validation --write`. Each line is of runs that each lie beside one
without the disturbance and one on one device: with a process per device on gloo under `ddp` and
`fsdp`, with emulated devices under `dp`. The model's computation is a pause
of known length (0.5 to 5 ms for each row of forward, twice that in backward), so that ranks do not
fight for cores and the truth is known; the processes, the gradients' transport and the noise are
real. A time is found if it is within 10 % or 1 ms of the truth, whichever is more. A calibration
has {PAIRS[2]} pairs of steps on two devices and {PAIRS[4]} on four, where ranks share cores. See
[Measurement](measurement.md) for what the figures mean. The tests run the same scenarios.

{facts}

{table}

"More exposed" is against the same run without the disturbance, whose gradients have to travel too.
"""


if __name__ == "__main__":
    main()
