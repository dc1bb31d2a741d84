"""Injected disturbances against what dpexp says of them: ``python -m benchmarks.validation``.

Each scenario disturbs a model whose computation is a pause of known length (paced.py), on 2 and 4
gloo ranks, so that the truth is known. The tests run the same scenarios (tests/test_validation.py).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import dpexp
from benchmarks.common import ROOT
from benchmarks.overhead import describe
from dpexp.files import write_whole
from dpexp.report.waterfall import Waterfall, shown, waterfall

PAGE = ROOT / "docs" / "validation.md"
COMMON = (
    "task=train", "model=custom", "model._target_=benchmarks.paced.Paced", "dataset.rows=320",
    "dataset.features=64", "dataset.targets=64", "batch_size=32", "epochs=null", "steps=15",
    "warmup_steps=3",
)  # fmt: skip
PAIRS = 8
DELAY_S = 0.05
# Just below a layer's bytes: a bucket is full when it has a whole layer, so there are two.
TWO_BUCKETS = "parallel.bucket_cap_mb=0.0157"


@dataclass(frozen=True)
class Drawn:
    """One draw of a scenario.

    Args:
        calm: the same run without the disturbance; None where no claim compares with it.
        fall: the waterfall against one device; None where no claim is about it.
    """

    run: dict[str, Any]
    calm: dict[str, Any] | None
    fall: Waterfall | None

    @property
    def largest(self) -> str:
        """The waterfall's largest part."""
        assert self.fall is not None
        return self.fall.largest

    def more(self, read: Callable[[dict[str, Any]], float]) -> float:
        """How much larger a figure is than without the disturbance."""
        assert self.calm is not None
        return read(self.run) - read(self.calm)


def exposed_ms(run: dict[str, Any], part: str = "comm_exposed") -> float:
    """Of the median step of the slowest rank, by the times of the buckets."""
    return float(run["timing"][part]["p50_s"]) * 1e3


def exchange_ms(run: dict[str, Any]) -> float:
    """What the calibration found."""
    return float(run["comm"]["calibration"]["exchange_s"]) * 1e3


@dataclass(frozen=True)
class Claim:
    """What must be found, and how it is read from a draw."""

    text: str
    holds: Callable[[Drawn], bool]
    shown: Callable[[Drawn], str | float]


@dataclass(frozen=True)
class Scenario:
    """A disturbance and the claims that must hold under it.

    Args:
        calm: whether claims compare with the run without the disturbance, by both methods.
        alone: whether they are about the waterfall, which needs a run on one device.
        both: whether that one is disturbed in the same way.
    """

    name: str
    overrides: tuple[str, ...]
    claims: tuple[Claim, ...]
    calm: bool = False
    alone: bool = True
    both: bool = False


def near(measured_ms: float, truth_ms: float) -> bool:
    """Within 10 % or 1 ms, whichever is more."""
    return abs(measured_ms - truth_ms) <= max(0.1 * truth_ms, 1.0)


def largest(part: str) -> Claim:
    """The waterfall's largest part."""
    return Claim(
        f"largest part of the waterfall: {shown(part)}",
        lambda drawn: drawn.largest == part,
        lambda drawn: shown(drawn.largest),
    )


def named(rank: int, phase: str) -> Claim:
    """The straggler and where it lost its time."""
    return Claim(
        f"straggler: rank {rank}, in {phase}",
        lambda drawn: (
            (drawn.run["stragglers"]["rank"], drawn.run["stragglers"]["phase"]) == (rank, phase)
        ),
        lambda drawn: f"rank {drawn.run['stragglers']['rank']}, {drawn.run['stragglers']['phase']}",
    )


def amounts_to(text: str, read: Callable[[Drawn], float], truth_ms: float) -> Claim:
    """A figure in milliseconds."""
    return Claim(
        f"{text}: {truth_ms:g} ms",
        lambda drawn: near(read(drawn), truth_ms),
        lambda drawn: round(read(drawn), 2),
    )


def by_buckets(drawn: Drawn) -> float:
    """How much more was exposed than without the disturbance."""
    return drawn.more(exposed_ms)


def by_calibration(drawn: Drawn) -> float:
    """The same by the other method."""
    return drawn.more(exchange_ms)


def overlapped(drawn: Drawn) -> float:
    """How much more was hidden behind the computation."""
    return drawn.more(lambda run: exposed_ms(run, "comm_overlapped"))


def agree() -> Claim:
    """The two methods, on the run as it is."""
    return Claim(
        "both methods agree",
        lambda drawn: near(exposed_ms(drawn.run), exchange_ms(drawn.run)),
        lambda drawn: round(exposed_ms(drawn.run) - exchange_ms(drawn.run), 2),
    )


