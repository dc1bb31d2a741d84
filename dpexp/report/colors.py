"""The colours of the report's page and figures, for light and dark. Pure.

Figures are drawn in the light colours. In the page each of them becomes a CSS variable, so that
one drawing serves both themes; a light colour therefore has one name only.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shade:
    """A colour as ``#rrggbb`` on a light and on a dark page."""

    light: str
    dark: str


BACKGROUND = Shade("#ffffff", "#15181c")
RAISED = Shade("#f3f5f7", "#20252b")  # heads of tables, boxes, code
LINE = Shade("#c9d0d7", "#414951")  # rules and grids: they carry nothing
INK = Shade("#1b1f24", "#e8eaed")
MUTED = Shade("#57606a", "#a5adb8")
LINK = Shade("#0a58b5", "#7db7ff")
GOOD = Shade("#116329", "#6fd08c")
BAD = Shade("#a40e26", "#ff9a9a")
CAUTION = Shade("#7a4d00", "#f2c265")

TEXT = {
    "ink": INK,
    "muted": MUTED,
    "link": LINK,
    "good": GOOD,
    "bad": BAD,
    "caution": CAUTION,
}
# Strategies differ in lightness too, for readers who do not see the hues and for grey print.
STRATEGIES = {
    "none": Shade("#2b2b2b", "#e6e6e6"),
    "ddp": Shade("#0b4f94", "#7cb8f2"),
    "dp": Shade("#c04a00", "#f08a3c"),
    "fsdp": Shade("#1f9a6e", "#3f9c76"),
}
# What a step is spent on: neighbours in a stack differ in lightness.
PARTS = {
    "data": Shade("#5f6b7a", "#9aa7b8"),
    "transfer": Shade("#87929f", "#6b7887"),
    "forward": Shade("#0d4a88", "#4f93d6"),
    "backward": Shade("#4a8fd4", "#a6cff7"),
    "exposed_communication": Shade("#bf4b02", "#f08b3d"),
    "waiting": Shade("#cc7c10", "#ffc46b"),
    "optimizer": Shade("#1f7a5a", "#58bd95"),
    "other": Shade("#9a6aa8", "#a27ab3"),
}


def variables() -> dict[str, Shade]:
    """Every colour by the name of its CSS variable."""
    surfaces = {"background": BACKGROUND, "raised": RAISED, "line": LINE}
    strategies = {f"strategy-{name}": shade for name, shade in STRATEGIES.items()}
    parts = {f"part-{name.replace('_', '-')}": shade for name, shade in PARTS.items()}
    return surfaces | TEXT | strategies | parts


def strategy_color(strategy: str) -> str:
    """The light colour of a strategy's curves; that of plain text for an unknown one."""
    return STRATEGIES.get(strategy, INK).light


def luminance(color: str) -> float:
    """Relative luminance of ``#rrggbb``, 0 to 1, as WCAG defines it."""
    channels = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in channels
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours, 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
