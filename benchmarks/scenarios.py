"""The disturbances of validation.py, and what must be found under each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dpexp.report.waterfall import Waterfall, shown

DELAY_S = 0.05
# Scatter, replicate, gather, and the reduction in backward.
COPIES_OF_DP = 4
# Of Paced: its parameters are gathered in forward and again in backward, then gradients scattered.
COLLECTIVES_OF_FSDP = 3
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
        strategy: what spreads the model over the devices.
    """

    name: str
    overrides: tuple[str, ...]
    claims: tuple[Claim, ...]
    calm: bool = False
    alone: bool = True
    both: bool = False
    strategy: str = "ddp"


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
        (f"inject.collective_delay_s={DELAY_S}", "steps=30"),
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
        (f"inject.collective_delay_s={DELAY_S}", TWO_BUCKETS, "+model.row_s=0.004", "steps=25"),
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
        "each collective takes 50 ms longer",
        (f"inject.collective_delay_s={DELAY_S}",),
        (
            amounts_to("more exposed", by_buckets, COLLECTIVES_OF_FSDP * MS),
            amounts_to("more exposed, by calibration (gradients only)", by_calibration, MS),
            amounts_to("more overlapped", overlapped, 0.0),
            largest("exposed_communication"),
        ),
        calm=True,
        strategy="fsdp",
    ),
    Scenario(
        "each copy between devices takes 50 ms longer",
        (f"inject.collective_delay_s={DELAY_S}",),
        (
            amounts_to("more exposed", by_buckets, COPIES_OF_DP * MS),
            largest("exposed_communication"),
        ),
        calm=True,
        strategy="dp",
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