MS = DELAY_S * 1e3
SCENARIOS = (
    Scenario(
        "each collective takes 50 ms longer, one bucket",
        (f"inject.collective_delay_s={DELAY_S}",),
        (
            amounts_to("more exposed, by buckets", by_buckets, MS),
            amounts_to("more exposed, by calibration", by_calibration, MS),
            amounts_to("more overlapped", overlapped, 0.0),
            agree(),
            largest("exposed_communication"),
        ),
        calm=True,
    ),
    Scenario(
        "each collective takes 50 ms longer, two buckets, one behind the computation",
        (f"inject.collective_delay_s={DELAY_S}", TWO_BUCKETS, "+model.row_s=0.004", "steps=10"),
        (
            amounts_to("more exposed, by buckets", by_buckets, MS),
            amounts_to("more exposed, by calibration", by_calibration, MS),
            amounts_to("more overlapped", overlapped, MS),
            agree(),
        ),
        calm=True,
        alone=False,
    ),
    Scenario(
        "rank 1 computes 1.2 times as long",
        ("inject.slow_rank=1", "inject.slow_factor=1.2", "+model.row_s=0.003"),
        (named(1, "forward"), largest("waiting_for_the_slowest_rank")),
    ),
    Scenario(
        "each batch takes 50 ms longer to fetch",
        (f"inject.data_delay_s={DELAY_S}",),
        (largest("data"),),
        both=True,
    ),
    Scenario(
        "each batch takes 50 ms longer to fetch on rank 1",
        (f"inject.data_delay_s={DELAY_S}", "inject.data_rank=1"),
        (named(1, "data"), largest("waiting_for_the_slowest_rank")),
    ),
    Scenario(
        "rank 0 pauses for 50 ms a step on average",
        ("inject.noisy_rank=0", f"inject.noise_s={DELAY_S}", "steps=40"),
        (named(0, "forward"), largest("waiting_for_the_slowest_rank")),
    ),
)


def draw(scenario: Scenario, ranks: int, seed: int) -> Drawn:
    """Run a scenario on so many ranks, and what its claims compare with."""
    pairs = f"measure.calibration_pairs={PAIRS if scenario.calm else 0}"
    overrides = (*COMMON, *scenario.overrides, f"seed={seed}")
    quiet = tuple(o for o in overrides if not o.startswith("inject."))
    spread = ("parallel=ddp", f"num_devices={ranks}", pairs)
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
            f"| {scenario.name} | {ranks} | {claim.text} | {held} of {len(draws)} "
            f"| {_seen([claim.shown(drawn) for drawn in draws])} |"
        )
    return lines


def _seen(shown: Sequence[str | float]) -> str:
    numbers = [each for each in shown if not isinstance(each, str)]
    if numbers:
        return f"{statistics.median(numbers):.2f} ({min(numbers):.2f} to {max(numbers):.2f}) ms"
    counts = {each: shown.count(each) for each in dict.fromkeys(shown)}
    return "; ".join(f"{each}: {count}" for each, count in counts.items())


def main() -> None:
    """Run all scenarios and print the table; with ``--write`` into docs/validation.md."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=20, help="runs of each scenario")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    options = parser.parse_args()
    table = [
        "| disturbance | ranks | must be found | found | what was found |",
        "|---|---|---|---|---|",
    ]
    for scenario in SCENARIOS:
        for ranks in (2, 4):
            draws = [draw(scenario, ranks, seed) for seed in range(options.draws)]
            lines = rows(scenario, ranks, draws)
            print("\n".join(lines), flush=True)
            table += lines
    if options.write:
        write_whole(PAGE, _page("\n".join(table), options.draws))


def _page(table: str, draws: int) -> str:
    load = psutil.cpu_percent(1.0) / 100
    facts = "; ".join(f"{name}: {fact}" for name, fact in describe(load).items())
    return f"""# Injected truth against what dpexp says

Made by `python -m benchmarks.validation --write`. Each line is {draws} runs under `ddp` on gloo,
each beside a run without the disturbance and one on one device. The model's computation is a pause
of known length (0.5 to 5 ms for each row of forward, twice that in backward), so that ranks do not
fight for cores and the truth is known; the processes, the gradients' transport and the noise are
real. A time is found if it is within 10 % or 1 ms of the truth, whichever is more. See
[Measurement](measurement.md) for what the figures mean. The tests run the same scenarios.

{facts}

{table}

"More exposed" is against the same run without the disturbance, whose gradients have to travel too.
"""


if __name__ == "__main__":
    main()
